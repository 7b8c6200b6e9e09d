"""The kernels written by hand: copies between devices, reads, changes of geometry, and batch norm's hidden writes.

Each stands in the device's YAML under ``supported``; ``KERNELS`` is the table that is registered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytensor import errors
from lazytensor.device import geometry, library
from lazytensor.device.runtime import NEW, finish, mutate, this_device
from lazytensor.execute import fallback
from lazytensor.trace import shapes
from lazytensor.trace.ir import Op
from lazytensor.trace.record import Mutation, intern, op, record
from lazytensor.trace.storage import effects, lift, make_data, state_of, value_of, write

KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the kernel of these overloads."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            KERNELS[name] = function
        return function

    return register


# --- copies -----------------------------------------------------------------------------------------------------------

_TO_COPY = op("aten::_to_copy")
_COPY_ = Mutation("aten::copy_", "aten::copy", (0,))


@kernel("_to_copy")
def to_copy(
    self: torch.Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: Any = None,
) -> torch.Tensor:
    """``.to()``: within a device it is recorded; across devices data moves."""
    here = self.device.type == "ltc"
    target = self.device if device is None else device
    if layout not in (None, torch.strided):
        return fallback.run_call(_TO_COPY, (self,), {"dtype": dtype, "layout": layout}, "its layout has no lazy form")  # type: ignore[no-any-return]
    if target.type != "ltc":
        data = fallback.data_of(self, "copy to " + str(target))
        with shapes.clean():
            return torch.ops.aten._to_copy.default(  # type: ignore[no-any-return]
                data, dtype=dtype, device=target, pin_memory=pin_memory, memory_format=memory_format
            )
    target = this_device(target)
    if not here:
        with shapes.clean():
            data = torch.ops.aten._to_copy.default(self, dtype=dtype, device="cpu", memory_format=memory_format)
        return make_data(data.resolve_conj().resolve_neg(), target.index)
    if target.index == self.device.index:
        key = (value_of(self), dtype, None, target, None, False, memory_format)
        return record(_TO_COPY, key)  # type: ignore[no-any-return]
    data = fallback.data_of(self, f"copy to {target}")
    with shapes.clean():
        moved = torch.ops.aten._to_copy.default(data, dtype=dtype, memory_format=memory_format)
    return make_data(moved, target.index)


@kernel("copy_")
def copy_(self: torch.Tensor, src: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``copy_`` in every direction."""
    if src is self:
        return self
    if self.device.type != "ltc":
        data = fallback.data_of(src, "copy to " + str(self.device))
        with shapes.clean():
            self.copy_(data)
        return self
    if isinstance(src, torch.Tensor) and (src.device.type != "ltc" or src.device != self.device):
        data = src if src.device.type == "cpu" else fallback.data_of(src, "copy to " + str(self.device))
        with shapes.clean():
            spec = state_of(self).spec
            host = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype).copy_(data)
        fallback.write_back(self, host)
        return self
    key = (value_of(self), value_of(src), False)
    entry = _COPY_.table.get(key)
    if entry is not None:
        write(self, entry[1][0])
        return self
    if _same_memory(self, src):
        return self
    return mutate(_COPY_, key, (self,), self, (self, src, None))  # type: ignore[no-any-return]


