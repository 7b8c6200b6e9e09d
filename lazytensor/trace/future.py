"""Data that a cut is still making: it stands in a state until somebody needs the real thing.

A cut that runs in the background gives each of its states a future and returns.  Later cuts take futures as inputs,
since cuts run in order; a read settles the one it needs.
"""

from __future__ import annotations

import threading
from typing import Any


class Run:
    """One cut that runs in the background; all its futures are settled at once."""

    __slots__ = ("done",)

    def __init__(self) -> None:
        self.done = threading.Event()


class Future:
    """One result of a running cut."""

    __slots__ = ("error", "own_memory", "previous", "run", "value")

    def __init__(self, run: Run, previous: Any, own_memory: bool = False) -> None:
        self.run = run
        self.own_memory = own_memory  # whether the backend that makes it keeps it in memory of its own
        self.previous = previous  # the state's data before the cut, which it keeps if the cut fails
        self.value: Any = None
        self.error: Any = None

    def settle(self, state: Any) -> Any:
        """Wait for the result and put it into the state.  After a failure the state keeps what it had before."""
        self.run.done.wait()
        if self.error is None:
            data = self.value
        else:
            data = self.previous
            if data.__class__ is Future:
                data = data.settle(state)
            if data is None:
                state.error = self.error
        state.data = data
        return data


def settled(state: Any) -> Any:
    """The data of a state, waited for if a cut is still making it."""
    data = state.data
    return data.settle(state) if data.__class__ is Future else data
