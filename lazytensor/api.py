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
from lazytensor.inspect import metrics


def sync(wait: bool = False) -> None:
    """The cut: run everything pending."""
    _cut.cut("sync")


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
    "backends",
    "cache_info",
    "current_backend",
    "define_op",
    "mark_step",
    "metrics",
    "register_backend",
    "set_backend",
    "sync",
]
