"""Ops that change which part of which storage a tensor looks at: resize, set, as_strided, in-place views."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lazytensor.trace import storage, tensors
from lazytensor.trace.ir import Spec, contiguous_stride, spec, spec_of
from lazytensor.trace.record import intern, op
from lazytensor.trace.scatter import extract, flat
from lazytensor.trace.storage import State, ViewState, state_of, value_of_state


def base_of(tensor: torch.Tensor) -> State:
    """The state of the storage that a tensor looks at."""
    state = state_of(tensor)
    return state.base if isinstance(state, ViewState) else state


def look(tensor: torch.Tensor, base: State, geometry: Spec) -> torch.Tensor:
    """Let the tensor look at its storage's state with this geometry."""
    tensor._lt = storage._aliased(base, geometry)  # type: ignore[attr-defined]
    return tensor


def extent(size: tuple[int, ...], stride: tuple[int, ...], offset: int) -> int:
    """How many elements a storage must have for this geometry."""
    if 0 in size:
        return offset
    return offset + 1 + sum((n - 1) * s for n, s in zip(size, stride, strict=True))


def grow(base: State, memory: torch.UntypedStorage, elements: int, dtype: torch.dtype) -> State:
    """Make a storage hold at least this many elements of this dtype; what it held stays, the rest is undefined."""
    have = base.spec
    held = extent(have.size, have.stride, 0) * have.dtype.itemsize
    if elements * dtype.itemsize <= held:
        return base
    new = intern(op("aten::empty_strided"), ((elements,), (1,), dtype, None, torch.device("ltc", have.device), None))
    if held:
        old = flat(value_of_state(base))
        if old.dtype is not dtype:
            old = intern(op("aten::view.dtype", view=True), (old, dtype))
        new = intern(op("aten::slice_scatter"), (new, old, 0, 0, old.size[0], 1))
    return storage.rebase(base, memory, new)


def resize(tensor: torch.Tensor, size: tuple[int, ...], stride: tuple[int, ...] | None = None) -> torch.Tensor:
    """``resize_``: another size over the same storage, which grows if it is too small."""
    state = state_of(tensor)
    device = state.spec.device
    if stride is None and size == state.spec.size:
        return tensor
    have = state.spec
    geometry = spec(size, stride or contiguous_stride(size), have.offset, have.dtype, device, have.bits)
    if geometry is state.spec:
        return tensor
    base = state.base if isinstance(state, ViewState) else state
    if _is_alone(tensor, base):
        return _fresh(tensor, base, geometry)
    needed = extent(geometry.size, geometry.stride, geometry.offset)
    base = grow(base, tensor.untyped_storage(), needed, geometry.dtype)
    tensors.reshape(tensor, tensor.untyped_storage(), geometry)
    return look(tensor, base, geometry)


def _is_alone(tensor: torch.Tensor, base: State) -> bool:
    """Whether nothing can be seen of what the storage held: it was empty, and no other tensor looks at it.

    Symptom: after ``torch.mul(x, 2, out=empty.detach())`` ``empty`` had the size of the result too.
    """
    if base.spec.numel or base.__class__ is not State or tensor.storage_offset():
        return False
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) <= 2  # type: ignore[attr-defined]  # the tensor's own and this one


def _fresh(tensor: torch.Tensor, base: State, geometry: Spec) -> torch.Tensor:
    value = intern(
        op("aten::empty_strided"),
        (geometry.size, geometry.stride, geometry.dtype, None, torch.device("ltc", geometry.device), None),
    )
    storage.track(base)
    base.value = value
    base.spec_ = geometry
    base.data = None
    tensors.reshape(tensor, tensor.untyped_storage(), geometry)
    return tensor


def warn_resized(out: torch.Tensor, size: tuple[int, ...]) -> None:
    """PyTorch's own warning for an ``out=`` tensor of another size."""
    warnings.warn(
        f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not match "
        f"the required output shape {list(size)}. This behavior is deprecated, and in a future PyTorch release outputs "
        "will not be resized unless they have zero elements. You can explicitly reuse an out tensor t by resizing it, "
        "inplace, to zero elements with t.resize_(0).",
        stacklevel=4,
    )


def regard(tensor: torch.Tensor, size: Any, stride: Any, offset: int) -> torch.Tensor:
    """Let a tensor see another part of its own storage."""
    state = state_of(tensor)
    geometry = spec(tuple(size), tuple(stride), offset, state.spec.dtype, state.spec.device, state.spec.bits)
    base = state.base if isinstance(state, ViewState) else state
    tensors.reshape(tensor, tensor.untyped_storage(), geometry)
    return look(tensor, base, geometry)


def as_strided(tensor: torch.Tensor, size: Any, stride: Any, offset: int | None = None) -> torch.Tensor:
    """A view of the storage, whatever part of it the tensor sees."""
    state = state_of(tensor)
    base = state.base if isinstance(state, ViewState) else state
    geometry = spec(
        tuple(size),
        tuple(stride),
        state.spec.offset if offset is None else offset,
        state.spec.dtype,
        state.spec.device,
        state.spec.bits,
    )
    have = base.spec
    held = extent(have.size, have.stride, 0) * have.dtype.itemsize
    needed = extent(geometry.size, geometry.stride, geometry.offset) * geometry.dtype.itemsize
    if 0 not in geometry.size and needed > held:
        raise RuntimeError(
            f"setStorage: sizes {list(size)}, strides {list(stride)}, storage offset {geometry.offset}, and itemsize "
            f"{geometry.dtype.itemsize} requiring a storage size of {needed} are out of bounds for storage of size "
            f"{held}"
        )
    value = extract(value_of_state(base), geometry)
    alias = tensors.alias(tensor, value)
    alias._lt = base if geometry is base.spec else storage.new_view(base, None, value)  # type: ignore[attr-defined]
    return alias


class Untyped(State):
    """A storage made of bytes, which no tensor has looked at yet: the first one decides how its base value looks."""

    __slots__ = ()

    def settle(self, wanted: Spec) -> None:
        """Become an ordinary state: of this geometry if it takes all the bytes, else a row of elements of its dtype."""
        count = self.spec.numel // wanted.dtype.itemsize
        data = self.data[: count * wanted.dtype.itemsize].view(wanted.dtype)
        if wanted.offset == 0 and wanted.numel == count == extent(wanted.size, wanted.stride, 0):
            data = data.as_strided(wanted.size, wanted.stride)
        self.data = data
        self.spec_ = spec_of(data, wanted.device)
        self.__class__ = State  # type: ignore[assignment]


def adopt_storage(tensor: torch.Tensor, source: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """``set_``: let the tensor look at another storage."""
    memory: torch.UntypedStorage = source._untyped_storage if isinstance(source, torch.TypedStorage) else source
    base = getattr(memory, "_lt", None)
    if base is None:
        raise RuntimeError(f"set_: this storage on {memory.device} does not belong to a tensor on ltc")
    have = base.spec
    if size is None:
        size = (extent(have.size, have.stride, 0) * have.dtype.itemsize // tensor.dtype.itemsize,)
    geometry = spec(size, stride or contiguous_stride(size), offset, tensor.dtype, have.device)
    if base.__class__ is Untyped:
        base.settle(geometry)
    tensors.reshape(tensor, memory, geometry)
    base = grow(base, memory, extent(geometry.size, geometry.stride, geometry.offset), geometry.dtype)
    return look(tensor, base, geometry)


__all__ = ["adopt_storage", "as_strided", "base_of", "grow", "regard", "resize", "spec_of", "warn_resized"]
