"""What libraries do with freed memory: give it back at a turning point.

The C library has a heap for every thread, and when cuts move from the program's thread to the one that runs them in the
background, or from the first tier to compiled code with a plan of its own for its memory (``native/arena.cpp``), what
was freed before is of no use any more: a GPT step held 88 MB instead of 67.  MKL keeps what it packs matrices into,
6 MB for every thread that ever multiplied.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

from lazytensor import native


def _find(library: Path | None, name: str) -> Callable[..., int]:
    """A function of a library that is loaded (None: GNU's C library), or one that does nothing."""
    try:
        return getattr(ctypes.CDLL(None if library is None else str(library)), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return lambda *arguments: 0


_trim = _find(None, "malloc_trim")
_free_buffers = _find(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", "mkl_serv_thread_free_buffers")


def give_back() -> None:
    """Return the free memory of every heap to the system.  Takes milliseconds: for turning points only."""
    _trim(0)


def leave_thread() -> None:
    """Cuts will run on another thread than this one: free what MKL keeps for it."""
    _free_buffers()


def empty() -> None:
    """Return what compiled steps have kept for the next ones, too.  The next one makes it anew."""
    extension = native.extension()
    if extension is not None:
        extension.empty_arena()
    give_back()
