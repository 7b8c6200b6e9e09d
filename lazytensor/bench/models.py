"""Every workload on every system, from the first step to steady speed: `lazytensor bench models`.

torch.compile compiles the model and the optimizer's step. A lane has a time budget for warming up: what is still busy
with one step at its end is cut off and shown as such; where only a compiler works beside the steps, nothing is run
until it has ended, at most as long again, so that steady figures are those of compiled code. Every lane starts with
empty caches on disk; afterwards `auto` is started again with the caches it left, three times, to show how fast a
restarted program is at full speed; eager, too, needs steps for that, which stand beside. The first steps of eager and
of `auto` are also taken in new processes, one at a time and in turns: in the race one lane has to go first, right after
all the others have started.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import plot, report, runner
from .runner import AUTO, COMPILE, EAGER, INDUCTOR, LAZY, REFERENCE, TS

SYSTEMS = (EAGER, COMPILE, LAZY, REFERENCE, TS, INDUCTOR, AUTO)
AGAIN = "ltc auto, restarted"
WORKLOADS = (
    "mlp_adam",
    "resnet_sgd",
    "gpt_adamw",
    "gpt_sdpa_adamw",
    "transformer_layer_adamw",
    "lstm",
    "elementwise_chain",
    "layernorm_gelu",
    "control_flow",
    "tiny_ops",
    "chain_1000",
)
BUDGET = 180.0
# --quick: the workloads it takes, with their budgets, and the moment by which all warming up is over; no workload is
# begun after it.
QUICK = {"mlp_adam": 30.0, "elementwise_chain": 20.0, "tiny_ops": 8.0}
QUICK_SECONDS = 150.0
RESTARTS = 3  # of which the median counts
FIRST_STEPS = 5  # new processes of which each of eager and auto has the median of their first steps


def run(
    quick: bool = False,
    out: Path | None = None,
    console: Console | None = None,
    workloads: Sequence[str] = (),
    budget: float = BUDGET,
    picture: Path | None = None,
) -> dict[str, Any]:
    """Measure; `picture` is the path, without a suffix, of the plot's PNG and SVG."""
    plan = QUICK if quick else dict.fromkeys(WORKLOADS, budget)
    plan = {name: plan.get(name, budget) for name in workloads or plan}
    deadline = time.monotonic() + QUICK_SECONDS if quick else math.inf
    result: dict[str, Any] = {"bench": "models", "machine": report.machine(), "quick": quick, "lanes": [], "again": []}
    with runner.progress(console, len(plan)) as say:
        for workload, seconds in plan.items():
            lanes, again = measure(workload, seconds, deadline, quick, lambda text: say(text, 0))
            result["lanes"] += lanes
            result["again"] += again
            say(f"{workload}: done", 1)
    result["goals"] = goals(result)
    result["pictures"] = [path.name for path in plot.draw(result, picture)] if picture else []
    report.finish(result, out)
    return result


