"""What the C library does with freed memory: give it back at a turning point.

The library has a heap for every thread, and when cuts move from the program's thread to the one that runs them in the
background, or from the first tier to compiled code with a plan of its own for its memory (``native/arena.cpp``), what
was freed before is of no use any more: a GPT step held 88 MB instead of 67.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from lazytensor import native


def _find(name: str) -> Callable[..., int]:
    """A function of GNU's C library, or one that does nothing."""
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return lambda *arguments: 0


_trim = _find("malloc_trim")


def give_back() -> None:
    """Return the free memory of every heap to the system.  Takes milliseconds: for turning points only."""
    _trim(0)


def empty() -> None:
    """Return what compiled steps have kept for the next ones, too.  The next one makes it anew."""
    extension = native.extension()
    if extension is not None:
        extension.empty_arena()
    give_back()
