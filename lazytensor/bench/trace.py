"""What it costs to record an op, and to cut and run what was recorded: `lazytensor bench trace`.

Three tables. Microseconds per op to record and to cut + run, on a chain of small ops and on two training steps, beside
eager and `torch._lazy`; the number of ops is that of CPU eager for all, so a ratio of figures is a ratio of steps.
`ltc in Python` records without the compiled recorder. On `torch._lazy`, recording an op that falls back runs what was
recorded before it, and that is part of recording. A warm cut, execution excluded, on chains of 100 to 100,000 nodes: it
should not grow. And very long chains, recorded, run and let go: the time per op should not grow either.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from . import diagnostics, report, runner

WORKLOADS = ("chain_1000", "mlp_adam", "transformer_layer_adamw")
SYSTEMS = (runner.EAGER, runner.LAZY, runner.LAZY_REUSE, runner.REFERENCE, runner.IN_PYTHON)
CUT_NODES = (100, 1_000, 10_000, 100_000)
PENDING_NODES = (50_000, 100_000, 200_000)
FIGURES = {"record": "record", "cut + run": "cut", "total": "total"}

Say = Callable[[str, int], None]


def run(quick: bool = False, out: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Measure everything; `quick` takes fewer turns."""
    turns = 5 if quick else 15
    with runner.progress(console, len(WORKLOADS) + 2 + len(PENDING_NODES)) as say:
        result: dict[str, Any] = {"bench": "trace", "machine": report.machine(), "ops": {}, "lanes": []}
        for workload in WORKLOADS:
            ops, lanes = per_op(workload, turns, say)
            result["ops"][workload] = ops
            result["lanes"] += lanes
        result["cut"] = cut_by_nodes(turns, say)
        result["pending"] = [row for nodes in PENDING_NODES for row in pending(nodes, say)]
        say("diagnostics", 0)
        result["diagnostics"] = diagnostics.price(2 * turns)
        say("diagnostics: done", 1)
    result["goals"] = goals(result["lanes"]) + diagnostics.goals(result["diagnostics"])
    report.finish(result, out)
    return result


def per_op(workload: str, turns: int, say: Say) -> tuple[int, list[dict[str, Any]]]:
    """The ops of a step, and each system's lane with `record_us`, `cut_us` and `total_us` per op."""
    with runner.Race([(runner.EAGER, workload)]) as race:
        say(f"{workload}: counting ops", 0)
        counted = race.lanes[0].ask("count")
    if counted is None:
        raise RuntimeError(f"eager could not run {workload}: {race.lanes[0].error}")
    ops = int(counted["ops"])
    with runner.Race([(system, workload) for system in SYSTEMS], lambda text: say(text, 0)) as race:
        race.warm(seconds=1.0, budget=60.0, wait=True)
        race.alternate(turns, seconds=0.2, wait=True)
    lanes = race.results()
    for lane in lanes:
        for turn in lane.get("turns", ()):
            turn["total_s"] = turn["record_s"] + turn["cut_s"]
        for figure in FIGURES.values():
            values = [turn[f"{figure}_s"] / ops * 1e6 for turn in lane.get("turns", ())]
            lane[f"{figure}_us"] = statistics.median(values) if values else None
            lane[f"{figure}_min_us"] = min(values, default=None)
    say(f"{workload}: done", 1)
    return ops, lanes


def cut_by_nodes(turns: int, say: Say) -> list[dict[str, Any]]:
    """The cost of a warm cut apart from executing, by the number of nodes that it cuts."""
    lanes = [(runner.REFERENCE, f"chain_{nodes}") for nodes in CUT_NODES]
    with runner.Race(lanes, lambda text: say(text, 0)) as race:
        race.warm(seconds=1.0, budget=60.0, wait=True)
        race.alternate(turns, seconds=0.2, wait=True)
    rows = []
    for nodes, lane in zip(CUT_NODES, race.results(), strict=True):
        values = [turn["collect_us"] for turn in lane.get("turns", ()) if "collect_us" in turn]
        rows.append(
            {
                "nodes": nodes,
                "error": lane["error"],
                "collect_us": statistics.median(values) if values else None,
                "collect_min_us": min(values, default=None),
            }
        )
    say("cut by nodes: done", 1)
    return rows


