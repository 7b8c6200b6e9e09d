"""The first steps of new processes, eager's and `auto`'s in turns: `lazytensor bench first`.

One process is alive at a time. A first step is taken once in a process, so a figure needs as many processes; the ratio
is the median of those of neighbours, which saw the same machine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import report, runner
from .models import WORKLOADS
from .runner import AUTO, EAGER

TURNS = 9
QUICK_TURNS = 3
AT_MOST = 1.5


def run(
    quick: bool = False, out: Path | None = None, console: Console | None = None, workloads: Sequence[str] = ()
) -> dict[str, Any]:
    """Measure the workloads, all of them if none is named; `quick` takes fewer turns."""
    result: dict[str, Any] = {"bench": "first", "machine": report.machine(), "quick": quick, "lanes": []}
    chosen = workloads or WORKLOADS
    with runner.progress(console, len(chosen)) as say:
        for workload in chosen:
            found = runner.first_steps(
                (EAGER, AUTO), workload, QUICK_TURNS if quick else TURNS, lambda text: say(text, 0)
            )
            result["lanes"].append({"workload": workload, "seconds": found, "ratio": ratio(found)})
            say(f"{workload}: done", 1)
    result["goals"] = [
        report.goal(f"first step of {lane['workload']}, of eager's", lane["ratio"], AT_MOST) for lane in result["lanes"]
    ]
    report.finish(result, out)
    return result


def ratio(found: dict[str, list[float]]) -> float | None:
    """The median of `auto`'s first step over that of eager which came just before; none if a process has failed."""
    eager, auto = found[EAGER.name], found[AUTO.name]
    if not eager or len(eager) != len(auto):
        return None
    return statistics.median(ours / theirs for theirs, ours in zip(eager, auto, strict=True))


def render(result: dict[str, Any], console: Console) -> None:
    """Print what `run` has found: a row for each workload, then goals."""
    report.heading(result, console)
    table = Table("workload", "eager", "auto", "least of eager", "least of auto", box=SIMPLE_HEAD)
    for lane in result["lanes"]:
        rows = [lane["seconds"][system.name] for system in (EAGER, AUTO)]
        figures = [report.duration(pick(row) if row else None) for pick in (statistics.median, min) for row in rows]
        table.add_row(lane["workload"], *figures)
    console.print(table)
    report.goals(result, console)
