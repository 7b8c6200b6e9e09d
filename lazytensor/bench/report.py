"""Figures of lanes become ratios, goals, tables and files.

A ratio is the median of the ratios within each turn: two systems that ran within the same second saw the same machine.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .runner import CUT_OFF
from .worker import LOSSES

Result = Mapping[str, Any]

# Ten steps of float32 training in another order of operations stay within this.
LOSS_TOLERANCE = 1e-3
MISSING = "-"


def find(results: Iterable[Result], system: str, workload: str) -> Result | None:
    """The lane of a system on a workload, if it ran to its end."""
    for result in results:
        if (result["system"], result["workload"]) == (system, workload) and result["error"] is None:
            return result
    return None


def ratio(results: Iterable[Result], system: str, baseline: str, workload: str, figure: str = "step_s") -> float | None:
    """How many times the baseline's figure the system's is; below 1 is faster."""
    results = list(results)
    ours, theirs = find(results, system, workload), find(results, baseline, workload)
    if ours is None or theirs is None:
        return None
    ratios: list[float] = [a[figure] / b[figure] for a, b in zip(ours["turns"], theirs["turns"], strict=True)]
    return statistics.median(ratios)


def geometric_mean(values: Iterable[float | None]) -> float | None:
    """Over the values there are."""
    known = [math.log(value) for value in values if value]
    return math.exp(statistics.fmean(known)) if known else None


def goal(what: str, value: float | None, at_most: float) -> dict[str, Any]:
    """A ratio beside what it should be; `reached` is None where it could not be measured."""
    return {"what": what, "value": value, "at_most": at_most, "reached": None if value is None else value <= at_most}


def machine() -> dict[str, Any]:
    """Where the figures come from."""
    cpu = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": os.getloadavg()[0],
    }


def finish(result: dict[str, Any], out: Path | None) -> None:
    """Note how busy the machine was at the end, and write the result if a path was given."""
    result["machine"]["load_after"] = os.getloadavg()[0]
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


def heading(result: Result, console: Console) -> None:
    """One line on the machine that the figures come from."""
    there = result["machine"]
    console.print(
        f"{there['cpu']}, {there['cores']} cores, torch {there['torch']}, Python {there['python']}, "
        f"load {there['load']:.1f} before and {there['load_after']:.1f} after",
        style="dim",
    )
    if there["load"] > there["cores"] / 2:
        console.print(
            "The machine was busy with other things: take these figures for a rough impression.", style="yellow"
        )


def goals(result: Result, console: Console) -> None:
    """The ratios to be reached, reached or not."""
    table = Table("ratio", "measured", "at most", "", title="Goals", title_justify="left", box=SIMPLE_HEAD)
    for entry in result["goals"]:
        mark = {True: "[green]reached", False: "[red]not reached", None: "[dim]not measured"}[entry["reached"]]
        table.add_row(entry["what"], times(entry["value"]), f"{entry['at_most']:.2f}", mark)
    console.print(table)


def times(value: float | None) -> str:
    """A ratio or a small figure, two digits behind the point while those tell something."""
    return MISSING if value is None else f"{value:.2f}" if value < 10 else f"{value:.0f}"


def duration(seconds: float | None) -> str:
    """A time with three digits and the unit that fits."""
    if seconds is None:
        return MISSING
    if seconds == 0:
        return "0"
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * scale >= 1 or unit == "µs":
            return f"{seconds * scale:.3g} {unit}" if seconds * scale < 1000 else f"{seconds * scale:.0f} {unit}"
    raise AssertionError("the last unit takes every time")


def lanes_tables(
    lanes: Sequence[Result], columns: Mapping[str, Callable[[Result], str]], title: Callable[[str], str] = str
) -> Iterator[Table]:
    """A table for each workload with a row for each system; under it, why a system has failed there."""
    for workload in dict.fromkeys(lane["workload"] for lane in lanes):
        table = Table(title=title(workload), title_justify="left", caption_justify="left", box=SIMPLE_HEAD)
        table.add_column("system", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right")
        failures: dict[str, list[str]] = {}
        for lane in lanes:
            if lane["workload"] != workload:
                continue
            if lane["error"]:
                failures.setdefault(lane["error"], []).append(lane["system"])
                table.add_row(
                    lane["system"], "[red]cut off[/]" if lane["error"].startswith(CUT_OFF) else "[red]failed[/]"
                )
            else:
                table.add_row(lane["system"], *(column(lane) for column in columns.values()))
        table.caption = "\n".join(f"{', '.join(names)}: {escape(error)}" for error, names in failures.items()) or None
        yield table


def ratio_column(lanes: Sequence[Result], baseline: str, figure: str = "step_s") -> Callable[[Result], str]:
    """A column of ratios to a baseline's figure on the same workload."""
    return lambda lane: times(ratio(lanes, lane["system"], baseline, lane["workload"], figure))


def loss_difference(lanes: Iterable[Result], lane: Result, baseline: str) -> float | None:
    """The largest relative difference of the losses of the first steps."""
    other = find(lanes, baseline, lane["workload"])
    if other is None:
        return None
    ours, theirs = lane["losses"], other["losses"]
    pairs = [(ours[i], theirs[i]) for i in map(str, range(LOSSES)) if i in ours and i in theirs]
    return max((abs(a - b) / max(abs(b), 1e-6) for a, b in pairs), default=None)


def loss_column(lanes: Sequence[Result], baseline: str) -> Callable[[Result], str]:
    """A column of loss differences; what rounding cannot explain is marked."""

    def cell(lane: Result) -> str:
        difference = loss_difference(lanes, lane, baseline)
        if difference is None:
            return MISSING
        text = f"{difference:.1e}" if difference else "0"
        return f"[red]{text}[/]" if difference > LOSS_TOLERANCE else text

    return cell


def count_columns(*names: str) -> dict[str, Callable[[Result], str]]:
    """Columns of what a system counted."""

    def column(name: str) -> Callable[[Result], str]:
        return lambda lane: str(lane["counters"].get(name, MISSING))

    return {name: column(name) for name in names}