def pending(nodes: int, say: Say) -> list[dict[str, Any]]:
    """Seconds to record, run and let go of a chain that is all pending at once; the first time, and once warm."""
    rows = []
    for system in (runner.REFERENCE, runner.LAZY):
        with runner.Race([(system, f"chain_{nodes}")], lambda text: say(text, 0)) as race:
            lane = race.lanes[0]
            lane.allow(180.0)
            first, warm, freed = lane.round(1, wait=True), lane.round(2, wait=True), lane.ask("free")
        row: dict[str, Any] = {"system": system.name, "nodes": nodes, "error": lane.error}
        if first is not None:
            row |= {"record_s": first["record"][0], "run_s": first["cut"][0], "peak_mb": first["peak_mb"]}
        if warm is not None:
            row |= {"warm_record_s": warm["record"][-1], "warm_run_s": warm["cut"][-1]}
        if freed is not None:
            row |= {"free_s": freed["drop"] + freed["clear"]}
        rows.append(row)
    say(f"{nodes} pending: done", 1)
    return rows


def goals(lanes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What recording may cost beside `torch._lazy`."""
    ours, plain, reuse = runner.REFERENCE.name, runner.LAZY.name, runner.LAZY_REUSE.name

    def beside(other: str, workload: str, figure: str) -> float | None:
        return report.ratio(lanes, ours, other, workload, figure)

    return [
        report.goal(f"recording the chain, of {plain}", beside(plain, "chain_1000", "record_s"), 0.65),
        report.goal(f"recording the chain, of {reuse}", beside(reuse, "chain_1000", "record_s"), 1.0),
        report.goal(f"the MLP + Adam step, of {plain}", beside(plain, "mlp_adam", "total_s"), 0.25),
    ]


def render(result: dict[str, Any], console: Console) -> None:
    """Print what `run` has found: tables, then goals."""
    report.heading(result, console)
    lanes, ops = result["lanes"], result["ops"]

    def microseconds(figure: str) -> Callable[[report.Result], str]:
        return lambda lane: f"{report.times(lane[f'{figure}_us'])} ({report.times(lane[f'{figure}_min_us'])})"

    columns = {title: microseconds(figure) for title, figure in FIGURES.items()}
    for figure, baselines in (("record", SYSTEMS[1:3]), ("total", SYSTEMS[:3])):
        for name in (baseline.name for baseline in baselines):
            title = f"{figure}, of\n" + name.replace(" ", "\n")
            columns[title] = report.ratio_column(lanes, name, f"{figure}_s")
    for table in report.lanes_tables(lanes, columns, lambda name: f"{name}: µs for each of {ops[name]:,} ops (least)"):
        console.print(table)
    render_cut(result, console)
    render_pending(result, console)
    diagnostics.render(result["diagnostics"], console)
    report.goals(result, console)


def render_cut(result: dict[str, Any], console: Console) -> None:
    """The warm cut by number of nodes."""
    title = "A warm cut, execution excluded"
    table = Table("nodes", "median µs", "least µs", "error", title=title, title_justify="left", box=SIMPLE_HEAD)
    for row in result["cut"]:
        figures = [
            report.MISSING if row[key] is None else f"{row[key]:.1f}" for key in ("collect_us", "collect_min_us")
        ]
        table.add_row(f"{row['nodes']:,}", *figures, escape(row["error"] or ""))
    console.print(table)


def render_pending(result: dict[str, Any], console: Console) -> None:
    """The long chains."""
    titles = {"record_s": "record", "run_s": "run", "warm_record_s": "record, warm", "warm_run_s": "run, warm"}
    titles["free_s"] = "let go"
    table = Table("pending ops", "system", title="Long chains: time (µs per op)", title_justify="left", box=SIMPLE_HEAD)
    for name in titles.values():
        table.add_column(name, justify="right")
    table.add_column("error", style="red", overflow="fold")
    for row in result["pending"]:
        known = {key: row[key] for key in titles if key in row}
        cells = [
            f"{report.duration(known[key])} ({known[key] / row['nodes'] * 1e6:.1f})" if key in known else report.MISSING
            for key in titles
        ]
        table.add_row(f"{row['nodes']:,}", row["system"], *cells, escape(row["error"] or ""))
    console.print(table)
