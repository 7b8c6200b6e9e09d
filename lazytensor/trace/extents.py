"""A quick answer to what an op gives: the CPU kernel is asked about small tensors that stand for the real ones.

PyTorch's meta kernels of the commonest ops (``addmm``, ``native_layer_norm``, ``nll_loss_forward``) are Python and take
one to five milliseconds, and a first step is mostly new calls.  So the kernel itself is run with every extent
replaced: equal extents by equal small numbers, different ones by different ones, also where an argument is a size (its
schema says ``SymInt``).  A result whose extents are all such numbers has copied them, and the real ones are known.

It is asked twice, with other numbers and other data.  An extent that is the sum of two others or a quotient, a limit
that only the small sizes keep, a size that depends on data would have to fit both times.  Whatever is unusual is not
answered here: a call that the CPU refuses, operands or results that are no dense permutation, an op that is not known
to check its arguments.  The meta kernel and the CPU on the whole geometry then have the word.
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

import torch

from lazytensor.trace import probe
from lazytensor.trace.ir import Op, Spec, flatten, values_in

Size = tuple[int, ...]

# No number is the sum, the difference, the product or the half of others in both, and where one is smaller than an
# earlier one in the first row, it is not in the second: an index that is larger than what it points into is refused.
_STAND_INS = ((5, 9, 13, 23, 16), (7, 12, 20, 9, 31))
_MOST_ELEMENTS = 1 << 14

_empty_strided = torch.ops.aten.empty_strided.default
_full = torch.ops.aten.full.default


def infer(op: Op, args: tuple[Any, ...], call: probe.Call) -> Any:
    """The results as meta tensors; None if this is not the place to ask.

    ``call`` runs the overload with positional and keyword arguments, shielded from the program's modes.
    """
    places = _size_arguments(op)
    if places is None:
        return None
    extents = _distinct(args, places)
    if extents is None or len(extents) > len(_STAND_INS[0]):
        return None
    first = None
    for data, numbers in enumerate(_STAND_INS):
        small = dict(zip(extents, numbers, strict=False))
        reduced = tuple([_reduced(a, small) if i in places else a for i, a in enumerate(args)])
        stand = _Stand(small, data)
        told = _told(probe.answer(op, reduced, call, stand), {v: k for k, v in small.items()})
        if told is None or (data and told != first):
            return None
        first = told
    return _made(first)


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
        *("native_batch_norm_backward", "threshold_backward", "gather", "index_select", "select_backward"),
        *("clone", "empty_like", "full_like", "ones_like", "zeros_like", "cumsum", "tril", "triu"),
    )
)

_size_places: dict[Op, frozenset[int] | None] = {}


def _size_arguments(op: Op) -> frozenset[int] | None:
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
        if not all(n is None or n.__class__ is int for n in sizes):
            return None
        found.update(dict.fromkeys(n for n in sizes if n is not None))
    return [n for n in found if n > 1] if some else None


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
        size = tuple([self.small.get(n, n) for n in spec.size])
        # Whole numbers may be positions, which have to be there.
        fill = self.data if spec.dtype.is_floating_point or spec.dtype.is_complex else 0
        key = (size, _order(spec.stride), spec.dtype, fill)
        found = _made_before.get(key)
        if found is None:
            if len(_made_before) > 1000:
                _made_before.clear()
            if prod(size) > _MOST_ELEMENTS:
                raise ValueError("too many elements")
            permuted = _full([size[d] for d in key[1]], fill, dtype=spec.dtype, device="cpu")
            found = _made_before[key] = permuted.as_strided(size, _dense(size, key[1]))
        return found


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
    """The size, order and dtype of the real results; None if they cannot be known from these."""
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


def _made(told: Any) -> Any:
    if isinstance(told, list):
        return tuple(map(_made, told))
    size, order, dtype = told
    return _empty_strided(size, _dense(size, order), dtype=dtype, device="meta")
