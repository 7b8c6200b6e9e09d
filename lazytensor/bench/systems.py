"""How each measured system runs a workload: its device, its cut, what it counts.

A system is started in a process of its own, and what it needs is imported only when it starts: lazytensor and
`torch._lazy` must never meet in one process, and neither may be loaded where eager or torch.compile is measured.
"""

# ruff: noqa: D102  (what overrides a method is documented there)

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping
from typing import Any

from .workloads import Workload


class Eager:
    """PyTorch on the CPU: an op has run when it returns. The other systems override what differs."""

    device = "cpu"

    def adapt(self, workload: Workload) -> None:
        """Change a workload that was just built, before its first step."""

    def cut(self, wait: bool) -> None:
        """End a step; with `wait`, come back only when its work is done."""

    def wait(self) -> None:
        """Come back when all work handed over so far is done."""

    def collect_us(self) -> float | None:
        """What the last cut cost apart from executing, where the system can say so."""
        return None

    def busy(self) -> bool:
        """Whether work goes on beside the steps (a compilation in the background), so that speed may still change."""
        return False

    def alone(self, step: Callable[[], object], runs: int) -> float | None:
        """Seconds that the computation of a step takes by itself, nothing being recorded; the mean of so many runs.
        None for a system that does not record.
        """
        return None

    def clear(self) -> None:
        """Forget every graph and compiled computation."""

    def counters(self) -> dict[str, int]:
        """How many different `graphs`, graphs `compiled` and `fallbacks` so far; what a system has not is left out."""
        return {}


class Compiled(Eager):
    """torch.compile of the model, and of the optimizer's step."""

    def adapt(self, workload: Workload) -> None:
        import torch

        workload.forward = torch.compile(workload.model)
        if workload.update is not None:
            workload.update = torch.compile(workload.update)

    def clear(self) -> None:
        import torch

        torch.compiler.reset()

    def counters(self) -> dict[str, int]:
        from torch._dynamo.utils import counters

        inductor = counters["inductor"]
        compilations = sum(n for key, n in inductor.items() if key.startswith("fxgraph_cache_"))
        return {"graphs": counters["stats"]["unique_graphs"], "compiled": compilations}


class TorchLazy(Eager):
    """The C++ Lazy Tensor Core with its TorchScript backend, with or without reuse of IR nodes."""

    device = "lazy"

    def __init__(self, reuse: bool) -> None:
        self._lazy: Any = importlib.import_module("torch._lazy")
        importlib.import_module("torch._lazy.ts_backend").init()
        importlib.import_module("torch._lazy.config").set_reuse_ir(reuse)
        self._metrics: Any = importlib.import_module("torch._lazy.metrics")
        self._ir_cache: Any = importlib.import_module("torch._lazy.ir_cache")

    def cut(self, wait: bool) -> None:
        self._lazy.mark_step(wait=wait)

    def wait(self) -> None:
        self._lazy.wait_device_ops()

    def clear(self) -> None:
        self._ir_cache.reset()

    def counters(self) -> dict[str, int]:
        count = self._metrics.counter_value
        compilations = count("UncachedCompile") or 0
        fallbacks = sum(count(name) for name in self._metrics.counter_names() if name.startswith("aten::"))
        return {"graphs": compilations, "compiled": compilations, "fallbacks": fallbacks}


class Ltc(Eager):
    """lazytensor, on the backend named."""

    device = "ltc"

    def __init__(self, backend: str, options: Mapping[str, Any]) -> None:
        self._lt: Any = importlib.import_module("lazytensor")
        self._timing: Any = module_or_none("lazytensor.inspect.timing")
        self._lt.set_backend(backend, **options)

    def cut(self, wait: bool) -> None:
        self._lt.sync(wait=wait)

    def wait(self) -> None:
        self._lt.wait()

    def alone(self, step: Callable[[], object], runs: int) -> float | None:
        pipeline: Any = importlib.import_module("lazytensor.execute.pipeline").pipeline
        cutting: Any = importlib.import_module("lazytensor.execute.cut")
        send, sent = pipeline.send, []

        def noted(*cut: Any) -> Any:
            sent.append(cut)
            return send(*cut)

        pipeline.send = noted
        cuts = cutting.hits + cutting.misses
        try:
            step()
            self.cut(wait=False)
        finally:
            del pipeline.send
        self.wait()
        if len(sent) != 1 or cutting.hits + cutting.misses != cuts + 1:
            return None  # the step is several cuts
        function, graph, inputs, previous, own_memory, _, share, _ = sent[0]
        copies = [data.clone() if hasattr(data, "clone") else data for data in map(cutting.now, inputs)]

        def run() -> None:  # as a cut for which somebody waits, which has all cores
            send(function, graph, copies, [None] * len(previous), own_memory, lambda seconds: None, share, True)

        run()
        pipeline.drain()
        start = time.perf_counter()
        for _ in range(runs):
            run()
        pipeline.drain()
        return (time.perf_counter() - start) / runs

    def collect_us(self) -> float | None:
        last = self._timing and self._timing.last_cut()
        return None if last is None else float(last.collect_us)

    def busy(self) -> bool:
        return bool(self._lt.current_backend().metrics().get("compiling", 0))

    def clear(self) -> None:
        self._lt.clear_cache()

    def counters(self) -> dict[str, int]:
        misses = int(self._lt.cache_info()["misses"])
        return {
            "graphs": misses,
            "compiled": int(self._lt.current_backend().metrics().get("compiled", misses)),
            # Not the other counters: to work those out takes 4 MB, which would count as the step's.
            "fallbacks": sum(self._lt.metrics.fallbacks().values()),
        }


def module_or_none(name: str) -> Any:
    """The module, or None where this version has no such module."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError:
        return None


KINDS = ("eager", "compile", "lazy", "lazy-reuse", "ltc")


def start(kind: str, backend: str, options: Mapping[str, Any]) -> Eager:
    """Start the system in this process."""
    match kind:
        case "eager":
            return Eager()
        case "compile":
            return Compiled()
        case "lazy" | "lazy-reuse":
            return TorchLazy(reuse=kind == "lazy-reuse")
        case "ltc":
            return Ltc(backend, options)
    raise ValueError(f"no system named {kind!r}; there are {', '.join(KINDS)}")
