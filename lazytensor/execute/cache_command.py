"""``lazytensor cache``: list, prune, export and import what is compiled and kept on disk; build the extension."""

from __future__ import annotations

import json
import tarfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="What is compiled and kept on disk: list, build, prune, export, import.",
)
Json = Annotated[bool, typer.Option("--json", help="Print plain data.")]


def _rows() -> list[dict[str, Any]]:
    from lazytensor.backend import diskcache

    return [
        {"key": e.key, "bytes": e.bytes, "used": e.used, **{k: e.about.get(k) for k in ("operations", "line", "torch")}}
        for e in diskcache.entries()
    ]


@app.command("list")
def list_entries(as_json: Json = False) -> None:
    """List the entries, least recently used first."""
    from rich.console import Console
    from rich.table import Table

    from lazytensor.backend import diskcache

    rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows))
        return
    table = Table("entry", "operations", "kB", "used", "begins at")
    for row in rows:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(row["used"]))
        table.add_row(row["key"][:12], str(row["operations"]), f"{row['bytes'] / 1e3:.0f}", used, str(row["line"]))
    console = Console()
    console.print(table)
    console.print(f"{len(rows)} entries, {sum(r['bytes'] for r in rows) / 1e6:.1f} MB in {diskcache.root()}")


@app.command()
def build(as_json: Json = False) -> None:
    """Compile the recorder and runner for this torch now; a program that runs for a while has it done on the side."""
    from lazytensor.native import build as native

    try:
        path = native.build()
    except RuntimeError as problem:
        raise typer.BadParameter(str(problem)) from None
    typer.echo(json.dumps({"path": str(path)}) if as_json else f"the compiled recorder and runner are in {path}")


@app.command()
def prune(
    to_bytes: Annotated[int, typer.Option("--to-bytes", min=0, help="How many bytes may stay.")] = 0,
    as_json: Json = False,
) -> None:
    """Remove the least recently used entries until the rest fits; all of them by default."""
    from lazytensor.backend import diskcache

    removed = diskcache.prune(to_bytes)
    data = {"removed": len(removed), "bytes": sum(e.bytes for e in removed)}
    typer.echo(json.dumps(data) if as_json else f"removed {data['removed']} entries, {data['bytes'] / 1e6:.1f} MB")


@app.command("export")
def export_entries(
    archive: Annotated[Path, typer.Argument(help="The archive to write (.tar.gz).")],
    key: Annotated[list[str] | None, typer.Option("--key", help="Only this entry; may be given several times.")] = None,
) -> None:
    """Write entries into one archive, for another machine of the same kind."""
    from lazytensor.backend import diskcache

    typer.echo(f"wrote {diskcache.export(archive, key)} entries to {archive}")


@app.command("import")
def import_entries(archive: Annotated[Path, typer.Argument(exists=True, help="An archive that export wrote.")]) -> None:
    """Take the entries of an archive.  They hold compiled code: import only what you would run."""
    from lazytensor.backend import diskcache

    try:
        count = diskcache.import_archive(archive)
    except (OSError, ValueError, KeyError, tarfile.TarError) as problem:
        typer.echo(f"nothing was imported: {problem}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"imported {count} entries")
