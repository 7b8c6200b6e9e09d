"""What the diagnostics cost: warm recording and warm cuts with them on, beside the same with all of them off.

A few percent are less than the difference between two processes, so one process takes turns: some steps with the
setting `diagnostics` on, as many with it off, each turn's least time kept.  The figure is the median of the ratios.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import report

WORKLOADS = ("chain_100", "chain_1000", "mlp_adam")
AT_MOST = 1.03
STEPS = 8


def price(turns: int) -> list[dict[str, Any]]:
    """Measure in a process of its own; one row a workload."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lazytensor.bench.diagnostics", str(turns)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return [{"workload": name, "error": done.stderr.strip().splitlines()[-1]} for name in WORKLOADS]
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def goals(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Diagnostics may cost three percent."""
    return [
        report.goal(f"{row['workload']}: {word} with diagnostics, of without", row.get(key), AT_MOST)
        for row in rows
        for key, word in (("record", "recording"), ("cut", "cut + run"))
    ]


def render(rows: list[dict[str, Any]], console: Console) -> None:
    """The table."""
    title = "Diagnostics: µs a step with them (without)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
    for column in ("workload", "record", "ratio", "cut + run", "ratio"):
        table.add_column(column)
    for row in rows:
        if "error" in row:
            table.add_row(row["workload"], row["error"])
            continue
        cells = [f"{row[k + '_on_us']:.0f} ({row[k + '_off_us']:.0f})" for k in ("record", "cut")]
        table.add_row(row["workload"], cells[0], f"{row['record']:.3f}", cells[1], f"{row['cut']:.3f}")
    console.print(table)


def _measure(name: str, turns: int) -> dict[str, Any]:
    import lazytensor as lt

    from . import workloads

    workload = workloads.build(name, "ltc")

    def timed() -> tuple[int, int]:
        before = time.process_time_ns()
        loss = workload.step()
        recorded = time.process_time_ns()
        lt.sync(wait=True)
        done = time.process_time_ns()
        del loss
        return recorded - before, done - recorded

    for _ in range(STEPS):
        timed()
    least: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for turn in range(turns):
        gc.collect()
        for on in (bool(turn % 2), not turn % 2):
            with lt.settings.scope(diagnostics=on):
                rows = [timed() for _ in range(STEPS)]
            least[on].append((min(r[0] for r in rows), min(r[1] for r in rows)))
    row: dict[str, Any] = {"workload": name}
    for index, key in enumerate(("record", "cut")):
        with_them, without = [t[index] for t in least[True]], [t[index] for t in least[False]]
        row |= {f"{key}_on_us": min(with_them) / 1e3, f"{key}_off_us": min(without) / 1e3}
        row[key] = statistics.median(a / b for a, b in zip(with_them, without, strict=True))
    return row


if __name__ == "__main__":
    gc.disable()
    print(json.dumps([_measure(name, int(sys.argv[1])) for name in WORKLOADS]))
