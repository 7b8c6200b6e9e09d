"""A quick answer to what an elementwise op gives: the CPU kernel is asked about a handful of elements.

PyTorch's meta kernels for elementwise ops are Python and take up to a millisecond, and those of ``_foreach_*`` ops as
much for every tensor of the list.  What an elementwise result looks like is known but for its dtype: its size is that
of the operands broadcast, and contiguous operands give a contiguous result.  So the kernel itself is run with every
dimension cut down to two elements, which takes microseconds, and a ``_foreach_*`` op with one row of each kind.

Whatever is unusual is not answered here: a call that the CPU refuses, operands that are empty or not contiguous, a
result of another size than expected.  The meta kernel and the CPU on the whole geometry then have the word.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace import storage
from lazytensor.trace.ir import Const, Number, Op, Spec, Value, contiguous_stride

if TYPE_CHECKING:
    from lazytensor.trace.record import Mutation

Size = tuple[int, ...]
Call = Callable[..., Any]

_empty_strided = torch.ops.aten.empty_strided.default
_ones: dict[tuple[Size, torch.dtype], torch.Tensor] = {}  # stand-ins, never written


def infer(op: Op, args: tuple[Any, ...], call: Call) -> Any:
    """The result as a meta tensor, or a list of them; None if this is not the place to ask.

    ``call`` runs the overload with positional and keyword arguments, shielded from the program's modes.
    """
    if op.name.startswith("aten::_foreach_"):
        return _list(op, args, call)
    if not _elementwise(op):
        return None
    operands = [a.spec for a in args if a.__class__ is Value]
    size = _broadcast(operands)
    if size is None:
        return None
    result = answer(op, args, call, _stand_in)
    if not isinstance(result, torch.Tensor) or result.shape != _small(size) or result.layout is not torch.strided:
        return None
    return _empty_strided(size, contiguous_stride(size), dtype=result.dtype, device="meta")


def accepts(mutation: Mutation, args: tuple[Any, ...], call: Call) -> bool:
    """Whether an in-place elementwise op is known to be right: each written tensor keeps its geometry."""
    written = [args[i] for i in mutation.positions]
    if mutation.name.startswith("aten::_foreach_"):
        rows = _rows(args)
        if rows is None:
            return False
        _which, args = rows
    else:
        operands = [a.spec for a in args if a.__class__ is Value]
        if not _elementwise(mutation) or _broadcast(operands) != written[0].spec.size:
            return False
    return answer(mutation, args, call, _own_stand_in) is not None


# --- which ops --------------------------------------------------------------------------------------------------------

_known: dict[Any, bool] = {}


def _elementwise(op: Op | Mutation) -> bool:
    known = _known.get(op)
    if known is None:
        overload = op.overload
        known = _known[op] = (
            op.name.startswith("aten::")
            and torch.Tag.pointwise in overload.tags
            and torch.Tag.nondeterministic_seeded not in overload.tags
            and "memory_format" not in op.keywords
            and [r.type.kind() for r in overload._schema.returns] == ["TensorType"]
        )
    return known


# --- operands ---------------------------------------------------------------------------------------------------------


def _usual(spec: Spec) -> bool:
    return spec.numel > 0 and not spec.bits and spec.stride == contiguous_stride(spec.size)


def _small(size: Iterable[int]) -> Size:
    return tuple([min(n, 2) for n in size])


def _broadcast(operands: list[Spec]) -> Size | None:
    """The common size of contiguous operands, where it tells the strides as well."""
    if not operands or not all(map(_usual, operands)):
        return None
    size = max((o.size for o in operands), key=len)
    # A broadcast dimension of one element leaves the order of dimensions to the iterator's rule for ties.
    return size if all(o.size == size or not o.size for o in operands) else None


def _stand_in(spec: Spec) -> torch.Tensor:
    key = (_small(spec.size), spec.dtype)
    found = _ones.get(key)
    if found is None:
        found = _ones[key] = _own_stand_in(spec)
    return found


def _own_stand_in(spec: Spec) -> torch.Tensor:
    return torch.ops.aten.full.default(_small(spec.size), 1, dtype=spec.dtype, device="cpu")  # type: ignore[no-any-return]


def answer(op: Op | Mutation, args: tuple[Any, ...], call: Call, stand_in: Callable[[Spec], torch.Tensor]) -> Any:
    """What the CPU gives for the small call; None if it refuses, or where a number is unknown."""

    def convert(argument: Any) -> Any:
        kind = argument.__class__
        if kind is Value:
            return stand_in(argument.spec)
        if kind is Number:
            return storage.numbers[argument.index]
        if kind is Const:
            return argument.value
        if kind is tuple:
            return [convert(a) for a in argument]
        return torch.device("cpu") if kind is torch.device else argument

    keywords = op.keywords
    split = len(args) - len(keywords)
    try:
        converted = [convert(a) for a in args]
        result = call(op.overload, converted[:split], dict(zip(keywords, converted[split:], strict=True)))
    except Exception:
        return None
    return True if result is None else result


# --- ops over lists ---------------------------------------------------------------------------------------------------


def _list(op: Op, args: tuple[Any, ...], call: Call) -> list[torch.Tensor] | None:
    rows = _rows(args)
    if rows is None:
        return None
    which, reduced = rows
    results = answer(op, reduced, call, _stand_in)
    if not isinstance(results, tuple | list) or len(results) != len(reduced[0]):
        return None
    if any(
        not isinstance(r, torch.Tensor) or r.shape != _small(v.spec.size)
        for r, v in zip(results, reduced[0], strict=True)
    ):
        return None
    sizes = [v.spec.size for v in args[0]]
    return [
        _empty_strided(size, contiguous_stride(size), dtype=results[number].dtype, device="meta")
        for size, number in zip(sizes, which, strict=True)
    ]


def _rows(args: tuple[Any, ...]) -> tuple[list[int], tuple[Any, ...]] | None:
    """Which kind of row each one is, and the arguments with one row of each kind.

    A row is what the op does at one place of its lists.  None where a row has tensors of more than one size.
    """
    lists = [i for i, a in enumerate(args) if a.__class__ is tuple]
    if not lists or lists[0] != 0 or len({len(args[i]) for i in lists}) != 1:
        return None
    if any(a.__class__ is Value and a.spec.size for a in args):
        return None
    first: dict[Any, int] = {}
    which: list[int] = []
    chosen: list[int] = []
    for place, row in enumerate(zip(*[args[i] for i in lists], strict=True)):
        look = tuple([e.spec if e.__class__ is Value else e.__class__ for e in row])
        number = first.get(look)
        if number is None:
            specs = [e for e in look if e.__class__ is Spec]
            if not specs or not all(map(_usual, specs)) or len({s.size for s in specs}) != 1:
                return None
            number = first[look] = len(chosen)
            chosen.append(place)
        which.append(number)
    reduced = tuple([tuple([a[p] for p in chosen]) if a.__class__ is tuple else a for a in args])
    return which, reduced
