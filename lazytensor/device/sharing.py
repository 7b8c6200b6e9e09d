"""Arguments that share memory: whether they do, and ops that must run in real memory because they do.

Values say nothing about memory: two storages may have the same value.  Where it matters who shares memory with whom,
the tensors are asked.  An op that writes the same memory twice (``_foreach_add_([a, a], 1)``, ``add_`` on overlapping
strides) has no functional form with the same meaning: it runs on the CPU over copies of the storages themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lazytensor.backend.memory import host
from lazytensor.device.geometry import base_of, extent
from lazytensor.execute import fallback
from lazytensor.trace import shapes, storage
from lazytensor.trace.ir import Number, Spec
from lazytensor.trace.record import Mutation
from lazytensor.trace.storage import State, ViewedState, state_of


def each(arguments: Any) -> Iterator[torch.Tensor]:
    """The ltc tensors among arguments, lists opened."""
    for argument in arguments:
        if isinstance(argument, list | tuple):
            yield from each(argument)
        elif isinstance(argument, torch.Tensor) and argument.device.type == "ltc":
            yield argument


def shared(written: tuple[Any, ...], arguments: tuple[Any, ...]) -> bool:
    """Whether a written tensor may share memory with another argument; ``arguments`` contains the written ones too."""
    targets = {id(tensor) for tensor in each(written)}
    places: dict[int, list[tuple[int, int, bool]]] = {}
    for tensor in each(arguments):
        spec = state_of(tensor).spec
        start = spec.offset * spec.dtype.itemsize
        end = extent(spec.size, spec.stride, spec.offset) * spec.dtype.itemsize
        places.setdefault(id(base_of(tensor)), []).append((start, end, id(tensor) in targets))
    return any(len(found) > 1 and _meet(sorted(found)) for found in places.values())


def one_storage(tensors: list[torch.Tensor], arguments: tuple[Any, ...]) -> bool:
    """Whether one of these looks at the storage of an argument, if at another part of it."""
    bases = {id(base_of(tensor)) for tensor in tensors}
    return any(id(base_of(argument)) in bases for argument in each(arguments))


def _meet(places: list[tuple[int, int, bool]]) -> bool:
    """Whether a written stretch of memory meets another one."""
    reach = reach_written = -1
    for start, end, is_written in places:
        if start < (reach if is_written else reach_written):
            return True
        reach = max(reach, end)
        if is_written:
            reach_written = max(reach_written, end)
    return False


def run_in_memory(
    mutation: Mutation, key: tuple[Any, ...], arguments: tuple[Any, ...], outs: tuple[torch.Tensor, ...], reason: Any
) -> Any:
    """Run a mutating op on the CPU, over copies of the storages of its arguments, and keep those it wrote.

    ``arguments`` stands beside ``key`` and has the tensors, and None where an argument is none.
    """
    numbers = list(storage.numbers)  # a cut forgets them
    noted = fallback.announce(mutation.name, reason, fallback.storage_values(key))
    memory: dict[State, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}

    def real(argument: Any) -> Any:
        if isinstance(argument, list | tuple):
            return [real(a) for a in argument]
        if not isinstance(argument, torch.Tensor) or argument.device.type != "ltc":
            return argument
        fallback.data_of(argument, mutation.name)
        base = base_of(argument)
        if base not in memory:
            memory[base] = host(base.data).clone()
        if id(argument) not in made:  # one tensor given twice is one tensor: to resize it as out= resizes the input
            made[id(argument)] = _seen(memory[base], state_of(argument).spec)
        return made[id(argument)]

    def convert(argument: Any) -> Any:
        if argument.__class__ is Number:
            return numbers[argument.index]
        return torch.device("cpu") if argument.__class__ is torch.device else argument

    stands = [real(a) for a in arguments]
    mixed = tuple(k if a is None else tuple(s) if isinstance(s, list) else s for k, a, s in zip(key, arguments, stands))
    positional, keyword = shapes.call_arguments(mutation, mixed, convert)
    out_stands = [real(o) for o in outs]
    keyword.update(zip([a.name for a in mutation.overload._schema.arguments if a.is_out], out_stands))
    with shapes.clean():
        result = mutation.overload(*positional, **keyword)
    noted.done(result)
    for tensor in each([arguments[i] for i in mutation.positions]):
        _keep(base_of(tensor), memory)
    for out, stand in zip(outs, out_stands):
        if out.shape == stand.shape:
            _keep(base_of(out), memory)
        else:
            fallback.write_back(out, stand)
    return result


def _seen(whole: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The part of a storage's data that a tensor of this geometry sees."""
    memory = whole.untyped_storage()
    part = torch.empty(0, dtype=spec.dtype).set_(memory, spec.offset, spec.size, spec.stride)  # type: ignore[call-overload]
    return shapes.with_bits(part, spec.bits)


def _keep(base: State, memory: dict[State, torch.Tensor]) -> None:
    base.value = None
    base.data = memory[base]
    if base.__class__ is ViewedState:
        storage.forget_views(base)
