"""``lazytensor report``: the data of a run as a page."""

from __future__ import annotations

import json
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer


def command(
    run: Annotated[
        Path, typer.Argument(help='The data of a run, as lt.report("run.json") wrote it.', metavar="RUN.JSON")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="Where to write the page. [dim]\\[default: run.html][/dim]")
    ] = None,
    show: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Turn the data of a run into a page: one file that needs no server and no network.

    In the program, lt.report("run.json") writes the data, and lt.report("run.html") the page at once.
    """
    from lazytensor.inspect import report

    try:
        document = json.loads(run.read_text())
        known = document["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"{run} is not the data of a run: {type(error).__name__}: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    if known != report.FORMAT:
        print(f"{run} has format {known}; this lazytensor reads format {report.FORMAT}", file=sys.stderr)
        raise typer.Exit(1)
    target = out or run.with_suffix(".html")
    target.write_text(report.page(document))
    print(target)
    if show:
        webbrowser.open(target.resolve().as_uri())
