"""A quick answer to what an op gives: the CPU kernel is asked about small tensors that stand for the real ones.

PyTorch's meta kernels of the commonest ops (``addmm``, ``native_layer_norm``, ``nll_loss_forward``) are Python and take
one to five milliseconds, and a first step is mostly new calls.  So the kernel itself is run with every extent
replaced: equal extents by equal small numbers, different ones by different ones, also where an argument is a size (its
schema says ``SymInt``).  A result whose extents are all such numbers has copied them, and the real ones are known.

It is asked twice, with other numbers and other data.  An extent that is the sum of two others or a quotient, a limit
that only the small sizes keep, a size that depends on data would have to fit both times.  Whatever is unusual is not
answered here: a call that the CPU refuses, operands or results that are no dense permutation, an op that is not known
to check its arguments.  The meta kernel and the CPU on the whole geometry then have the word.

What was told holds for all calls that look the same in small numbers: a layer of another width is not asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace import probe
from lazytensor.trace.ir import Number, Op, Spec, Value, flatten, values_in

if TYPE_CHECKING:
    from lazytensor.trace.record import Mutation

Size = tuple[int, ...]

# The smallest extent has the first number of a row, and so on: what is larger than something else is so here, too.  No
# number is the sum, the difference, the product or the half of others.
_STAND_INS = ((5, 9, 13, 16, 23), (7, 12, 20, 31, 44))
_IGNORED = -100  # what losses have for the label that does not count; no position
_MOST_ELEMENTS = 1 << 16  # four dimensions, two of them alike

_empty_strided = torch.ops.aten.empty_strided.default
_full = torch.ops.aten.full.default


def infer(op: Op, args: tuple[Any, ...], call: probe.Call) -> Any:
    """The results as meta tensors; None if this is not the place to ask.

    ``call`` runs the overload with positional and keyword arguments, shielded from the program's modes.
    """
    question = _question(op, args)
    if question is None:
        return None
    places, extents = question
    first = dict(zip(extents, _STAND_INS[0], strict=False))
    pattern = (op, tuple([_pattern(a, first, i in places) for i, a in enumerate(args)]))
    told = _answers.get(pattern)
    if told is None:
        told = _ask(op, args, places, extents, call)
        if told is None:
            return None
        if len(_answers) > 10_000:
            _answers.clear()
        _answers[pattern] = told
    return _made(told, {v: k for k, v in first.items()})


def accepts(mutation: Mutation, args: tuple[Any, ...], call: probe.Call) -> bool:
    """Whether an op that writes some of its arguments takes these: each written tensor keeps its geometry."""
    question = _question(mutation, args)
    if question is None:
        return False
    return all(answer is not None for answer in _small_calls(mutation, args, *question, call, written=True))


# What the CPU told, in the numbers of the first row, by how the call looks in them.
_answers: dict[tuple[Any, ...], Any] = {}


def _question(op: Op | Mutation, args: tuple[Any, ...]) -> tuple[frozenset[int], list[int]] | None:
    """Which arguments are sizes, and the different extents; None if this is not the place to ask."""
    places = _size_arguments(op)
    extents = _distinct(args, places) if places is not None else None
    if places is None or extents is None or len(extents) > len(_STAND_INS[0]):
        return None
    return places, extents


def _small_calls(
    op: Op | Mutation,
    args: tuple[Any, ...],
    places: frozenset[int],
    extents: list[int],
    call: probe.Call,
    written: bool = False,
) -> Iterator[Any]:
    for data, numbers in enumerate(_STAND_INS):
        small = dict(zip(extents, numbers, strict=False))
        reduced = tuple([_reduced(a, small) if i in places else a for i, a in enumerate(args)])
        stand = _Stand(small, data)
        yield probe.answer(op, reduced, call, stand.own if written else stand)


def _ask(op: Op, args: tuple[Any, ...], places: frozenset[int], extents: list[int], call: probe.Call) -> Any:
    """What the results look like in the numbers of the first row, if they do so both times."""
    first = None
    answers = _small_calls(op, args, places, extents, call)
    for numbers, result in zip(_STAND_INS, answers, strict=True):
        told = _told(result, dict(zip(numbers, _STAND_INS[0], strict=True)))
        if told is None or (first is not None and told != first):
            return None
        first = told
    return first


def _pattern(argument: Any, small: dict[int, int], is_size: bool) -> Any:
    """What a small call would be given for this argument, a number apart, of which only the type matters."""
    kind = argument.__class__
    if kind is Value:
        spec = argument.spec
        return tuple([small.get(n, n) for n in spec.size]), _order(spec.stride), spec.dtype
    if kind is Number:
        return argument.kind
    if is_size:
        return _reduced(argument, small)
    return tuple([_pattern(a, small, False) for a in argument]) if kind is tuple else (kind, argument)


# --- which ops --------------------------------------------------------------------------------------------------------

# Beside elementwise ops and reductions, which PyTorch tags: the ops of usual layers.  No rule over schemas tells which
# kernels look at what they are given: ``_fft_c2c`` with a dimension that is not there ends the process, and
# ``_pdist_backward`` reads where nothing is.  All of these check their arguments.
_LAYERS = frozenset(
    f"aten::{name}"
    for name in (
        *("mm", "bmm", "addmm", "baddbmm", "dot", "mv", "addmv", "embedding", "embedding_dense_backward"),
        *("_softmax", "_softmax_backward_data", "_log_softmax", "_log_softmax_backward_data"),
        *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward"),
        *("mse_loss", "mse_loss_backward", "smooth_l1_loss", "smooth_l1_loss_backward", "binary_cross_entropy"),
        *("native_layer_norm", "native_layer_norm_backward", "_native_batch_norm_legit_functional"),
        "_native_batch_norm_legit",
        *("native_batch_norm_backward", "threshold_backward", "gather", "index_select", "select_backward"),
        *("clone", "empty_like", "full_like", "ones_like", "zeros_like", "cumsum", "tril", "triu"),
    )
)

_size_places: dict[Op | Mutation, frozenset[int] | None] = {}


def _size_arguments(op: Op | Mutation) -> frozenset[int] | None:
    """Which arguments are sizes, or numbers that may be; None for an op that is not asked."""
    if op not in _size_places:
        schema, tags = op.overload._schema, op.overload.tags
        known = torch.Tag.pointwise in tags or torch.Tag.reduction in tags
        asked = op.name in _LAYERS or (known and op.name.startswith("aten::") and not op.name.startswith("aten::_"))
        tensors = {r.type.kind() for r in schema.returns} == {"TensorType"}
        # "std(): degrees of freedom is <= 0" would be printed, and is so of the small tensors only.
        asked = asked and not any(a.name == "correction" for a in schema.arguments)
        names = set(re.findall(r"SymInt(?:\[\d*\])?\??\s+(\w+)", str(schema)))
        places = [i for i, a in enumerate(schema.arguments) if a.name in names]
        fit = asked and tensors and torch.Tag.nondeterministic_seeded not in tags
        _size_places[op] = frozenset(places) if fit else None
    return _size_places[op]


# --- the small call ---------------------------------------------------------------------------------------------------


def _distinct(args: tuple[Any, ...], places: frozenset[int]) -> list[int] | None:
    """The different extents above one among the tensors and the sizes; None where a tensor is unusual."""
    found: dict[int, None] = {}
    some = False
    for value in values_in(args):
        some = True
        spec = value.spec
        if not spec.numel or spec.bits or spec.stride != _dense(spec.size, _order(spec.stride)):
            return None
        found.update(dict.fromkeys(value.spec.size))
    for place in places:
        sizes = list(flatten((args[place],)))
        # A position counted from the end, which may lie before the beginning of the real tensor only, is none.
        if not all(n is None or (n.__class__ is int and (n >= -1 or n == _IGNORED)) for n in sizes):
            return None
        found.update(dict.fromkeys(n for n in sizes if n is not None))
    return sorted(n for n in found if n > 1) if some else None


def _reduced(argument: Any, small: dict[int, int]) -> Any:
    if argument.__class__ is tuple:
        return tuple([small.get(n, n) for n in argument])
    return small.get(argument, argument)


class _Stand:
    """Makes the small tensor of a real one: zeros, the second time ones."""

    def __init__(self, small: dict[int, int], data: int) -> None:
        self.small = small
        self.data = data

    def __call__(self, spec: Spec) -> torch.Tensor:
        key = self._key(spec)
        found = _made_before.get(key)
        if found is None:
            if len(_made_before) > 1000:
                _made_before.clear()
            found = _made_before[key] = self._make(*key)
        return found

    def own(self, spec: Spec) -> torch.Tensor:
        """One that nothing else is given, to be written."""
        return self._make(*self._key(spec))

    def _key(self, spec: Spec) -> tuple[Size, Size, torch.dtype, int]:
        size = tuple([self.small.get(n, n) for n in spec.size])
        # Whole numbers may be positions, which have to be there.
        fill = self.data if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
        return size, _order(spec.stride), spec.dtype, fill

    def _make(self, size: Size, order: Size, dtype: torch.dtype, fill: int) -> torch.Tensor:
        if prod(size) > _MOST_ELEMENTS:
            raise ValueError("too many elements")
        permuted = _full([size[d] for d in order], fill, dtype=dtype, device="cpu")
        return permuted.as_strided(size, _dense(size, order))  # type: ignore[no-any-return]


_made_before: dict[tuple[Size, Size, torch.dtype, int], torch.Tensor] = {}  # never written


# --- dense permutations -----------------------------------------------------------------------------------------------


def _order(stride: Size) -> Size:
    """The dimensions from the outermost to the innermost."""
    return tuple(sorted(range(len(stride)), key=lambda d: -stride[d]))


def _dense(size: Size, order: Size) -> Size:
    """The strides of a tensor without gaps whose dimensions lie in this order."""
    strides = [0] * len(size)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= size[dim]
    return tuple(strides)


# --- what it tells ----------------------------------------------------------------------------------------------------


def _told(result: Any, real: dict[int, int]) -> Any:
    """The size, in other numbers, order and dtype of the results; None if these are not all known."""
    if isinstance(result, tuple | list):
        each = [_told(r, real) for r in result]
        return None if None in each else each
    if not isinstance(result, torch.Tensor) or result.layout is not torch.strided:
        return None
    size, stride = tuple(result.shape), result.stride()
    order = _order(stride)
    if stride != _dense(size, order) or result.storage_offset() or result.is_conj() or result.is_neg():
        return None
    if not all(n == 1 or n in real for n in size):
        return None
    return tuple([real.get(n, n) for n in size]), order, result.dtype


def _made(told: Any, real: dict[int, int]) -> Any:
    if isinstance(told, list):
        return tuple([_made(each, real) for each in told])
    small, order, dtype = told
    size = tuple([real.get(n, n) for n in small])
    return _empty_strided(size, _dense(size, order), dtype=dtype, device="meta")
