"""The models of the device's tests on each backend, beside eager and `torch._lazy`: `lazytensor bench backends`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from . import report, runner

WORKLOADS = ("mlp_adam", "transformer_layer_adamw", "resnet_sgd", "lstm", "gpt_adamw")
SYSTEMS = (runner.EAGER, runner.LAZY, runner.REFERENCE, runner.TS)
# How much of torch._lazy's step the ts backend may take. On the first two, torch._lazy falls back.
TS_GOALS = {"mlp_adam": 1 / 3, "transformer_layer_adamw": 1 / 3, "resnet_sgd": 1.0}


def run(quick: bool = False, out: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Measure every model on every system; `quick` takes fewer turns."""
    result: dict[str, Any] = {"bench": "backends", "machine": report.machine(), "lanes": []}
    with runner.progress(console, len(WORKLOADS)) as say:
        for workload in WORKLOADS:
            with runner.Race([(system, workload) for system in SYSTEMS], lambda text: say(text, 0)) as race:
                race.warm(seconds=0.5 if quick else 2.0, budget=60.0)
                race.alternate(turns=5 if quick else 15, seconds=0.3)
            result["lanes"] += race.results()
            say(f"{workload}: done", 1)
    result["goals"] = [
        report.goal(
            f"{runner.TS.name} on {workload}, of {runner.LAZY.name}",
            report.ratio(result["lanes"], runner.TS.name, runner.LAZY.name, workload),
            at_most,
        )
        for workload, at_most in TS_GOALS.items()
    ]
    report.finish(result, out)
    return result


def render(result: dict[str, Any], console: Console) -> None:
    """Print what `run` has found: tables, then goals."""
    report.heading(result, console)
    lanes = result["lanes"]
    columns = {
        "first step": lambda lane: report.duration(lane["first_s"]),
        "step, median": lambda lane: report.duration(lane["step_s"]),
        "least": lambda lane: report.duration(lane["min_s"]),
        f"of\n{runner.EAGER.name}": report.ratio_column(lanes, runner.EAGER.name),
        f"of\n{runner.LAZY.name}": report.ratio_column(lanes, runner.LAZY.name),
        **report.count_columns("graphs", "fallbacks"),
        "losses\ndiffer by": report.loss_column(lanes, runner.EAGER.name),
    }
    for table in report.lanes_tables(lanes, columns):
        console.print(table)
    report.goals(result, console)
