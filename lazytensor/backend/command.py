"""``lazytensor backends``: which backends there are, and how well one of them behaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    name: Annotated[
        str | None, typer.Argument(help="Look at this backend: its behaviours and the ops it takes.")
    ] = None,
    op: Annotated[
        list[str] | None, typer.Option(help="The op_db entries for the table of ops; repeatable. Default: all.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write what is shown as JSON to this file as well.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")] = False,
) -> None:
    """List the backends with their devices, versions and options; with a NAME, check it and show the ops it takes by
    itself.
    """
    from rich.console import Console

    console = Console(highlight=False, quiet=as_json)
    if name is None:
        found: Any = _list(console)
        failed = 0
    else:
        found, failed = check(name, op, console)
    text = json.dumps(found, indent=1)
    if out is not None:
        out.write_text(text + "\n")
    if as_json:
        print(text)
    raise typer.Exit(1 if failed else 0)


def _list(console: Any) -> list[dict[str, Any]]:
    from rich.table import Table

    from lazytensor import settings
    from lazytensor.backend import registry

    found = [registry.describe(name) for name in registry.backends()]
    table = Table("backend", "from", "version", "devices", "options", box=None, pad_edge=False)
    for info in found:
        options = ", ".join(f"{key}={value}" if value else key for key, value in info.options.items())
        mark = " (in force)" if info.name == settings.backend else ""
        table.add_row(
            info.name + mark,
            info.origin,
            info.version,
            ", ".join(info.devices) or f"cannot be loaded: {info.problem}",
            options,
        )
    console.print(table)
    return [info._asdict() for info in found]


def check(name: str, entries: list[str] | None, console: Any) -> tuple[dict[str, Any], int]:
    """Run the behaviours and the coverage of ops, print both; what was found, and how many behaviours are broken."""
    from rich.table import Table

    from lazytensor.conformance import suite

    result = suite.run(name, entries or None)
    behaviours = result["behaviours"]
    for finding in behaviours:
        mark = "[green]✓[/green]" if finding["kept"] else "[red]✗[/red]"
        console.print(f"{mark} {finding['group']}: {finding['name']}")
        if finding["detail"]:
            console.print(f"    {finding['detail']}"[:600], markup=False)
    broken = sum(not finding["kept"] for finding in behaviours)
    table = Table("op", suite.NATIVE, suite.DECOMPOSED, suite.INTERPRETED, suite.FALLBACK, box=None, pad_edge=False)
    for op, count in result["coverage"].items():
        kinds = (suite.NATIVE, suite.DECOMPOSED, suite.INTERPRETED, suite.FALLBACK)
        table.add_row(op, *[str(count[kind]) if kind in count else "" for kind in kinds])
    console.print(table)
    native = sum(set(count) == {suite.NATIVE} for count in result["coverage"].values())
    kept = f"{len(behaviours) - broken} of {len(behaviours)} behaviours kept"
    console.print(f"{kept}; {native} of {len(result['coverage'])} ops native")
    return result, broken
