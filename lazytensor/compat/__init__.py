"""``torch._lazy`` under its own names: ``import lazytensor.compat as lazy`` instead of ``import torch._lazy``.

Every function of ``torch._lazy`` is here, in a module of the same name, with its documented meaning and without its
bugs.  The device's name is ``ltc``; after ``ts_backend.init()`` the name ``lazy`` means it too, wherever PyTorch takes
a device as an argument (see :mod:`lazytensor.compat.device_names`).  What differs on purpose: a sync of some tensors,
like a read, runs everything pending, so that nothing runs twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_map_only

import lazytensor as lt
from lazytensor.compat import (
    closure,
    computation,
    config,
    debug,
    device_context,
    extract_compiled_graph,
    ir_cache,
    metrics,
    tensor_factory_functions,
    ts_backend,
)
from lazytensor.compat.closure import add_step_closure, run_step_closures
from lazytensor.compat.device_names import is_lazy
from lazytensor.trace import storage


def mark_step(device: str = "", wait: bool = False) -> None:
    """Run everything pending, then the step closures.

    ``device`` may be empty or name a lazy device; all devices are synced.
    """
    if device and not is_lazy(device):
        raise RuntimeError(f"mark_step takes a lazy device, and {device!r} is none")
    lt.sync(wait=wait)


def wait_device_ops(devices: Iterable[Any] | None = None) -> None:
    """Wait until everything handed over so far has run.  All devices are waited for."""
    lt.wait()


def sync_multi(tensors: Iterable[torch.Tensor], devices: Iterable[Any] = ()) -> None:
    """Let these tensors have their values; tensors of other devices are ignored, anything else is a TypeError."""
    lt.sync_tensors(list(tensors))


_ids: WeakKeyDictionary[Any, int] = WeakKeyDictionary()
_next = itertools.count(1)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """A number that belongs to the tensor's memory as long as it lives; tensors that share memory share it."""
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != "ltc":
        kind = tensor.device if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"get_tensor_id takes a tensor on ltc, not one on {kind}")
    state = storage.state_of(tensor)
    return state_id(state.base if isinstance(state, storage.ViewState) else state)


def state_id(state: Any) -> int:
    """The number of a storage's state."""
    if state not in _ids:
        _ids[state] = next(_next)
    return _ids[state]


def to_cpu(tensors: Any, devices: Iterable[Any] | None = None) -> Any:
    """A copy of nested containers with every tensor on the CPU; other leaves stay as they are."""
    return tree_map_only(torch.Tensor, lambda t: t.to("cpu"), tensors)


def save(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """``torch.save`` of a copy on the CPU; leaves that are not tensors (as in an optimizer's state) are saved as they
    are.
    """
    torch.save(to_cpu(tensors), *args, **kwargs)


__all__ = [
    "add_step_closure",
    "closure",
    "computation",
    "config",
    "debug",
    "device_context",
    "extract_compiled_graph",
    "get_tensor_id",
    "ir_cache",
    "mark_step",
    "metrics",
    "run_step_closures",
    "save",
    "sync_multi",
    "tensor_factory_functions",
    "to_cpu",
    "ts_backend",
    "wait_device_ops",
]
