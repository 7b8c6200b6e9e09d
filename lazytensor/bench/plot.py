"""The models benchmark as a picture: steady steps and first steps of each system, as ratios to eager.

matplotlib is an extra; without it there is no picture, and the tables are complete all the same.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from . import report, runner


def draw(result: dict[str, Any], stem: Path) -> list[Path]:
    """Write `stem`.png and `stem`.svg; the list is empty where matplotlib is not installed."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ModuleNotFoundError:
        return []
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    lanes = result["lanes"]
    workloads = list(dict.fromkeys(lane["workload"] for lane in lanes))
    ran = dict.fromkeys(lane["system"] for lane in lanes if lane["error"] is None)
    systems = [name for name in ran if name != runner.EAGER.name]
    figure, axes = pyplot.subplots(
        2, 1, figsize=(max(9.0, 1.5 + 1.2 * len(workloads)), 8), sharex=True, layout="constrained"
    )
    panels = {"steady step, of eager's": "step_s", "first step, of eager's first": "first_s"}
    width = 0.8 / max(len(systems), 1)
    for axis, (title, key) in zip(axes, panels.items(), strict=True):
        for i, system in enumerate(systems):
            heights = {w: height for w in workloads if (height := ratio(lanes, system, w, key)) is not None}
            places = [workloads.index(w) + (i - (len(systems) - 1) / 2) * width for w in heights]
            # Bars grow from 1 so that faster points down and slower points up on the logarithmic axis.
            axis.bar(places, [h - 1 for h in heights.values()], width, bottom=1, label=system, color=f"C{i}")
        axis.axhline(1.0, color="black", linewidth=0.8)
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter("{x:g}")
        bottom, top = axis.get_ylim()
        axis.yaxis.set_minor_formatter("{x:g}" if top / bottom < 50 else "")
        axis.tick_params(axis="y", which="minor", labelsize="x-small")
        axis.set_xlim(-0.5, len(workloads) - 0.5)
        axis.set_ylabel(title)
        axis.grid(axis="y", alpha=0.3)
    axes[1].set_xticks(range(len(workloads)), workloads, rotation=30, ha="right")
    figure.legend(
        *axes[0].get_legend_handles_labels(), loc="outside upper center", ncols=len(systems), fontsize="small"
    )
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return paths


def ratio(lanes: list[dict[str, Any]], system: str, workload: str, key: str) -> float | None:
    """The height of a bar: by turns for steady steps; a first step happens only once."""
    if key == "step_s":
        return report.ratio(lanes, system, runner.EAGER.name, workload)
    ours, theirs = report.find(lanes, system, workload), report.find(lanes, runner.EAGER.name, workload)
    return ours[key] / theirs[key] if ours and theirs else None
