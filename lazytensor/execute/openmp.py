"""Lets the thread that runs cuts have the machine's cores to itself.

OpenMP keeps a pool of threads for every thread that ever ran a parallel loop.  Once the pools together have more
threads than there are cores, GNU's OpenMP puts a thread to sleep at every barrier instead of letting it spin for a
moment, and a step of many small kernels takes twice as long (a compiled GPT step on two cores: 28 ms in the only thread
with a pool, 53 ms in the second).  The thread that records needs no pool, so it gives up the one it has when it hands
over a cut.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import torch

_SOFT = 1  # omp_pause_soft: settings are kept, and the next parallel loop makes a new pool


def _find() -> Callable[[int], int]:
    """The function of the OpenMP library that PyTorch runs on, or one that does nothing."""
    for path in sorted(Path(torch.__file__).parent.glob("lib/libgomp*")):
        try:
            found = ctypes.CDLL(str(path)).omp_pause_resource_all
        except (OSError, AttributeError):
            continue
        found.argtypes = [ctypes.c_int]
        found.restype = ctypes.c_int
        return found  # type: ignore[no-any-return]
    return lambda kind: 0


_pause = _find()


def release_pool() -> None:
    """Give up the pool of the calling thread."""
    _pause(_SOFT)
