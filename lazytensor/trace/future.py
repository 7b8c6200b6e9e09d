"""Data that a cut is still making: it stands in a state until somebody needs the real thing.

A cut that runs in the background gives each of its states a future and returns.  Later cuts take futures as inputs,
since cuts run in order; a read settles the one it needs.
"""

from __future__ import annotations

import threading
from typing import Any


class Run:
    """One cut that runs in the background; all its results are there at once."""

    __slots__ = ("_done", "_values", "errors", "job", "own_memory", "previous")

    def __init__(self, previous: list[Any], own_memory: bool = False, job: Any = None) -> None:
        self.previous: list[Any] | None = previous  # the states' data before the cut, which they keep if it fails
        self.own_memory = own_memory  # whether the backend that makes the results keeps them in memory of its own
        self.job = job  # what runs it without the interpreter, if something does
        self.errors: dict[int, Any] = {}  # by the number of the result that is not there
        self._values: list[Any] | None = None
        self._done: Any = threading.Event() if job is None else job

    def wait(self) -> None:
        """Come back when it has run."""
        self._done.wait()

    def has_run(self) -> bool:
        """Whether it has."""
        return bool(self._done.is_set())

    def value(self, number: int) -> Any:
        """A result, once it has run."""
        if self._values is None:
            self._values = self.job.results()
        return self._values[number]

    def keep(self, values: list[Any], errors: dict[int, Any]) -> None:
        """Take what Python made: a value for each result, or an error."""
        self._values, self.errors = values, errors
        self.let_go()

    def let_go(self) -> None:
        """What succeeded no longer needs the data before: else each step's would hold that of all steps before."""
        if self.errors and self.previous is not None:
            self.previous = [data if i in self.errors else None for i, data in enumerate(self.previous)]
        else:
            self.previous = None

    def end(self) -> None:
        """Let go on whoever waits; a job does that itself."""
        if self.job is None:
            self._done.set()


class Future:
    """One result of a running cut."""

    __slots__ = ("number", "run")

    def __init__(self, run: Run, number: int) -> None:
        self.run = run
        self.number = number

    @property
    def error(self) -> Any:
        """Why there is no value, once the cut has run."""
        return self.run.errors.get(self.number)

    def now(self) -> Any:
        """The value, once the cut has run; after a failure what was there before, which may be another's future."""
        run = self.run
        if self.number in run.errors:
            return None if run.previous is None else run.previous[self.number]
        return run.value(self.number)

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
