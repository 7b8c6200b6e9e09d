"""The public functions, re-exported by ``lazytensor``."""

from __future__ import annotations

from typing import Any

from lazytensor.execute import cut as _cut
from lazytensor.inspect import metrics


def sync(wait: bool = False) -> None:
    """The cut: run everything pending."""
    _cut.cut("sync")


def cache_info() -> dict[str, Any]:
    """How many compiled graphs there are, and how often a cut found its graph."""
    return {"size": len(_cut.computations), "hits": _cut.hits, "misses": _cut.misses}


mark_step = sync

__all__ = ["cache_info", "mark_step", "metrics", "sync"]
