"""The public functions, re-exported by ``lazytensor``."""

from __future__ import annotations

from typing import Any

from lazytensor.backend.data import BackendData, BackendDevice, Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.backend.lowering import IrBuilder, LoweringContext, define_op
from lazytensor.backend.registry import backends, register_backend, set_backend
from lazytensor.backend.registry import current as current_backend
from lazytensor.execute import cut as _cut
from lazytensor.inspect import events as _events
from lazytensor.inspect import metrics, testing
from lazytensor.inspect import observers as _observers
from lazytensor.inspect.blame import blame
from lazytensor.inspect.dump import dump
from lazytensor.inspect.explain import analyze, explain, why
from lazytensor.inspect.ledgers import fallbacks, history, no_sync, syncs
from lazytensor.inspect.observers import add_step_closure, observe, observed
from lazytensor.inspect.timeline import chrome_trace
from lazytensor.inspect.watch import detect_nan


def sync(wait: bool = False) -> None:
    """The cut: run everything pending."""
    _cut.cut("sync")
    _events.on_step()
    _observers.after_sync()


def cache_info() -> dict[str, Any]:
    """How many compiled graphs there are, and how often a cut found its graph."""
    return {"size": len(_cut.computations), "hits": _cut.hits, "misses": _cut.misses}


mark_step = sync

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
    "current_backend",
    "define_op",
    "detect_nan",
    "dump",
    "explain",
    "fallbacks",
    "history",
    "mark_step",
    "metrics",
    "no_sync",
    "observe",
    "observed",
    "register_backend",
    "set_backend",
    "sync",
    "syncs",
    "testing",
    "why",
]
