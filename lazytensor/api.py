"""The public functions, re-exported by ``lazytensor``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from lazytensor.backend.data import BackendData, BackendDevice, Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.backend.lowering import IrBuilder, LoweringContext, define_op
from lazytensor.backend.registry import backends, register_backend, set_backend
from lazytensor.backend.registry import current as current_backend
from lazytensor.codegen.custom import register_op
from lazytensor.execute import cut as _cut
from lazytensor.execute.stepfile import load_step, save_step
from lazytensor.execute.strict import strict
from lazytensor.execute.verify import verify
from lazytensor.functions.ledger import whole_functions
from lazytensor.inspect import events as _events
from lazytensor.inspect import metrics, testing
from lazytensor.inspect import observers as _observers
from lazytensor.inspect.blame import blame
from lazytensor.inspect.dump import dump
from lazytensor.inspect.explain import analyze, explain, why
from lazytensor.inspect.ledgers import fallbacks, history, no_sync, syncs
from lazytensor.inspect.observers import add_step_closure, observe, observed
from lazytensor.inspect.report import report
from lazytensor.inspect.timeline import chrome_trace
from lazytensor.inspect.watch import detect_nan


def sync(wait: bool = False) -> None:
    """The cut: run everything pending (``mark_step``).  With ``wait`` it returns when the results are there."""
    _cut.cut("sync", wait)
    _events.on_step()
    _observers.after_sync()


def wait() -> None:
    """Wait for every cut that is still running; errors surface here (``wait_device_ops``)."""
    _cut.settle()


def sync_tensors(tensors: Iterable[torch.Tensor], wait: bool = True) -> None:
    """Let these tensors have their values (``sync_multi``).

    Everything pending runs with them: each recorded operation runs once, so what they share with other tensors cannot
    be left to run again.
    """
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"sync_tensors takes tensors, not a {type(tensor).__name__}")
    _cut.cut("sync", wait)


def to_cpu(tree: Any) -> Any:
    """A copy of nested lists, tuples and dicts in which every ltc tensor is on the CPU; one cut for all of them."""
    from torch.utils._pytree import tree_map_only

    return tree_map_only(torch.Tensor, lambda t: t.cpu() if t.device.type == "ltc" else t, tree)


def seed(value: int) -> None:
    """Seed every random number, PyTorch's and the backend's (``SetRngSeed``)."""
    torch.manual_seed(value)
    current_backend().seed(value)


def clear_cache() -> None:
    """Forget every compiled graph.  What is pending stays pending."""
    _cut.clear()


def cache_info() -> dict[str, Any]:
    """How many compiled graphs there are, and how often a cut found its graph."""
    return {"size": len(_cut.computations), "hits": _cut.hits, "misses": _cut.misses}


mark_step = sync
wait_device_ops = wait

__all__ = [
    "Backend",
    "BackendData",
    "BackendDevice",
    "Computation",
    "Graph",
    "IrBuilder",
    "LoweringContext",
    "add_step_closure",
    "analyze",
    "backends",
    "blame",
    "cache_info",
    "chrome_trace",
    "clear_cache",
    "current_backend",
    "define_op",
    "detect_nan",
    "dump",
    "explain",
    "fallbacks",
    "history",
    "load_step",
    "mark_step",
    "metrics",
    "no_sync",
    "observe",
    "observed",
    "register_backend",
    "register_op",
    "report",
    "save_step",
    "seed",
    "set_backend",
    "strict",
    "sync",
    "sync_tensors",
    "syncs",
    "testing",
    "to_cpu",
    "verify",
    "wait",
    "wait_device_ops",
    "whole_functions",
    "why",
]
