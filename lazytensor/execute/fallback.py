"""An op that cannot be recorded: cut, run it eagerly on the CPU, continue.

That is the case for results whose shape depends on data, for ops without a shape rule, and for layouts other than
strided. Written arguments, lists of them included, are written back; results, lists included, become device data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lazytensor import errors
from lazytensor.backend import memory
from lazytensor.execute import cut as cutting
from lazytensor.execute.pipeline import pipeline
from lazytensor.inspect import events, metrics
from lazytensor.trace import source, storage
from lazytensor.trace.future import Future
from lazytensor.trace.ir import Number, Value, spec_of
from lazytensor.trace.shapes import call_arguments, clean, may_overlap, with_bits

log = logging.getLogger("lazytensor")
_said: set[tuple[str, str, int]] = set()


def data_of(tensor: torch.Tensor, cause: str) -> torch.Tensor:
    """The CPU data that an ltc tensor sees, after everything pending has run.  The caller must not write into it."""
    return data_in(storage.state_of(tensor), cause)


def data_in(state: storage.State | storage.ViewState, cause: str) -> torch.Tensor:
    """The same for the state that a tensor looks at."""
    base: Any = state.base if state.__class__ is storage.ViewState else state
    if base.value is not None and not base.value.leaf:
        cutting.cut(cause)
    data = base.data
    if data.__class__ is Future:
        data = events.wait_for(cause, base)
    if pipeline.failures:
        cutting.report_failures()
    if data is None and base.error is not None:
        raise errors.ValueLost(base.error)
    spec = state.spec
    events.read_bytes += spec.nbytes
    if memory.in_use:
        data = memory.host(data)
    if base.spec is spec:
        return data  # type: ignore[no-any-return]
    if spec.dtype is not data.dtype:
        whole = data.untyped_storage()
        data = torch.empty(0, dtype=spec.dtype).set_(whole, 0, (whole.nbytes() // spec.dtype.itemsize,))  # type: ignore[call-overload]
    return with_bits(data.as_strided(spec.size, spec.stride, spec.offset), spec.bits)


def announce(name: str, reason: Any, arguments: Iterable[Any] = ()) -> events.Fallback:
    """Count a fallback; the first time an op falls back from a line, say so."""
    metrics.count(name)
    frame = source.user_frame()
    where = (frame.f_code.co_filename, frame.f_lineno) if frame is not None else ("<unknown>", 0)
    if (name, *where) not in _said:
        _said.add((name, *where))
        log.warning("lazytensor: %s at %s:%d runs eagerly on the CPU (fallback): %s", name, *where, reason)
    return events.on_fallback(name, reason, arguments)


def run_values(overload: Any, args: tuple[Any, ...], reason: Exception) -> Any:
    """Run an op on canonical arguments."""
    from lazytensor.trace.ir import Op

    op = Op(overload.name() if callable(getattr(overload, "name", None)) else str(overload))
    noted = announce(op.name, reason, storage_values(args))
    read = reader(args, op.name)
    device = next((v.spec.device for v in storage_values(args) if v.spec.device >= 0), None)

    def convert(argument: Any) -> Any:
        if argument.__class__ is Value:
            return read(argument)
        if argument.__class__ is Number:
            return numbers[argument]
        if argument.__class__ is torch.device:
            return torch.device("cpu")
        return argument

    numbers = {n: storage.numbers[n.index] for n in _numbers(args)}
    if device is None:
        device = next((a.index or 0 for a in args if a.__class__ is torch.device), 0)
    positional, keyword = call_arguments(op, args, convert)
    with clean():
        result = op.overload(*positional, **keyword)
    noted.done(result)
    return adopt(result, device)


def reader(args: tuple[Any, ...], cause: str) -> Callable[[Value], torch.Tensor]:
    """How to read the values among canonical arguments, cuts in between or not: each is held until the reader dies."""
    held: dict[Value, torch.Tensor] = {}
    for value in storage_values(args):
        held[value] = storage.leaf_data[value.node.args[1]] if value.leaf else storage.make(value)

    def read(value: Value) -> torch.Tensor:
        if not value.leaf:
            return data_of(held[value], cause)
        data: Any = held[value]
        if data.__class__ is Future:
            cutting.settle()
            future, data = data, cutting.now(data)
            if data is None:
                raise errors.ValueLost(future.error)
        return memory.host(data)

    return read


def storage_values(args: tuple[Any, ...]) -> list[Value]:
    """The tensor values among canonical arguments, each once."""
    from lazytensor.trace.ir import values_in

    return list(dict.fromkeys(values_in(args)))


def _numbers(args: tuple[Any, ...]) -> list[Number]:
    from lazytensor.trace.ir import flatten

    return [a for a in flatten(args) if a.__class__ is Number]


def adopt(result: Any, device: int) -> Any:
    """CPU results as ltc tensors; what is no tensor stays what it is."""
    if isinstance(result, torch.Tensor):
        if result.device.type != "cpu":
            return result
        if result.layout is not torch.strided:
            from lazytensor.device.sparse import to_ltc

            return to_ltc(result, device)
        if result.is_conj() or result.is_neg():
            result = result.resolve_conj().resolve_neg()
        return storage.make_data(_own(result), device)
    if isinstance(result, list | tuple):
        return type(result)(adopt(r, device) for r in result)
    return result


def run_call(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], reason: Any, quiet: bool = False) -> Any:
    """Run an op on the arguments its kernel was called with; what it wrote is written back."""
    noted = None if quiet else announce(op.name, reason, [*args, *kwargs.values()])
    overload = op.overload
    schema = overload._schema
    device = _device_of(args, kwargs)
    copies: dict[int, torch.Tensor] = {}
    originals: list[torch.Tensor] = []

    def convert(argument: Any, written: bool) -> Any:
        if isinstance(argument, list | tuple):
            return [convert(a, written) for a in argument]
        if isinstance(argument, torch.device) and argument.type == "ltc":
            return torch.device("cpu")
        if not isinstance(argument, torch.Tensor) or argument.device.type != "ltc":
            return argument
        if not written:
            return data_of(argument, op.name)
        if id(argument) not in copies:
            data = data_of(argument, op.name)
            copies[id(argument)] = torch.empty_strided(data.shape, data.stride(), dtype=data.dtype).copy_(data)
            originals.append(argument)
        return copies[id(argument)]

    flags = {a.name: a.alias_info is not None and a.alias_info.is_write for a in schema.arguments}
    order = [a.name for a in schema.arguments]
    with clean():
        positional = [convert(a, flags[order[i]]) for i, a in enumerate(args)]
        keyword = {k: convert(a, flags[k]) for k, a in kwargs.items()}
        result = overload(*positional, **keyword)
    if noted is not None:
        noted.done(result)
    for tensor in originals:
        write_back(tensor, copies[id(tensor)])
    by_copy = {id(c): t for t in originals for c in [copies[id(t)]]}
    return _returned(result, by_copy, device)


def _returned(result: Any, by_copy: dict[int, torch.Tensor], device: int) -> Any:
    if isinstance(result, torch.Tensor) and id(result) in by_copy:
        return by_copy[id(result)]
    if isinstance(result, list | tuple):
        return type(result)(_returned(r, by_copy, device) for r in result)
    return adopt(result, device)


def _device_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for argument in [*args, *kwargs.values()]:
        for each in argument if isinstance(argument, list | tuple) else [argument]:
            if isinstance(each, torch.Tensor) and each.device.type == "ltc":
                return each.device.index
            if isinstance(each, torch.device) and each.type == "ltc":
                return each.index or 0
    return 0


def _own(result: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides, gaps included, unless elements share memory."""
    geometry = spec_of(result, 0)
    if may_overlap(geometry):
        return result.clone(memory_format=torch.preserve_format)
    return torch.empty_strided(geometry.size, geometry.stride, dtype=geometry.dtype).copy_(result)


def write_back(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let the tensor, whatever part of its storage it sees, have this data (of its own dtype)."""
    state = storage.state_of(tensor)
    if tuple(data.shape) != tuple(tensor.shape):
        from lazytensor.device.geometry import resize

        resize(tensor, tuple(data.shape))
        state = storage.state_of(tensor)
    if isinstance(state, storage.ViewState):
        holder = storage.make_data(_laid_out(data, state.spec), state.spec.device)
        storage.write(tensor, storage.value_of(holder))
    else:
        storage.set_data(tensor, _laid_out(data, state.spec))


def _laid_out(data: torch.Tensor, spec: Any) -> torch.Tensor:
    """A copy of the data in memory of its own, laid out by these strides."""
    result = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
    result.copy_(data)
    return result


__all__ = ["adopt", "announce", "data_of", "run_call", "run_values", "spec_of", "write_back"]
