"""Step closures (``torch._lazy.closure``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazytensor.compat.device_context import DeviceContext, get_device_context
from lazytensor.inspect import observers
from lazytensor.inspect.observers import add_step_closure


class ClosureHandler:
    """Runs closures in order, on the caller's thread."""

    def run(self, closure: Callable[[], Any]) -> None:
        """Run one closure; what it raises is raised."""
        closure()

    def __call__(self, closures: list[Callable[[], Any]]) -> None:
        """Run these closures."""
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures in order, on one thread of its own, which ends when it has had nothing to do for a while."""

    def __init__(self, max_queue_size: int = 100) -> None:
        self._worker = observers._Worker(max_queue_size)

    def run(self, closure: Callable[[], Any]) -> None:
        """Queue a closure.  If an earlier one failed, this raises instead, and the closure does not run."""
        self._worker.put(closure, ())

    def join(self) -> None:
        """Wait until every closure has run."""
        self._worker.join()


def run_step_closures() -> DeviceContext:
    """Run the closures that wait for the step's end: the asynchronous ones are queued first, then the others run."""
    observers.after_sync()
    return get_device_context()


__all__ = ["AsyncClosureHandler", "ClosureHandler", "add_step_closure", "run_step_closures"]