def measure(
    workload: str, budget: float, deadline: float, quick: bool, say: Callable[[str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All systems on one workload, and `auto` again with warm caches."""
    if time.monotonic() > deadline:
        return [
            {"system": s.name, "workload": workload, "error": f"{runner.CUT_OFF}: no time left"} for s in SYSTEMS
        ], []
    with tempfile.TemporaryDirectory(prefix="lazytensor-bench-", ignore_cleanup_errors=True) as caches:
        kept = dataclasses.replace(AUTO, environment=runner.fresh_caches(Path(caches)))
        systems = [kept if system is AUTO else system for system in SYSTEMS]
        with runner.Race([(system, workload) for system in systems], say, deadline) as race:
            race.warm(seconds=0.5 if quick else 2.0, budget=budget, rest=not quick)
            race.alternate(turns=5 if quick else 15, seconds=0.1 if quick else 0.4)
        lanes = race.results()
        for lane in lanes:
            if "step_peak_mb" in lane:
                lane["step_mb"] = lane["step_peak_mb"] - lane["baseline_mb"]
        auto = report.find(lanes, AUTO.name, workload)
        if quick or auto is None:
            return lanes, []
        firsts = runner.first_steps((EAGER, AUTO), workload, FIRST_STEPS, say)
        for lane in lanes:
            seconds = firsts.get(lane["system"])
            if seconds and not lane["error"]:
                lane["first_s"], lane["first_steps_s"] = statistics.median(seconds), seconds
        return lanes, [start_again(kept, workload, budget, auto["step_s"], say)]


def start_again(
    system: runner.System, workload: str, budget: float, final: float, say: Callable[[str], None]
) -> dict[str, Any]:
    """`auto` started again and again with warm caches: the one that is the median by its steps until full speed."""
    found = []
    for number in range(RESTARTS):
        with runner.Race([(dataclasses.replace(system, name=AGAIN), workload)], say) as race:
            race.warm(seconds=2.0, budget=budget)
            if number == RESTARTS - 1:
                race.hide(turns=9, seconds=0.4)
        lane = race.results()[0]
        lane["settle_s"], lane["settle_steps"] = runner.settling(race.lanes[0].warmup, final)
        found.append(lane)
    steps = [lane["settle_steps"] for lane in found]
    last = found[-1]
    found.sort(key=lambda lane: math.inf if lane["settle_steps"] is None else lane["settle_steps"])
    return found[RESTARTS // 2] | {"all_settle_steps": steps, "of_graph_alone": last.get("of_graph_alone")}


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What `auto` should reach; where every workload should, the worst one is shown."""
    lanes = result["lanes"]
    names = list(dict.fromkeys(lane["workload"] for lane in lanes))

    def steps(baseline: runner.System) -> dict[str, float | None]:
        return {name: report.ratio(lanes, AUTO.name, baseline.name, name) for name in names}

    def figures(figure: str, chosen: Sequence[str]) -> dict[str, float | None]:
        pairs = {name: (report.find(lanes, AUTO.name, name), report.find(lanes, EAGER.name, name)) for name in chosen}
        return {name: a[figure] / b[figure] if a and b else None for name, (a, b) in pairs.items()}

    restarted: dict[str, float | None] = {lane["workload"]: lane.get("settle_steps") for lane in result["again"]}
    gpts = [lane for lane in result["again"] if lane["workload"].startswith("gpt")]
    hidden: dict[str, float | None] = {lane["workload"]: lane.get("of_graph_alone") for lane in gpts}
    big = [name for name in names if name.startswith(("gpt", "resnet"))]
    return [
        worst("step, of eager", steps(EAGER), 1.0),
        worst("step, of compile", steps(COMPILE), 1.0),
        report.goal("auto: step, of eager, geometric mean", report.geometric_mean(steps(EAGER).values()), 1 / 1.15),
        report.goal("auto: step, of compile, geometric mean", report.geometric_mean(steps(COMPILE).values()), 1 / 1.1),
        worst("step, of torch._lazy", steps(LAZY), 1 / 4),
        worst("first step, of eager's first", figures("first_s", names), 1.5),
        worst("memory of a step, of eager", figures("step_mb", big), 1.1),
        worst("steps to full speed, restarted", restarted, 3),
        worst("step, of its compiled graph alone", hidden, 1.05),
    ]


def worst(what: str, values: dict[str, float | None], at_most: float) -> dict[str, Any]:
    """The goal as its worst workload stands to it, over those that could be measured."""
    known = {name: value for name, value in values.items() if value is not None}
    if not known:
        return report.goal(f"auto: {what}", None, at_most)
    name = max(known, key=lambda key: known[key])
    return report.goal(f"auto: {what}, worst of {len(known)} ({name})", known[name], at_most)


def render(result: dict[str, Any], console: Console) -> None:
    """Print what `run` has found: tables, then goals."""
    report.heading(result, console)
    lanes = result["lanes"]
    columns = {
        "first\nstep": lambda lane: report.duration(lane["first_s"]),
        "until\n95 %": lambda lane: report.duration(lane["settle_s"]),
        "step,\nmedian": lambda lane: report.duration(lane["step_s"]),
        "least": lambda lane: report.duration(lane["min_s"]),
        "of\neager": report.ratio_column(lanes, EAGER.name),
        "of\ncompile": report.ratio_column(lanes, COMPILE.name),
        "of\ntorch._lazy": report.ratio_column(lanes, LAZY.name),
        "memory": lambda lane: f"{lane['step_mb']:.0f} MB",
        **report.count_columns("graphs", "compiled"),
        "losses\ndiffer by": report.loss_column(lanes, EAGER.name),
    }
    for table in report.lanes_tables(lanes, columns):
        console.print(table)
    if result["again"]:
        figures = ("first step", "until 95 %", "steps until then", "eager's", "step, of its graph alone")
        table = Table("workload", *figures, "error", title=AGAIN, title_justify="left", box=SIMPLE_HEAD)
        for lane in result["again"]:
            durations = [report.duration(lane.get(key)) for key in ("first_s", "settle_s")]
            shown = lane.get("of_graph_alone")
            ratio = report.MISSING if shown is None else f"{shown:.2f}"
            eager = report.find(lanes, EAGER.name, lane["workload"])
            steps = [report.MISSING if each is None else str(each["settle_steps"]) for each in (lane, eager)]
            table.add_row(lane["workload"], *durations, *steps, ratio, lane["error"])
        console.print(table)
    report.goals(result, console)
    for name in result["pictures"]:
        console.print(f"plot: {name}")
