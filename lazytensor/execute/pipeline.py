"""Cuts that run in the background, in order, while the next step is recorded.

One thread runs them one after the other.  At most ``settings.max_in_flight`` are under way: a program that records
faster than the machine computes waits at its next cut.  An error surfaces at the next cut or read, once.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any

from lazytensor import settings
from lazytensor.backend import heap, openmp
from lazytensor.backend.contract import Failure, Guard
from lazytensor.backend.reference import Program
from lazytensor.execute import queues
from lazytensor.execute.cores import Share, constant
from lazytensor.trace.future import Future, Run

log = logging.getLogger("lazytensor")


class Task:
    """One cut on its way: what to run, on what, and who waits for it."""

    __slots__ = ("done", "function", "graph", "inputs", "run", "share", "waited")

    def __init__(
        self,
        function: Callable[..., list[Any]],
        graph: Any,
        inputs: list[Any],
        run: Run,
        done: Callable[[float], None],
        share: Share,
        waited: bool,
    ) -> None:
        self.function = function
        self.graph = graph
        self.inputs = inputs
        self.run = run
        self.done = done  # called with the seconds it took
        self.share = share  # how many cores it may have
        self.waited = waited  # whether somebody waits for it


_LET_GO = object()  # a task: give up the OpenMP threads


class Pipeline:
    """The thread that runs cuts, and what it has to tell."""

    def __init__(self) -> None:
        self._reset()
        atexit.register(self.drain)
        os.register_at_fork(before=self.drain, after_in_child=self._reset)

    def _reset(self) -> None:
        self.queue: queues.Queue | None = None  # with the thread
        self.thread: threading.Thread | None = None
        self.failures: list[Failure] = []
        self.resting = True  # whether the thread holds no OpenMP threads
        self.ran_elsewhere = False  # whether a cut, or its ops as they were recorded, ran on the program's thread
        self.jobs = 0  # how many cuts ran without Python
        self.last: Run | None = None  # that was sent

    @property
    def under_way(self) -> int:
        """How many cuts run or wait to run."""
        return 0 if self.queue is None else len(self.queue)

    def rest(self) -> None:
        """Let the thread give up its OpenMP threads, since cuts run elsewhere for a while."""
        if self.resting or self.queue is None:
            return
        self.queue.put(_LET_GO, self.queue.job())
        self.drain()
        self.resting = True

    def send(
        self,
        function: Callable[..., list[Any]],
        graph: Any,
        inputs: list[Any],
        previous: list[Any],
        own_memory: bool,
        done: Callable[[float], None],
        share: Share,
        wait: bool,
    ) -> tuple[Run, list[Future]]:
        """Run a cut in the background, for which somebody will wait or not; waits while too many are under way."""
        openmp.release_pool()
        if self.ran_elsewhere:
            heap.leave_thread()
            self.ran_elsewhere = False
        self.resting = False
        queue = self.queue
        if queue is None:
            queue = self._start()
        queue.wait_below(settings.max_in_flight)
        self._reap(queue)
        job = queue.job()
        if job is not None and function.__class__ is Guard:
            # While somebody waits nothing is recorded.
            threads = (lambda: share.cores) if wait else (lambda: share.begin(time.perf_counter()))
            job = function.job(inputs, threads) or job  # type: ignore[attr-defined]
        if self.last is not None:
            self.last.forget_unseen()
        run = self.last = Run(previous, own_memory, job)
        futures = run.futures or []
        queue.put(Task(function, graph, inputs, run, done, share, wait), job)
        return run, futures

    def _start(self) -> queues.Queue:
        queue = queues.make()
        thread = threading.Thread(target=self._work, args=(queue,), daemon=True, name="lazytensor-run")
        thread.start()
        self.thread, self.queue = thread, queue
        return queue

    def drain(self) -> None:
        """Wait until everything under way has run."""
        if self.queue is not None:
            self.queue.wait_below(1)
            self._reap(self.queue)

    def _reap(self, queue: queues.Queue) -> None:
        """Note the end of what ran without Python."""
        for task, seconds, kernels in queue.reap():
            self.jobs += 1
            task.run.deliver()
            task.done(seconds)
            if not task.waited:
                task.share.end(seconds, kernels)

    def take_failures(self) -> list[Failure]:
        """What went wrong since this was last asked."""
        if not self.failures:
            return []
        found, self.failures = self.failures, []
        return found

    def _work(self, queue: queues.Queue) -> None:
        heap.give_back()  # what cuts on the program's own thread have freed
        openmp.begin()
        while True:
            task = queue.take()
            if task is _LET_GO:
                openmp.release_pool()
                heap.leave_thread()
                queue.drop()
                continue
            results: list[Any] | None = None
            started = time.perf_counter()
            try:
                openmp.use(constant(task.share.begin(started)))
                results = self._run(task)
            except BaseException as problem:  # even the interpreter cannot run it: the cut fails, the thread goes on
                self._lose(task, problem)
            finally:
                seconds = time.perf_counter() - started
                task.done(seconds)
                task.share.end(seconds)
                del task
                queue.drop(results)
                del results

    def _lose(self, task: Task, problem: BaseException) -> None:
        """None of a cut's results is there: its states keep what they had before, so no step is half done."""
        error = problem if isinstance(problem, Exception) else RuntimeError(f"a cut was ended by {problem!r}")
        failure = Failure(error, task.graph.nodes[0])
        self.failures.append(failure)
        task.run.keep([], dict.fromkeys(range(_results(task)), failure))

    def _run(self, task: Task) -> list[Any] | None:
        """The results, if other jobs can take them."""
        inputs = [data.now() if data.__class__ is Future else data for data in task.inputs]
        broken = next((e for d in task.inputs if d.__class__ is Future and (e := d.error) is not None), None)
        if broken is not None:
            # What this cut builds on failed in an earlier one, which has been or will be reported: once is enough.
            task.run.keep([], dict.fromkeys(range(_results(task)), broken))
            return None
        try:
            results = task.function(*inputs)
        except Exception as problem:
            # The work has left the trace: it cannot be handed back as pending, so it is done here and now.
            log.error("lazytensor: %s  The cut was run on the backend 'reference' instead.", problem)
            results = Program(task.graph)(*inputs)
        errors = {i: r for i, r in enumerate(results) if r.__class__ is Failure}
        self.failures += errors.values()
        task.run.keep(results, errors)
        return None if errors or task.run.own_memory else results[: _results(task)]


def _results(task: Task) -> int:
    return len(task.graph.outputs)


pipeline = Pipeline()
