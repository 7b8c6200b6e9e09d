"""Data that a cut is still making: it stands in a state until somebody needs the real thing.

A cut that runs in the background gives each of its states a future and returns.  Later cuts take futures as inputs,
since cuts run in order; a read settles the one it needs.
"""

from __future__ import annotations

import threading
from typing import Any


class Run:
    """One cut that runs in the background; all its results are there at once."""

    __slots__ = ("_done", "futures", "job", "own_memory", "previous")

    def __init__(self, previous: list[Any], own_memory: bool = False, job: Any = None) -> None:
        self.previous: list[Any] | None = previous  # the states' data before the cut, which they keep if it fails
        self.own_memory = own_memory  # whether the backend that makes the results keeps them in memory of its own
        self.job = job  # what runs it without the interpreter, if something does
        # Those that wait for a value.  Afterwards each holds its own: a loss that is kept must not keep its whole step.
        self.futures: list[Future] | None = [Future(self, number) for number in range(len(previous))]
        self._done: Any = threading.Event() if job is None else job

    def wait(self) -> None:
        """Come back when it has run."""
        done = self._done
        if done is not None:
            done.wait()

    def has_run(self) -> bool:
        """Whether it has."""
        done = self._done
        return done is None or bool(done.is_set())

    def deliver(self) -> None:
        """Give out what the job has made; two threads may do so at once."""
        futures, job = self.futures, self.job
        if futures is None or job is None:
            return
        for future, value in zip(futures, job.results(), strict=False):
            future.value = value
        self.futures = self.previous = self.job = self._done = None

    def forget_unseen(self) -> None:
        """Let a job drop the results that no state and no later cut has a future of, as soon as it has run."""
        futures, job = self.futures, self.job
        if futures is not None and job is not None:
            job.forget(futures)

    def keep(self, values: list[Any], errors: dict[int, Any]) -> None:
        """Give out what Python has made: a value for each result, or an error."""
        futures, previous, done = self.futures or [], self.previous, self._done
        for future in futures:
            number = future.number
            future.error = errors.get(number)
            future.value = values[number] if future.error is None else None
        # What succeeded no longer needs the data before: else each step's would hold that of all steps before.
        failed = errors and previous is not None
        self.previous = [d if i in errors else None for i, d in enumerate(previous or ())] if failed else None
        self.futures = self.job = self._done = None
        if isinstance(done, threading.Event):
            done.set()  # whoever waits for a job is told by its queue


class Future:
    """One result of a running cut."""

    __slots__ = ("error", "number", "run", "value")

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number
        self.value: Any = None
        self.error: Any = None  # why there is no value

    def now(self) -> Any:
        """The value, once the cut has run; after a failure what was there before, which may be another's future."""
        if self.error is not None:
            previous = self.run.previous
            return None if previous is None else previous[self.number]
        if self.value is None:
            self.run.deliver()
        return self.value

    def settle(self, state: Any) -> Any:
        """Wait for the result and put it into the state.  After a failure the state keeps what it had before."""
        self.run.wait()
        data, error = self.now(), self.error
        if error is not None:
            if data.__class__ is Future:
                data = data.settle(state)
            if data is None:
                state.error = error
        state.data = data
        return data


def settled(state: Any) -> Any:
    """The data of a state, waited for if a cut is still making it."""
    data = state.data
    return data.settle(state) if data.__class__ is Future else data
