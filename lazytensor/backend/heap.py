"""Gives memory back that the allocator keeps for a thread, or for code, that will not ask for it again.

The C library has a heap for every thread and keeps what is freed there.  When cuts move from the program's thread to
the one that runs them in the background, or from the first tier to compiled code with its own pattern of buffers, what
was freed before is of no use any more: a GPT step held 88 MB instead of 67.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable


def _find() -> Callable[[int], int]:
    """The function of GNU's C library, or one that does nothing."""
    try:
        return ctypes.CDLL(None).malloc_trim  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return lambda keep: 0


_trim = _find()


def give_back() -> None:
    """Return the free memory of every heap to the system.  Takes milliseconds: for turning points only."""
    _trim(0)
