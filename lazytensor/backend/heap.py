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
from typing import Any

import torch

from lazytensor import native, settings


def _find(library: Path | None, name: str) -> Callable[..., int]:
    """A function of a library that is loaded (None: GNU's C library), or one that does nothing."""
    try:
        return getattr(ctypes.CDLL(None if library is None else str(library)), name)  # type: ignore[no-any-return]
    except (OSError, AttributeError):
        return lambda *arguments: 0


_trim = _find(None, "malloc_trim")
_free_buffers = _find(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so", "mkl_serv_thread_free_buffers")


class _Info(ctypes.Structure):
    """What ``mallinfo2`` tells of the C library's heaps; ``fordblks`` are the free bytes."""

    _fields_ = (("_", ctypes.c_size_t * 8), ("fordblks", ctypes.c_size_t), ("keepcost", ctypes.c_size_t))


_info: Any = _find(None, "mallinfo2")
_info.restype = _Info
WORTH = 8 << 20  # free bytes; less is asked for again soon, and every page of it would be a page fault


def give_back() -> None:
    """Return the free memory of every heap to the system, if it is much.  Takes milliseconds: at turning points."""
    known = _info()
    if not isinstance(known, _Info) or known.fordblks >= WORTH:
        _trim(0)


def leave_thread() -> None:
    """Cuts will run on another thread than this one: free what MKL keeps for it."""
    _free_buffers()


def planned(run: Callable[..., list[Any]], nbytes: int) -> Callable[..., list[Any]]:
    """The same run of a graph, in which what it makes and drops again has a place of its own (``native/arena.cpp``), if
    its values have so many bytes that it is worth that.

    In the C library's heaps, what stays would lie between what was dropped: first steps of a GPT held 86 MB instead of
    77, of a ResNet 59 instead of 50.
    """
    extension = native.extension()
    if extension is None or not worth_planning(extension, nbytes):
        return run
    plan = extension.Plan()

    def in_places(*inputs: Any) -> list[Any]:
        plan.begin()
        completed = False
        try:
            results = run(*inputs)
            completed = True
        finally:
            plan.end(completed)
        return [result.clone() if _in_arena(extension, result) else result for result in results]

    return in_places


def worth_planning(extension: Any, nbytes: int) -> bool:
    """Whether a run whose values have so many bytes should have a plan; if so, there is memory for it to follow."""
    if not settings.keep_bytes or nbytes < WORTH:
        return False
    extension.open_arena(settings.keep_bytes)
    return True


def _in_arena(extension: Any, result: Any) -> bool:
    """Whether a result lies where the next run will write: this run has kept what the first one dropped."""
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return False
    return bool(extension.arena_holds(result.untyped_storage().data_ptr()))


def empty() -> None:
    """Return what compiled steps have kept for the next ones, too.  The next one makes it anew."""
    extension = native.extension()
    if extension is not None:
        extension.empty_arena()
    give_back()
