"""Programs with several threads: kernels take a lock, from the moment the program starts a second thread.

A trace is one for the process, so two threads must not record at once.  A lock around every kernel would cost every
program a few per cent, and most have one thread.  So each kernel is generated twice, plain and locked, and the plain
ones are registered. When the first thread is started that may use tensors, while there is still one thread and no
kernel is running, the functions are given the locked code.  Their tables, constants and defaults stay what they are.

The lock is one for all devices: a cut takes everything pending, whichever thread recorded it.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from types import FunctionType
from typing import Any

from lazytensor.codegen import device as generated
from lazytensor.codegen.runtime import replacing
from lazytensor.device import recorder
from lazytensor.trace.storage import lock

# Threads of these modules never touch a tensor of ours: feeders, pin-memory and progress threads, and our own.
_HARMLESS = (
    *("lazytensor.", "multiprocessing.", "torch.utils.data.", "torch._inductor."),
    *("tqdm.", "rich.", "execnet.", "xdist."),
)

locked = False
on_lock: list[Callable[[], None]] = []  # what else to do then: a backend's own kernels are registered behind the lock


def watch(library: Any, kernels: dict[str, FunctionType], by_hand: dict[str, Callable[..., Any]]) -> None:
    """Lock the kernels as soon as there is a second thread; at once, if there is one already."""
    start = threading.Thread.start

    @functools.wraps(start)
    def start_thread(self: threading.Thread) -> None:
        if not locked and not _harmless(self):
            lock_kernels(library, kernels, by_hand)
        start(self)

    threading.Thread.start = start_thread  # type: ignore[method-assign]
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)
    me = threading.current_thread()
    if any(thread is not me and not _harmless(thread) for thread in threading.enumerate()):
        lock_kernels(library, kernels, by_hand)


def _harmless(thread: threading.Thread) -> bool:
    target = getattr(thread, "_target", None) or type(thread).run
    return str(getattr(target, "__module__", "")).startswith(_HARMLESS)


def lock_kernels(library: Any, kernels: dict[str, FunctionType], by_hand: dict[str, Callable[..., Any]]) -> None:
    """Let every kernel take the lock from its next call on."""
    global locked
    locked = True
    recorder.disable()
    codes = generated.locked_codes()
    for kernel in kernels.values():
        kernel.__code__ = codes[kernel.__name__]
    with replacing():
        for name, function in by_hand.items():
            library.m.impl("aten::" + name, "PrivateUse1", guarded(function), False)
    for then in on_lock:
        then()


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function behind the lock."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with lock:
            return function(*args, **kwargs)

    return call
