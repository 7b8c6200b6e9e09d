"""What the code generator is worth, and what it costs: `lazytensor bench codegen`.

Two tables. Microseconds of CPU to record one op by its generated kernel, and by one generic kernel that goes through
the schema at each call: both take turns in one process, on structure that is known, which is the hot path. And the
generator itself: seconds and megabytes to generate the whole device with an empty cache, and what a warm import costs
over torch's.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from . import report, runner

CALLS = 200
SECONDS, MEGABYTES, IMPORT_SECONDS = 5.0, 500.0, 0.3

_COLD = """
import json, resource, time, torch
before, cpu = time.perf_counter(), time.process_time()
import lazytensor
print(json.dumps({"wall_s": time.perf_counter() - before, "cpu_s": time.process_time() - cpu,
    "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}))
"""


def run(quick: bool = False, out: Path | None = None, console: Console | None = None) -> dict[str, Any]:
    """Measure everything; `quick` takes fewer turns."""
    turns = 7 if quick else 25
    result: dict[str, Any] = {"bench": "codegen", "machine": report.machine()}
    with runner.progress(console, 3) as say:
        say("generating the device", 0)
        result["generator"] = generator(3 if quick else 7)
        say("recording", 1)
        result["ops"] = per_op(turns)
        say("done", 2)
    gains = [row["gain"] for row in result["ops"]]
    result["gain"] = report.geometric_mean(gains)
    made = result["generator"]
    result["goals"] = [
        report.goal("generating the device, CPU seconds", made["cold"]["cpu_s"], SECONDS),
        report.goal("generating the device, megabytes", made["cold"]["peak_mb"], MEGABYTES),
        report.goal("a warm import over torch's, CPU seconds", made["warm"]["cpu_s"], IMPORT_SECONDS),
    ]
    report.finish(result, out)
    return result


def generator(turns: int) -> dict[str, Any]:
    """Import with an empty cache once, and with a full one several times, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        cold = _import(folder)
        warm = [_import(folder) for _ in range(turns)]
        found = list(Path(folder).glob("kernels-*/*.py"))
        files = {path.name: path.stat().st_size for path in found}
        lines = {path.name: path.read_bytes().count(b"\n") for path in found}
    middle = {key: statistics.median(each[key] for each in warm) for key in warm[0]}
    return {"cold": cold, "warm": middle, "files": files, "lines": lines}


def _import(folder: str) -> dict[str, float]:
    environment = os.environ | {"LAZYTENSOR_CACHE_DIR": folder, "PYTHONPYCACHEPREFIX": folder}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has its bytecode
    done = subprocess.run([sys.executable, "-c", _COLD], capture_output=True, text=True, env=environment, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def programs() -> dict[str, tuple[Callable[[], Any], str | None]]:
    """What is recorded for each op, and the functional form of those that write."""
    import torch

    x, y = torch.ones(8, 8, device="ltc"), torch.ones(8, 8, device="ltc")
    bias, aten = torch.ones(8, device="ltc"), torch.ops.aten
    return {
        "add.Tensor": (lambda: aten.add.Tensor(x, y), None),
        "mul.Tensor, a number": (lambda: aten.mul.Tensor(x, 1.5), None),
        "add_.Tensor": (lambda: aten.add_.Tensor(x, y), "aten::add.Tensor"),
        "addcmul_": (lambda: aten.addcmul_.default(x, y, y, value=0.5), "aten::addcmul"),
        "mm": (lambda: aten.mm.default(x, y), None),
        "addmm": (lambda: aten.addmm.default(bias, x, y), None),
        "relu": (lambda: aten.relu.default(x), None),
        "sum.dim_IntList": (lambda: aten.sum.dim_IntList(x, [1], True), None),
        "cat": (lambda: aten.cat.default([x, y], 1), None),
        "transpose.int": (lambda: aten.transpose.int(x, 0, 1), None),
        "topk": (lambda: aten.topk.default(x, 3), None),
        "native_layer_norm": (lambda: aten.native_layer_norm.default(x, [8], None, None, 1e-5), None),
        "convolution": (_convolution(torch), None),
    }


def _convolution(torch: Any) -> Callable[[], Any]:
    image, weight = torch.ones(1, 3, 8, 8, device="ltc"), torch.ones(4, 3, 3, 3, device="ltc")
    convolve = torch.ops.aten.convolution.default
    return lambda: convolve(image, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def per_op(turns: int) -> list[dict[str, Any]]:
    """Microseconds per call of each op by both kernels, alternating, and how many times faster the generated one is."""
    import lazytensor as lt

    rows = []
    for title, (program, functional) in programs().items():
        name = f"aten::{title.partition(',')[0]}"
        figures: dict[str, list[float]] = {"generated": [], "generic": []}
        for turn in range(-2, turns):  # the first two find new structure
            for kind, values in figures.items():
                library = _generic(name, functional) if kind == "generic" else None
                lt.sync()
                began = time.thread_time()  # so that what else the machine does is not counted
                for _ in range(CALLS):
                    program()
                spent = time.thread_time() - began
                lt.sync()
                if library is not None:
                    library._destroy()
                if turn >= 0:
                    values.append(spent / CALLS * 1e6)
        ratios = [b / a for a, b in zip(figures["generated"], figures["generic"], strict=True)]
        rows.append(
            {"op": title, **{f"{kind}_us": statistics.median(v) for kind, v in figures.items()}}
            | {f"{kind}_min_us": min(v) for kind, v in figures.items()}
            | {"gain": statistics.median(ratios)}
        )
    return rows


_kernels: dict[str, Any] = {}


def _generic(name: str, functional: str | None) -> Any:
    """The generic kernel in force for one op, until the library is destroyed."""
    import warnings

    import torch

    from lazytensor.codegen.generic import GenericKernel
    from lazytensor.trace.ir import Op

    if name not in _kernels:
        _kernels[name] = GenericKernel(Op(name).overload, functional)
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.m.impl(name, "PrivateUse1", _kernels[name], False)
    return library


def render(result: dict[str, Any], console: Console) -> None:
    """Print what `run` has found: tables, then goals."""
    report.heading(result, console)
    title = "µs to record one op, median (least)"
    table = Table(
        "op", "generated kernel", "generic kernel", "gain", title=title, title_justify="left", box=SIMPLE_HEAD
    )
    for row in result["ops"]:
        cells = [f"{row[f'{k}_us']:.2f} ({row[f'{k}_min_us']:.2f})" for k in ("generated", "generic")]
        table.add_row(row["op"], *cells, f"{row['gain']:.2f}×")
    table.add_row("[bold]geometric mean", "", "", f"[bold]{report.times(result['gain'])}×")
    console.print(table)
    made = result["generator"]
    table = Table("", "wall", "CPU", "peak", title="The generator", title_justify="left", box=SIMPLE_HEAD)
    for what, label in (("cold", "import, empty cache: the whole device"), ("warm", "import, warm cache (over torch)")):
        each = made[what]
        table.add_row(
            label, report.duration(each["wall_s"]), report.duration(each["cpu_s"]), f"{each['peak_mb']:.0f} MB"
        )
    console.print(table)
    for name, lines in sorted(made["lines"].items()):
        console.print(f"{name}: {lines:,} lines, {made['files'][name] / 1e6:.1f} MB", style="dim")
    report.goals(result, console)