def _same_memory(one: torch.Tensor, two: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of the same storage: eager copies nothing then, and finds no overlap.

    Symptom: ``x.view(-1)[...] = x`` raised "some elements of the input tensor and the written-to tensor refer to …" for
    an x without dimensions.  PyTorch fills such a value in on the CPU, and on other devices expands it, which leaves a
    stride of 0, and copies.
    """
    if one.untyped_storage()._cdata != two.untyped_storage()._cdata:
        return False
    a, b = state_of(one).spec, state_of(two).spec
    lone = a.numel == b.numel == 1 and not any(b.stride) and (a.offset, a.dtype, a.bits) == (b.offset, b.dtype, b.bits)
    return a is b or lone


@kernel("_copy_from")
def copy_from(self: torch.Tensor, dst: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """PyTorch's own way of asking a device for a copy."""
    return copy_(dst, self)  # type: ignore[no-any-return]


@kernel("_copy_from_and_resize")
def copy_from_and_resize(self: torch.Tensor, dst: torch.Tensor) -> torch.Tensor:
    """The same, into a tensor of any size."""
    if dst.device.type == "ltc":
        geometry.resize(dst, tuple(self.shape))
    else:
        dst.resize_(self.shape)
    return copy_(dst, self)  # type: ignore[no-any-return]


# --- reads ------------------------------------------------------------------------------------------------------------


@kernel("_local_scalar_dense")
def local_scalar_dense(self: torch.Tensor) -> Any:
    """``.item()``, ``bool()``, ``float()``: a read, and so a cut."""
    return fallback.data_of(self, "item").item()


@kernel("equal")
def equal(self: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` reads both tensors."""
    for tensor in (self, other):
        if tensor.device.type != "ltc":
            raise errors.mixed_devices(tensor.device)
    return torch.equal(fallback.data_of(self, "equal"), fallback.data_of(other, "equal"))


# --- geometry ---------------------------------------------------------------------------------------------------------


@kernel("as_strided")
def as_strided(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """A view by explicit geometry."""
    return geometry.as_strided(self, size, stride, storage_offset)


@kernel("as_strided_")
def as_strided_(self: torch.Tensor, size: Any, stride: Any, storage_offset: int | None = None) -> torch.Tensor:
    """Another geometry over the same storage, in place."""
    offset = int(self.storage_offset()) if storage_offset is None else storage_offset
    return geometry.regard(self, size, stride, offset)


def _inplace_view(name: str) -> None:
    """``transpose_`` and its like: the op itself tells the geometry, on a CPU tensor whose memory is never touched."""
    inplace_op = Op("aten::" + name)

    @kernel(name)
    def inplace(self: torch.Tensor, *args: Any) -> torch.Tensor:
        with shapes.clean():
            stand = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype)
            inplace_op.overload(stand, *args)
        offset = int(self.storage_offset()) + int(stand.storage_offset())
        return geometry.regard(self, stand.shape, stand.stride(), offset)


for _name in ("squeeze_", "squeeze_.dim", "squeeze_.dims", "unsqueeze_", "transpose_", "t_"):
    _inplace_view(_name)


@kernel("resize_")
def resize_(self: torch.Tensor, size: Any, *, memory_format: Any = None) -> torch.Tensor:
    """Another size; the storage grows if it must."""
    stride = None
    if memory_format not in (None, torch.contiguous_format, torch.preserve_format):
        stride = torch.empty(size, device="meta", memory_format=memory_format).stride()
    return geometry.resize(self, tuple(size), stride)


@kernel("_resize_output_")
def resize_output_(self: torch.Tensor, size: Any, device: torch.device) -> torch.Tensor:
    """What PyTorch calls to size an ``out=`` tensor."""
    return geometry.resize(self, tuple(size))


@kernel("resize_as_")
def resize_as_(self: torch.Tensor, the_template: torch.Tensor, *, memory_format: Any = None) -> torch.Tensor:
    """The size of another tensor."""
    return resize_(self, the_template.shape, memory_format=memory_format)  # type: ignore[no-any-return]


@kernel("set_.source_Storage_storage_offset")
def set_storage_offset(
    self: torch.Tensor, source: Any, storage_offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """Look at another storage with explicit geometry."""
    return geometry.adopt_storage(self, source, storage_offset, tuple(size), tuple(stride) or None)


@kernel("set_.source_Storage")
def set_storage(self: torch.Tensor, source: Any) -> torch.Tensor:
    """Look at the whole of another storage."""
    return geometry.adopt_storage(self, source, 0, None, None)


@kernel("set_.source_Tensor")
def set_tensor(self: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Look at what another tensor looks at."""
    return geometry.adopt_storage(
        self, source.untyped_storage(), int(source.storage_offset()), tuple(source.shape), source.stride()
    )


@kernel("set_.source_Tensor_storage_offset")
def set_tensor_offset(
    self: torch.Tensor, source: torch.Tensor, storage_offset: int, size: Any, stride: Any = ()
) -> torch.Tensor:
    """Look at another tensor's storage with explicit geometry."""
    return geometry.adopt_storage(self, source.untyped_storage(), storage_offset, tuple(size), tuple(stride) or None)


@kernel("set_")
def set_empty(self: torch.Tensor) -> torch.Tensor:
    """Look at nothing."""
    empty = torch.empty(0, dtype=self.dtype, device=self.device)
    return set_tensor(self, empty)  # type: ignore[no-any-return]


@kernel("is_set_to")
def is_set_to(self: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether two tensors see the same part of the same storage."""
    return state_of(self) is state_of(tensor)


@kernel("is_pinned")
def is_pinned(self: torch.Tensor, device: Any = None) -> bool:
    """Device memory is never pinned."""
    return False


@kernel("_pin_memory")
def pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    """Only CPU tensors can be pinned; this is CUDA's message for its own."""
    raise RuntimeError(f"cannot pin '{self.type()}' only dense CPU tensors can be pinned")


@kernel("record_stream")
def record_stream(self: torch.Tensor, s: Any) -> None:
    """There are no streams to record."""


# --- composite ops for which the CPU has a kernel of its own ----------------------------------------------------------


def _as_on_cpu(name: str) -> None:
    """Record an op whole that PyTorch takes apart on other devices than its own.

    Symptom: the gradients of ``silu`` and ``mish`` differed from CPU eager's in the last bit.
    """
    whole = op("aten::" + name)

    @kernel(name)
    def recorded(*args: Any) -> torch.Tensor:
        return record(whole, tuple(value_of(a) if isinstance(a, torch.Tensor) else a for a in args))  # type: ignore[no-any-return]


@kernel("polygamma_")
def polygamma_(self: torch.Tensor, n: int) -> torch.Tensor:
    """Its arguments stand the other way round than those of ``polygamma``, so that no rule finds the pair."""
    return torch.polygamma(n, self, out=self)


for _name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
    _as_on_cpu(_name)


# --- ops that only check ----------------------------------------------------------------------------------------------


def _check(name: str, *args: Any) -> None:
    """Record a check: it has to run although no tensor holds its result, and raises at the cut."""
    value = intern(op(name), args)
    if value not in effects:
        effects.append(value)


@kernel("_linalg_check_errors")
def linalg_check_errors(info: torch.Tensor, api_name: str, *, is_matrix: bool) -> None:
    """What ``linalg.inv`` and its like raise for a singular matrix."""
    _check(library.CHECK_LINALG, value_of(info), api_name, is_matrix)


@kernel("_assert_async")
def assert_async(self: torch.Tensor) -> None:
    """An assertion about a value."""
    _check(library.CHECK_ASSERT, value_of(self), "")


@kernel("_assert_async.msg")
def assert_async_msg(self: torch.Tensor, assert_msg: str) -> None:
    """The same with a message."""
    _check(library.CHECK_ASSERT, value_of(self), assert_msg)


@kernel("_efficientzerotensor")
def efficientzerotensor(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    """PyTorch's zeros without memory, which autograd makes: here memory comes at the cut, if at all.

    Symptom: ``sgn``'s backward gave a tensor whose storage raised "Attempted to access the data pointer".
    """
    return torch.zeros(size, dtype=dtype, device=this_device(device))


# --- batch norm writes its statistics without saying so ---------------------------------------------------------------

_BATCH_NORM_OUT = op("aten::native_batch_norm.out")


@kernel("native_batch_norm.out")
def native_batch_norm_out(*args: Any, **kwargs: Any) -> Any:
    """In evaluation the CPU leaves the out= tensors of the statistics as they are, which no other op does."""
    return fallback.run_call(_BATCH_NORM_OUT, args, kwargs, "its out= form has no functional one")


_BATCH_NORM = Mutation("aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_functional", (3, 4))
_BATCH_NORM_PLAIN = op("aten::native_batch_norm")


@kernel("native_batch_norm")
def native_batch_norm(
    input: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    """Its functional form returns the statistics, which the schema of this one hides."""
    values = tuple(map(value_of, (input, weight, bias, running_mean, running_var)))
    if not training or running_mean is None or running_var is None:
        return record(_BATCH_NORM_PLAIN, (*values, training, lift(momentum), lift(eps)))
    key = (*values, training, lift(momentum), lift(eps))
    entry = _BATCH_NORM.table.get(key)
    if entry is None:
        arguments = (input, weight, bias, running_mean, running_var, None, None, None)
        return mutate(_BATCH_NORM, key, (running_mean, running_var), NEW, arguments)
    write(running_mean, entry[1][0])
    write(running_var, entry[1][1])
    return finish(entry[0])
