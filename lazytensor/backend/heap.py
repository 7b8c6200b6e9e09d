"""What the C library does with freed memory: keep it for the next step, or give it back.

Compiled code asks for the same memory in every step.  By itself the allocator returns what lies free at the end of a
heap, or is large, to the system, and the next step has each page of it made and cleared anew: 1,300 page faults and 3
to 5 ms of processor time in a ResNet step of 35.  So what a step of compiled code frees is kept.

At a turning point it is the other way round.  The C library has a heap for every thread, and when cuts move from the
program's thread to the one that runs them in the background, or from the first tier to compiled code with its own
pattern of buffers, what was freed before is of no use any more: a GPT step held 88 MB instead of 67.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from lazytensor import settings

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of parameters in malloc.h
_LARGEST = 32 << 20  # bytes; what is larger is mapped by itself whatever one asks for
_LEAST = 64 << 20  # bytes; what the allocator itself comes to keep where blocks are large

_kept = 0


def _find(name: str) -> Callable[..., int]:
    """A function of GNU's C library, or one that does nothing."""
    try:
        return getattr(ctypes.CDLL(None), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return lambda *arguments: 0


_trim = _find("malloc_trim")
_set = _find("mallopt")


def give_back() -> None:
    """Return the free memory of every heap to the system.  Takes milliseconds: for turning points only."""
    _trim(0)


def keep(step: int) -> None:
    """From now on let so many bytes, which a step may free, stay where they are, if ``keep_bytes`` allows it."""
    global _kept
    wanted = min(max(step, _LEAST), settings.keep_bytes)
    if wanted > _kept:
        _set(_MMAP_THRESHOLD, min(_LARGEST, wanted))
        _set(_TRIM_THRESHOLD, min(wanted, (1 << 31) - 1))  # an int
        _kept = wanted
