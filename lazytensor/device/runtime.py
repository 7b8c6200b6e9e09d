"""What generated kernels call when there is more to do than record a known structure."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.device import geometry
from lazytensor.execute import fallback as fallbacks
from lazytensor.trace import record, shapes, storage
from lazytensor.trace.ir import Value
from lazytensor.trace.record import Mutation, wrap
from lazytensor.trace.storage import State, dead, live, ref, state_of, write

NUMBERS = frozenset((float, int, bool, complex))
NEW = object()  # a mutating op that returns new tensors
lock = threading.RLock()


def this_device(device: torch.device | None) -> torch.device:
    """The ltc device a factory is asked for, its number checked."""
    index = 0 if device is None or device.index is None else device.index
    if index >= settings.devices:
        raise errors.NoSuchDevice(index, settings.devices)
    return torch.device("ltc", index)


def elsewhere(op: Any, *args: Any, **kwargs: Any) -> Any:
    """A ``*_like`` op that was asked for another device: it runs there."""
    target = kwargs["device"]

    def convert(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.device.type == "ltc":
            spec = state_of(argument).spec
            return torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")
        return argument

    with shapes.clean():
        return op.overload(*map(convert, args), **(kwargs | {"device": target}))


def mutate(mutation: Mutation, key: tuple[Any, ...], written: tuple[Any, ...], returned: Any) -> Any:
    """A mutating op on a structure that is new: work out what it writes, then write it."""
    try:
        entry = mutation.miss(key)
    except shapes.CannotInfer as reason:
        return _mutate_eagerly(mutation, key, written, returned, reason)
    for tensor, value in zip(written, entry[1], strict=True):
        if isinstance(tensor, list | tuple):
            write_all(tensor, value)
        elif tensor is not None:
            write(tensor, value)
    return finish(entry[0]) if returned is NEW else returned


def _mutate_eagerly(mutation: Mutation, key: tuple[Any, ...], written: tuple[Any, ...], returned: Any, why: Any) -> Any:
    """Run the mutating op itself on the CPU, on copies, and write back."""
    numbers = {n: storage.numbers[n.index] for n in fallbacks._numbers(key)}
    read = fallbacks.reader(key, mutation.name)
    noted = fallbacks.announce(mutation.name, why, fallbacks.storage_values(key))
    copies: dict[Value, torch.Tensor] = {}

    def convert(argument: Any) -> Any:
        if argument.__class__ is Value:
            if argument not in copies:
                data = read(argument)
                copies[argument] = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype).copy_(data)
            return copies[argument]
        return numbers.get(argument, argument) if argument.__class__ is not tuple else argument

    positional, keyword = shapes.call_arguments(mutation.functional, key, convert)
    with shapes.clean():
        result = mutation.overload(*positional, **keyword)
    noted.done(result)
    for position, target in zip(mutation.positions, written, strict=True):
        values = key[position] if isinstance(target, list | tuple) else (key[position],)
        for tensor, value in zip(target if isinstance(target, list | tuple) else (target,), values, strict=True):
            fallbacks.write_back(tensor, copies[value])
    return fallbacks.adopt(result, 0) if returned is NEW else returned


def finish(returns: list[Any]) -> Any:
    """New tensors for what a mutating op returns beside what it wrote."""
    tensors = [wrap(r) for r in returns]
    return tensors[0] if len(tensors) == 1 else tuple(tensors)


def write_all(tensors: list[torch.Tensor], values: list[Value]) -> None:
    """Let each tensor of a list have its new value."""
    for tensor, value in zip(tensors, values, strict=True):
        state = state_of(tensor)
        if state.__class__ is State:
            if state.value is None or state.value.leaf:
                live[ref(state, dead)] = None
            state.value = value
        else:
            write(tensor, value)


def write_out(mutation: Mutation, key: tuple[Any, ...], outs: tuple[torch.Tensor, ...]) -> None:
    """An op with ``out=``: its results replace what the out tensors held, which are resized if need be."""
    for out in outs:
        if out.device.type != "ltc":
            raise errors.mixed_devices(out.device)
    specs = tuple([state_of(out).spec for out in outs])
    entry = mutation.table.get((*key, *specs))
    if entry is None:
        try:
            entry = mutation.miss(key, specs)
        except shapes.CannotInfer as reason:
            result = fallbacks.run_values(mutation.functional.overload, key, reason)
            results = result if isinstance(result, tuple | list) else (result,)
            entry = ((), [storage.value_of(r) for r in results])
            for i, (out, value) in enumerate(zip(outs, entry[1], strict=True)):
                if out.shape != value.size:
                    geometry.resize(out, value.size)
                entry[1][i] = record.conform(value, state_of(out).spec)
    for out, value in zip(outs, entry[1], strict=True):
        if out.shape != value.size:
            if out.numel():
                geometry.warn_resized(out, value.size)
            geometry.resize(out, value.size, value.spec.stride)
        write(out, value)


def fallback(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: str = "it has no lazy form") -> Any:
    """An op that has no recorded form at all."""
    return fallbacks.run_call(op, args, kwargs, reason)


def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A random op (see lazytensor.trace.random)."""
    from lazytensor.device import random

    return random.draw(op, args, kwargs)


record.run_eagerly = fallbacks.run_values
