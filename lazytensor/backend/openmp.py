"""Lets the thread that runs cuts have the machine's cores to itself, or as many of them as it is to have.

OpenMP keeps a pool of threads for every thread that ever ran a parallel loop.  Once the pools together have more
threads than there are cores, GNU's OpenMP puts a thread to sleep at every barrier instead of letting it spin for a
moment, and a step of many small kernels takes twice as long (a compiled GPT step on two cores: 28 ms in the only thread
with a pool, 53 ms in the second).  The thread that records needs no pool, so it gives up the one it has when it hands
over a cut.
"""

from __future__ import annotations

import ctypes
import threading
from pathlib import Path
from typing import Any

import torch

_SOFT = 1  # omp_pause_soft: settings are kept, and the next parallel loop makes a new pool


def _find(name: str) -> Any:
    """The function of the OpenMP library that PyTorch runs on, or one that does nothing."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        try:
            found = getattr(ctypes.CDLL(str(path)), name)
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_int]
        return found
    return lambda number: 0


_pause = _find("omp_pause_resource_all")
_set_threads = _find("omp_set_num_threads")


class _OfThread(threading.local):
    full = 0  # the number of threads before it was changed here; 0 if it was not
    now = 0


_mine = _OfThread()


def release_pool() -> None:
    """Give up the pool of the calling thread."""
    _pause(_SOFT)


def use(threads: int) -> None:
    """Let parallel loops of the calling thread, PyTorch's own included, have this many threads from now on."""
    if threads != (_mine.now or torch.get_num_threads()):
        _mine.full = _mine.full or torch.get_num_threads()
        _mine.now = threads
        _set_threads(threads)
        if threads == 1:
            release_pool()  # the others would stand by


def all_threads() -> int:
    """How many threads a parallel loop has that nobody limits."""
    return _mine.full or torch.get_num_threads()
