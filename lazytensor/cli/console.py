"""How every command talks: results on stdout, everything else on stderr, JSON when a machine asks."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

out = Console()
err = Console(stderr=True)

# Exit codes, the same for every command; typer itself gives 2 to a wrong command line.
FINE = 0
FAILED = 1

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")]


def quiet() -> None:
    """Keep lazytensor's log off the screen: for commands whose own words say it all."""
    logging.getLogger("lazytensor").setLevel(logging.ERROR)


def print_json(data: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(data, indent=2, default=str))


@contextmanager
def progress(total: int | None, what: str) -> Iterator[tuple[Progress, Any]]:
    """A bar on stderr for anything that may take more than two seconds; it leaves no trace."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=err, transient=True) as bar:
        yield bar, bar.add_task(what, total=total)
