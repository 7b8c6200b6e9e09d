"""The queue of cuts between the thread that records and the thread that runs.

In Python a cut is taken from it, run, and dropped.  The compiled queue (``native/runner.cpp``) has the same methods and
runs the cuts that are compiled code, its jobs, without coming back to Python: a thread that computes then never waits
for the interpreter's lock, which the thread that records hands over when it likes (LayerNorm and GELU: 1.2 ms between a
step of 5 ms and the next).
"""

from __future__ import annotations

import collections
import ctypes
import functools
import threading
from typing import Any, Protocol

from lazytensor import native
from lazytensor.backend import openmp


class Queue(Protocol):
    """Tasks in order, the first of which runs now."""

    def job(self) -> Any:
        """A job for a task that Python runs; None where there are no jobs."""

    def put(self, task: Any, job: Any) -> None:
        """Add a task with its job."""

    def take(self) -> Any:
        """The first task that Python has to run, as soon as there is one.  It stays the first until it is dropped."""

    def drop(self, results: list[Any] | None = None) -> None:
        """The first task has run, with these results or with none that a job could take."""

    def reap(self) -> list[tuple[Any, float, int]]:
        """The tasks that ran without Python since this was last asked, and how many seconds and kernels each took."""

    def wait_below(self, count: int) -> None:
        """Come back when there are fewer tasks than this."""

    def __len__(self) -> int: ...


class PythonQueue:
    """The queue where nothing is built: Python runs every task."""

    def __init__(self) -> None:
        # Adding a task is one append, so an interrupt at any place leaves it here or not: counting tasks apart from the
        # queue once left a count that nobody would ever lower.
        self._tasks: collections.deque[Any] = collections.deque()
        self._changed = threading.Condition()

    def job(self) -> Any:
        """There are no jobs."""
        return None

    def put(self, task: Any, job: Any) -> None:
        """Add a task."""
        with self._changed:
            self._tasks.append(task)
            self._changed.notify_all()

    def take(self) -> Any:
        """The first task, as soon as there is one."""
        with self._changed:
            while not self._tasks:
                self._changed.wait()
            return self._tasks[0]

    def drop(self, results: list[Any] | None = None) -> None:
        """The first task has run."""
        with self._changed:
            self._tasks.popleft()
            self._changed.notify_all()

    def reap(self) -> list[tuple[Any, float, int]]:
        """Nothing runs without Python."""
        return []

    def wait_below(self, count: int) -> None:
        """Come back when there are fewer tasks than this."""
        with self._changed:
            self._changed.notify_all()  # an interrupted `put` may have added a task that nobody heard of
            while len(self._tasks) >= count:
                self._changed.wait()

    def __len__(self) -> int:
        return len(self._tasks)


def make() -> Queue:
    """The compiled queue where it has been built, else Python's."""
    extension = native.extension()
    if extension is None:
        return PythonQueue()
    _introduce(extension)
    return extension.Queue()  # type: ignore[no-any-return]


@functools.cache
def _introduce(extension: Any) -> None:
    """Tell the extension which OpenMP library PyTorch runs on."""
    functions = openmp.functions()
    if functions is not None:
        extension.use_openmp(*[ctypes.cast(f, ctypes.c_void_p).value for f in functions])
