"""How many bytes the device holds: counted when somebody asks, at no cost to recording.

What is held now is the data of every live state.  The peak is the largest of three figures since it was reset: what was
held when somebody asked, what is held now, and for each compiled graph that has run, the bytes of its inputs and its
results together, which were there at the same time.  Memory that a backend uses inside a graph is the backend's own and
not counted.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import torch

from lazytensor.device.geometry import Untyped
from lazytensor.execute import cut
from lazytensor.trace.ir import Spec
from lazytensor.trace.storage import State, ViewedState

_KINDS = frozenset((State, ViewedState, Untyped))
_most: dict[int, int] = {}
_ran: dict[int, dict[Any, int]] = {}  # device -> how often each graph had run when the peak was reset


def _bytes(spec: Spec) -> int:
    last = sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True)) if spec.numel else -1
    return (1 + last) * spec.dtype.itemsize


def allocated(device: int) -> int:
    """The bytes of the data that live tensors of this device hold."""
    states = [each for each in gc.get_objects() if type(each) in _KINDS]
    held = sum(_bytes(s.spec) for s in states if s.data is not None and s.spec.device == device)
    _most[device] = max(held, _most.get(device, 0))
    return held


def peak(device: int) -> int:
    """The most bytes known to have been held at once since the peak was reset."""
    allocated(device)
    before = _ran.get(device, {})
    for computation in list(cut.computations.values()):
        if computation.runs > before.get(computation, 0):
            values = [*computation.graph.data, *computation.graph.outputs]
            at_once = sum(_bytes(v.spec) for v in dict.fromkeys(values) if v.spec.device == device)
            _most[device] = max(_most[device], at_once)
    return _most[device]


def reset_peak(device: int) -> None:
    """Begin a new peak with what is held now."""
    _most[device] = 0
    _ran[device] = {c: c.runs for c in cut.computations.values()}
    allocated(device)


def host() -> tuple[int, int]:
    """Free and total bytes of the host's memory."""
    page = os.sysconf("SC_PAGE_SIZE")
    return page * os.sysconf("SC_AVPHYS_PAGES"), page * os.sysconf("SC_PHYS_PAGES")


def dtypes() -> set[torch.dtype]:
    """Every dtype of this PyTorch."""
    return {d for d in vars(torch).values() if isinstance(d, torch.dtype)}
