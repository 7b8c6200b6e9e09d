"""``lazytensor conformance BACKEND``: PyTorch's own samples on ltc with a backend, against CPU eager."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer


def command(
    backend: Annotated[str, typer.Argument(help="The backend to check.")] = "reference",
    all: Annotated[bool, typer.Option("--all", help="Every sample, form and dtype (a long run).")] = False,
    op: Annotated[
        list[str] | None, typer.Option(help="Only this entry of op_db, its variant included; repeatable.")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only this dtype; repeatable. Default: float32, or all six.")
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples of each entry, unless --all.")] = 2,
    every: Annotated[int, typer.Option(help="Make every n-th check only.")] = 1,
    jobs: Annotated[int, typer.Option(help="How many processes.")] = 2,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Begin again instead of continuing an interrupted run.")
    ] = False,
    state: Annotated[Path | None, typer.Option(help="Where the run's state is kept.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the table (operator × dtype) as JSON to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout instead of text.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the table as a page.")] = None,
) -> None:
    """Check a backend with PyTorch's own samples: every result, gradient, stride and error must be CPU eager's."""
    from rich.console import Console

    from lazytensor import settings
    from lazytensor.backend import registry
    from lazytensor.conformance import longrun, opinfo, suite, table

    registry.factory(backend)  # a name that no one knows is told now, not by every process
    where = state or settings.cache_directory() / "conformance" / f"{backend}{'-all' if all else ''}.jsonl"
    names = [str(d).removeprefix("torch.") for d in opinfo.DTYPES]
    chosen = dtype or (names if all else names[:1])
    for name in [n for n in chosen if n not in names]:
        raise typer.BadParameter(f"{name} is none of {', '.join(names)}", param_hint="--dtype")
    for name in [n for n in op or () if n not in opinfo.entries()]:
        raise typer.BadParameter(f"op_db has no entry {name}", param_hint="--op")
    forms = opinfo.FORMS if all else ("forward",)
    chunks = plan(op, chosen, None if all else samples, forms, every)
    kept = longrun.State(where, f"ltc with the backend {backend}", fresh)
    _run_with_progress(chunks, kept, longrun.worker_command(backend), jobs)
    keys = {chunk.key[:2] for chunk in chunks}
    found = table.table([r for r in kept.rows if (r["op"], r["dtype"]) in keys], kept.header)
    broken = [] if op else suite.broken(backend, found)
    if out is not None:
        table.write_json(found, out)
    if as_json:
        print(table.text(found))
    if html is not None:
        table.write_html(found, html)
    told = Console(highlight=False, quiet=as_json)
    for finding in broken:
        told.print(f"[red]✗[/red] {finding['group']}: {finding['name']}: ", end="")
        told.print(finding["detail"][:300], markup=False)
    wrong = [(c, f) for c in found["cells"] for f in c["failures"]]
    for cell, failure in wrong[:40]:
        line = f"{cell['op']} {cell['dtype']}, {failure['form']} {failure['sample']}: {failure['status']}"
        told.print(f"[red]✗[/red] {line}: ", end="")
        told.print(str(failure.get("detail", ""))[:300], markup=False)
    if len(wrong) > 40:
        told.print(f"… and {len(wrong) - 40} more; --out has all of them")
    for summed in table.summary(found):
        told.print(summed)
    if not op:
        told.print(f"{len(found['behaviours']) - len(broken)} of {len(found['behaviours'])} behaviours kept")
    raise typer.Exit(1 if wrong or broken else 0)


def plan(ops: list[str] | None, dtypes: list[str], limit: int | None, forms: tuple[str, ...], every: int) -> list[Any]:
    """The chunks of a run; the entries that take longest come first, so that no process is left alone at the end."""
    import torch

    from lazytensor.conformance import longrun, opinfo

    known = opinfo.entries()
    chunks = [
        longrun.Chunk(name, dtype, limit, forms, every=every)
        for name, entry in known.items()
        for dtype in dtypes
        if (not ops or name in ops) and opinfo.supports(entry, getattr(torch, dtype))
    ]
    return sorted(chunks, key=lambda chunk: not chunk.op.startswith(_SLOW))


_SLOW = (
    "logspace",
    "nn.functional.linear_cross_entropy",
    "nn.functional.interpolate",
    "nn.functional.max_pool",
    "nanquantile",
)


def _run_with_progress(chunks: list[Any], state: Any, worker: list[str], jobs: int) -> None:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from lazytensor.conformance import longrun
    from lazytensor.conformance.table import GOOD

    console = Console(file=sys.stderr)
    counts: Counter[str] = Counter()
    lock = threading.Lock()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        done = sum(chunk.key in state.finished for chunk in chunks)
        task = progress.add_task("starting", total=len(chunks), completed=done)

        def told(chunk: Any, rows: list[dict[str, Any]]) -> None:
            with lock:
                counts.update("good" if row["status"] in GOOD else "bad" for row in rows)
                text = f"{counts['good']:,} agree, {counts['bad']:,} differ  {chunk.op} {chunk.dtype}"
                progress.update(task, advance=1, description=text)

        longrun.run(chunks, state, worker, jobs, told=told)
