"""Cuts that run in the background, in order, while the next step is recorded.

One thread runs them one after the other.  At most ``settings.max_in_flight`` are under way: a program that records
faster than the machine computes waits at its next cut.  An error surfaces at the next cut or read, once.
"""

from __future__ import annotations

import atexit
import collections
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from lazytensor import settings
from lazytensor.backend import heap, openmp
from lazytensor.backend.contract import Failure
from lazytensor.backend.reference import Program
from lazytensor.execute.cores import Share
from lazytensor.trace.future import Future, Run

log = logging.getLogger("lazytensor")


class Task:
    """One cut on its way: what to run, on what, and which futures wait for it."""

    __slots__ = ("done", "function", "futures", "graph", "inputs", "run", "share")

    def __init__(
        self,
        function: Callable[..., list[Any]],
        graph: Any,
        inputs: list[Any],
        futures: list[Future],
        run: Run,
        done: Callable[[], None],
        share: Share,
    ) -> None:
        self.function = function
        self.graph = graph
        self.inputs = inputs
        self.futures = futures
        self.run = run
        self.done = done  # called when it has run
        self.share = share  # how many cores it may have


class Pipeline:
    """The thread that runs cuts, and what it has to tell."""

    def __init__(self) -> None:
        self._reset()
        atexit.register(self.drain)
        os.register_at_fork(before=self.drain, after_in_child=self._reset)

    def _reset(self) -> None:
        # What runs or waits to run, the first of them now.  Taking a task is one append, so an interrupt at any place
        # leaves it here or not: counting tasks apart from the queue once left a count that nobody would ever lower.
        self.tasks: collections.deque[Task] = collections.deque()
        self.changed = threading.Condition()
        self.failures: list[Failure] = []
        self.thread: threading.Thread | None = None
        self.resting = True  # whether the thread holds no OpenMP threads
        self._let_go = False

    @property
    def under_way(self) -> int:
        """How many cuts run or wait to run."""
        return len(self.tasks)

    def rest(self) -> None:
        """Let the thread give up its OpenMP threads, since cuts run elsewhere for a while."""
        if self.resting:
            return
        with self.changed:
            self._let_go = True
            self.changed.notify_all()
            while self._let_go:
                self.changed.wait()
        self.resting = True

    def submit(self, task: Task) -> None:
        """Run a cut in the background; waits while too many are under way."""
        openmp.release_pool()
        self.resting = False
        with self.changed:
            if self.thread is None:
                thread = threading.Thread(target=self._work, daemon=True, name="lazytensor-run")
                thread.start()
                self.thread = thread
            self.changed.notify_all()
            while len(self.tasks) >= settings.max_in_flight:
                self.changed.wait()
            self.tasks.append(task)
            self.changed.notify_all()

    def drain(self) -> None:
        """Wait until everything under way has run."""
        with self.changed:
            self.changed.notify_all()
            while self.tasks:
                self.changed.wait()

    def take_failures(self) -> list[Failure]:
        """What went wrong since this was last asked."""
        if not self.failures:
            return []
        found, self.failures = self.failures, []
        return found

    def _work(self) -> None:
        heap.give_back()  # what cuts on the program's own thread have freed
        while True:
            with self.changed:
                while not self.tasks:
                    if self._let_go:
                        openmp.release_pool()
                        self._let_go = False
                        self.changed.notify_all()
                    self.changed.wait()
                task = self.tasks[0]
            share, started = task.share, time.perf_counter()
            try:
                openmp.use(share.begin(started))
                self._run(task)
            except BaseException as problem:  # even the interpreter cannot run it: the cut fails, the thread goes on
                self._lose(task, problem)
            finally:
                task.done()
                task.run.done.set()
                del task
                share.end(time.perf_counter() - started)
                with self.changed:
                    self.tasks.popleft()
                    self.changed.notify_all()

    def _lose(self, task: Task, problem: BaseException) -> None:
        """None of a cut's results is there: its states keep what they had before, so no step is half done."""
        error = problem if isinstance(problem, Exception) else RuntimeError(f"a cut was ended by {problem!r}")
        failure = Failure(error, task.graph.nodes[0])
        for future in task.futures:
            future.value, future.error = None, failure
        self.failures.append(failure)

    def _run(self, task: Task) -> None:
        inputs = [data.value if data.__class__ is Future else data for data in task.inputs]
        broken = next((d.error for d in task.inputs if d.__class__ is Future and d.error is not None), None)
        if broken is not None:
            # What this cut builds on failed in an earlier one, which has been or will be reported: once is enough.
            for future in task.futures:
                future.error = broken
            return
        try:
            results = task.function(*inputs)
        except Exception as problem:
            # The work has left the trace: it cannot be handed back as pending, so it is done here and now.
            log.error("lazytensor: %s  The cut was run on the backend 'reference' instead.", problem)
            results = Program(task.graph)(*inputs)
        for future, result in zip(task.futures, results, strict=False):
            if result.__class__ is Failure:
                future.error = result
            else:
                future.value = result
                future.previous = None  # else each step's results would hold on to those of all steps before
        self.failures += [r for r in results if r.__class__ is Failure]


pipeline = Pipeline()
