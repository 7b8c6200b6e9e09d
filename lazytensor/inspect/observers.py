"""Values and callbacks that wait for the step's own cut, so that logging does not cut."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazytensor.inspect import events
from lazytensor.trace import storage
from lazytensor.trace.future import Future

_closures: list[tuple[Callable[..., Any], tuple[Any, ...], bool]] = []
_watched: list[tuple[str, torch.Tensor, int]] = []
_observed: dict[str, list[tuple[int, torch.Tensor]]] = {}


def add_step_closure(closure: Callable[..., Any], args: Sequence[Any] = (), run_async: bool = False) -> None:
    """Call ``closure(*args)`` after the next ``lt.sync()``, when tensors among the arguments have their values.

    In ``torch._lazy`` this is ``add_step_closure``.  Closures run in the order in which they were added, the
    asynchronous ones on a thread of their own; an exception in one of those is raised again by the next ``lt.sync()``
    that has closures to run.
    """
    _closures.append((closure, tuple(args), run_async))


def observe(name: str, tensor: torch.Tensor) -> None:
    """Remember the value that this tensor has here, under a name, without a cut: it comes with the step's own.

    ``lt.observed(name)`` gives the values.  Writing into the tensor afterwards does not change what was observed.
    """
    if tensor.device.type != "ltc":
        _observed.setdefault(name, []).append((events.step, tensor.detach().clone()))
        return
    state = storage.state_of(tensor)
    value = state.value
    if value is None or value.leaf:  # it has data
        from lazytensor.execute.fallback import data_of

        data = data_of(tensor, "observe").clone()
        _observed.setdefault(name, []).append((events.step, data))
        return
    _watched.append((name, storage.make(value), events.step))


def observed(name: str | None = None) -> Any:
    """What was observed under a name: a list of (step, CPU tensor); without a name, all of it by name.

    Values whose step was not cut yet are not there yet.
    """
    _collect(wait=True)
    if name is None:
        return {k: list(v) for k, v in _observed.items()}
    return list(_observed.get(name, ()))


def _under_way(data: Any) -> bool:
    return data.__class__ is Future and not data.run.has_run()


def _collect(wait: bool) -> None:
    """Take the values that a cut has made since; wait for those of a cut that still runs, or take them later."""
    from lazytensor.execute.fallback import data_of

    waiting = []
    for name, tensor, step in _watched:
        state = storage.state_of(tensor)
        if (state.value is not None and not state.value.leaf) or (not wait and _under_way(state.data)):
            waiting.append((name, tensor, step))
        else:
            _observed.setdefault(name, []).append((step, data_of(tensor, "observe").clone()))
    _watched[:] = waiting


def after_sync() -> None:
    """What follows ``lt.sync()``: observed values are taken, then closures run."""
    if _watched:
        _collect(wait=False)
    if not _closures:
        return
    todo, _closures[:] = list(_closures), []
    for closure, args, run_async in todo:
        if run_async:
            _worker.put(closure, args)
    for closure, args, run_async in todo:
        if not run_async:
            closure(*args)


def reset() -> None:
    """Forget observed values and closures that wait."""
    _closures.clear()
    _watched.clear()
    _observed.clear()


class _Worker:
    """One thread that runs asynchronous closures in order; it ends when it has had nothing to do for a while."""

    IDLE_SECONDS = 3.0

    def __init__(self, limit: int = 100) -> None:
        self.todo: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.Queue(limit)
        self.failure: BaseException | None = None
        self.thread: threading.Thread | None = None
        self.lock = threading.Lock()

    def put(self, closure: Callable[..., Any], args: tuple[Any, ...]) -> None:
        """Queue a closure; raises if an earlier one failed."""
        if self.failure is not None:
            failure, self.failure = self.failure, None
            raise RuntimeError("Cannot run asynchronous closure due to previously raised exception") from failure
        self.todo.put((closure, args))
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self.thread = threading.Thread(target=self._run, name="lazytensor-closures", daemon=True)
                self.thread.start()

    def _run(self) -> None:
        while True:
            try:
                closure, args = self.todo.get(timeout=self.IDLE_SECONDS)
            except queue.Empty:
                with self.lock:
                    if self.todo.empty():
                        self.thread = None
                        return
                continue
            try:
                closure(*args)
            except BaseException as error:
                self.failure = error
            finally:
                self.todo.task_done()

    def join(self) -> None:
        """Wait until every closure has run."""
        self.todo.join()


_worker = _Worker()


def wait_for_closures() -> None:
    """Wait until every asynchronous closure has run."""
    _worker.join()
