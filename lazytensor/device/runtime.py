"""What generated kernels call when there is more to do than record a known structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.device import geometry, sharing
from lazytensor.device.module import DeviceModule
from lazytensor.execute import budget
from lazytensor.execute import fallback as fallbacks
from lazytensor.trace import record, shapes, storage
from lazytensor.trace.ir import Value
from lazytensor.trace.record import Mutation, wrap
from lazytensor.trace.storage import State, state_of, track, write
from lazytensor.trace.storage import lock as lock  # generated kernels take it from here

NUMBERS = frozenset((float, int, bool, complex))
NEW = object()  # a mutating op that returns new tensors


def this_device(device: torch.device | None) -> torch.device:
    """The ltc device a factory is asked for, its number checked."""
    index = DeviceModule.current_device() if device is None or device.index is None else device.index
    if index >= settings.devices:
        raise errors.NoSuchDevice(index, settings.devices)
    return torch.device("ltc", index)


def elsewhere(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``*_like`` op that was asked for another device: it runs there."""
    target = kwargs["device"]

    def convert(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.device.type == "ltc":
            if "_like" not in op.name and "new_" not in op.name:  # linspace: the values matter, not the geometry
                return fallbacks.data_of(argument, op.name)
            spec = state_of(argument).spec
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
        return argument

    with shapes.clean():
        return op.overload(*map(convert, args), **(kwargs | {"device": target}))


def mutate(
    mutation: Mutation, key: tuple[Any, ...], written: tuple[Any, ...], returned: Any, arguments: tuple[Any, ...]
) -> Any:
    """A mutating op on a structure that is new: work out what it writes, then write it.

    ``arguments`` stands beside ``key``: the tensor arguments themselves, and None where an argument is none.
    """
    try:
        entry = mutation.miss(key, (), lambda: sharing.shared(written, arguments))
    except shapes.CannotInfer as reason:
        result = sharing.run_in_memory(mutation, key, arguments, (), reason)
        returns = fallbacks.adopt(result, next(sharing.each(written)).device.index) if returned is NEW else returned
    else:
        for tensor, value in zip(written, entry[1], strict=True):
            if isinstance(tensor, list | tuple):
                write_all(tensor, value)
            elif tensor is not None:
                write(tensor, value)
        returns = finish(entry[0]) if returned is NEW else returned
        record.check_budget(entry)
    if mutation.name.startswith("aten::_foreach_"):
        increment_version(written[0])
    return returns


# PyTorch counts a write to a list of tensors in the kernel, not on the way to it as for single tensors.
increment_version = torch._C._increment_version


def finish(returns: list[Any]) -> Any:
    """New tensors for what a mutating op returns beside what it wrote."""
    tensors = [wrap(r) for r in returns]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def write_all(tensors: Sequence[torch.Tensor], values: list[Value]) -> None:
    """Let each tensor of a list have its new value."""
    for tensor, value in zip(tensors, values, strict=True):
        state = state_of(tensor)
        if state.__class__ is State:
            if state.value is None or state.value.leaf:
                track(state)
            state.value = value
        else:
            write(tensor, value)


def write_out(
    mutation: Mutation, key: tuple[Any, ...], outs: tuple[torch.Tensor, ...], arguments: tuple[Any, ...]
) -> None:
    """An op with ``out=``: its results replace what the out tensors held, which are resized if need be."""
    for out in outs:
        if out.device.type != "ltc":
            raise errors.mixed_devices(out.device)
    specs = tuple([state_of(out).spec for out in outs])
    values: tuple[Value, ...] = ()
    if sharing.shared(outs, (*outs, *arguments)):
        values = storage.values_of(outs)
    entry: Any = mutation.table.get((*key, *specs, *values))
    new = entry is None
    if new:
        try:
            entry = mutation.miss(key, specs, lambda: True, values)
        except shapes.CannotInfer as reason:
            sharing.run_in_memory(mutation, key, arguments, outs, reason)
            return
    resized = [(out, value) for out, value in zip(outs, entry[1], strict=True) if out.shape != value.size]
    if resized and sharing.one_storage([out for out, _ in resized], arguments):
        sharing.run_in_memory(mutation, key, arguments, outs, "its out= tensor grows in memory that it reads")
        return
    for out, value in resized:
        if out.numel():
            geometry.warn_resized(out, value.size)
        geometry.resize(out, value.size, value.spec.stride)
    for out, value in zip(outs, entry[1], strict=True):
        write(out, value)
    if new:
        record.check_budget(entry)


def fallback(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "it has no lazy form") -> Any:
    """An op that has no recorded form at all."""
    return fallbacks.run_call(op, args, kwargs, reason)


def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random op (see lazytensor.trace.random)."""
    from lazytensor.device import random

    return random.draw(op, args, kwargs)


record.run_eagerly = fallbacks.run_values
record.check_budget = budget.check
