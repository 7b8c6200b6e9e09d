"""Lets the thread that runs cuts have the machine's cores to itself, or as many of them as it is to have.

OpenMP keeps a pool of threads for every thread that ever ran a parallel loop.  Once the pools together have more
threads than there are cores, GNU's OpenMP puts a thread to sleep at every barrier instead of letting it spin for a
moment, and a step of many small kernels takes twice as long (a compiled GPT step on two cores: 28 ms in the only thread
with a pool, 53 ms in the second).  The thread that records needs no pool, so it gives up the one it has when it hands
over a cut.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from pathlib import Path
from typing import Any

import torch

_SOFT = 1  # omp_pause_soft: settings are kept, and the next parallel loop makes a new pool


def _library() -> Any:
    """The OpenMP library that PyTorch runs on, or None."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))
    return None


_openmp = _library()


def functions() -> tuple[Any, Any, Any] | None:
    """The library's functions that set and tell the number of threads and give up the pool; None without it."""
    try:
        return _openmp.omp_set_num_threads, _openmp.omp_get_max_threads, _openmp.omp_pause_resource_all
    except AttributeError:
        return None


_set_threads, _, _pause = functions() or ([lambda number: 0] * 3)


class _OfThread(threading.local):
    full = 0  # the number of threads before anything was changed here; 0 if nothing will be


_mine = _OfThread()


def release_pool() -> None:
    """Give up the pool of the calling thread."""
    _pause(_SOFT)


def begin() -> None:
    """The number of threads of this thread will be changed elsewhere: remember what it was."""
    _mine.full = torch.get_num_threads()


def use(threads: int) -> None:
    """Let parallel loops of the calling thread, PyTorch's own included, have this many threads from now on."""
    if threads != torch.get_num_threads():
        _mine.full = _mine.full or torch.get_num_threads()
        _set_threads(threads)
        if threads == 1:
            release_pool()  # the others would stand by


def all_threads() -> int:
    """How many threads a parallel loop has that nobody limits."""
    return _mine.full or torch.get_num_threads()
