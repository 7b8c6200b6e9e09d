"""Storages that leave and enter the device: what ``torch.save``, ``torch.load``, ``pickle`` and ``deepcopy`` need.

An ltc storage has no memory of its own, so it is never written.  What is written is the CPU storage that holds the data
of its state: every alias of an ltc storage leads to the same CPU storage, so what was shared is shared in the file.
That storage carries the name of the device it stands for, and PyTorch writes the name beside the bytes as it does for
every device. Loading goes the other way: bytes and a name become an ltc storage.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytensor import errors
from lazytensor.backend.memory import host
from lazytensor.device import geometry
from lazytensor.device.runtime import this_device
from lazytensor.execute import cut, fallback
from lazytensor.trace import storage, tensors
from lazytensor.trace.future import settled
from lazytensor.trace.record import conform

_HOME = "_ltc_home"  # on a CPU storage: the device that its bytes were written from


def stand_in(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor with the geometry and the data of an ltc tensor, to be written in its place.

    It shares memory with the stand-in of every alias, and with the device: it is for reading only.
    """
    data = fallback.data_of(tensor, "save")
    setattr(data.untyped_storage(), _HOME, str(tensor.device))
    return data.detach().requires_grad_(tensor.requires_grad)


def _tag(memory: Any) -> str | None:
    return getattr(memory, _HOME, None)


def _restore(memory: Any, location: str) -> Any:
    device = torch.device(location) if location.partition(":")[0] == tensors.DEVICE else None
    return None if device is None else from_bytes(memory, this_device(device).index)


def from_bytes(memory: torch.UntypedStorage, device: int) -> torch.UntypedStorage:
    """A new ltc storage that holds a copy of these bytes of the CPU."""
    data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(memory).clone()  # type: ignore[call-overload]
    return new_storage(data, device)


def new_storage(data: torch.Tensor, device: int) -> torch.UntypedStorage:
    """A new ltc storage that holds these bytes; the first tensor to look at it gives them a dtype."""
    made = storage.make_data(data, device).untyped_storage()
    state = geometry.Untyped()
    state.spec_, state.data = made._lt.spec, made._lt.data  # type: ignore[attr-defined]
    made._lt = state  # type: ignore[attr-defined]
    return made


def clone(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A new storage with the same value: recorded, not run."""
    base = memory._lt  # type: ignore[attr-defined]
    if base.__class__ is geometry.Untyped:
        return new_storage(base.data.clone(), base.spec.device)
    return storage.make(conform(storage.value_of_state(base), base.spec)).untyped_storage()


def to_cpu(memory: torch.UntypedStorage) -> torch.UntypedStorage:
    """A copy of the storage's bytes on the CPU."""
    base = memory._lt  # type: ignore[attr-defined]
    if base.value is not None and not base.value.leaf:
        cut.cut("copy to cpu")
    data = host(settled(base))
    cut.report_failures()
    if base.error is not None:
        raise errors.ValueLost(base.error)
    return data.untyped_storage().clone()  # type: ignore[no-any-return]


def fill(memory: torch.UntypedStorage, contents: torch.UntypedStorage) -> None:
    """Let the storage have these bytes, which the caller gives away."""
    base = memory._lt  # type: ignore[attr-defined]
    data = torch.empty(0, dtype=base.spec.dtype, device="cpu").set_(contents)  # type: ignore[call-overload]
    base.data = data.as_strided(base.spec.size, base.spec.stride)
    base.value = base.error = None
    if base.__class__ is storage.ViewedState:
        storage.forget_views(base)


def nbytes(memory: torch.UntypedStorage) -> int:
    """How many bytes the storage's data has, or will have."""
    have = memory._lt.spec  # type: ignore[attr-defined]
    return int(geometry.extent(have.size, have.stride, 0) * have.dtype.itemsize)


def empty(size: int, device: torch.device) -> torch.UntypedStorage:
    """``torch.UntypedStorage(size, device="ltc")``."""
    return new_storage(torch.zeros(size, dtype=torch.uint8, device="cpu"), this_device(device).index)


def register() -> None:
    """Tell ``torch.save`` and ``torch.load`` of the device; asked before PyTorch's own rows, for the CPU's would
    answer.
    """
    torch.serialization.register_package(5, _tag, _restore)


__all__ = ["clone", "empty", "fill", "from_bytes", "nbytes", "register", "stand_in", "to_cpu"]
