"""Reading and writing part of a storage as pure functions of its base value.

A view is a chain of view ops from the base.  To write through it, each op of the chain is undone: the op that takes a
part has an ATen op that puts a part back (``slice`` and ``slice_scatter``), and the ops that only rearrange are undone
by another view. A chain with any other op is written by ``as_strided_scatter``, which can express every view.
"""

from __future__ import annotations

from typing import Any

from lazytensor.trace.ir import Spec, Value, spec
from lazytensor.trace.record import conform, intern, op
from lazytensor.trace.storage import State, ViewState, value_of_state

_AS_STRIDED = op("aten::as_strided", view=True)
_CONJ = op("aten::_conj", view=True)
_NEG = op("aten::_neg_view", view=True)


def extract(base: Value, geometry: Spec) -> Value:
    """The part of a base value that a tensor of this geometry sees."""
    if base.dtype is not geometry.dtype:
        base = intern(op("aten::view.dtype", view=True), (flat(base, geometry.dtype.itemsize), geometry.dtype))
    part = intern(_AS_STRIDED, (base, geometry.size, geometry.stride, geometry.offset))
    return with_bits(part, geometry.bits)


def with_bits(value: Value, bits: int) -> Value:
    """The value seen conjugated (1) or negated (2); seen so again, it is what it was."""
    if bits & 1:
        value = intern(_CONJ, (value,))
    if bits & 2:
        value = intern(_NEG, (value,))
    return value


def flat(base: Value, itemsize: int = 1) -> Value:
    """The whole storage of a base value as one dimension, as far as whole elements of ``itemsize`` bytes fit."""
    size = 1 + sum((n - 1) * s for n, s in zip(base.size, base.spec.stride, strict=True)) if base.spec.numel else 0
    size -= size * base.dtype.itemsize % itemsize // base.dtype.itemsize
    return intern(_AS_STRIDED, (base, (size,), (1,), 0))  # type: ignore[no-any-return]


def replace(view: ViewState, new: Value) -> Value:
    """The base value in which the part that ``view`` sees is ``new``."""
    base = view.base
    chain: list[ViewState] = []
    state: State | ViewState | None = view
    while isinstance(state, ViewState):
        chain.append(state)
        state = state.parent
    steps = [_PUT_BACK.get(part.proto.node.op.name) for part in chain]
    if state is None or None in steps:  # put back at once: elements of a view in between may share memory
        return conform(_scatter(value_of_state(base), new, view.spec), base.spec)
    for part, put_back in zip(chain, steps, strict=True):
        node = part.proto.node
        new = put_back(value_of_state(part.parent), new, node.args[1:], part.proto)  # type: ignore[misc,arg-type]
    return conform(new, base.spec)


def _scatter(whole: Value, part: Value, geometry: Spec) -> Value:
    part = with_bits(part, geometry.bits)
    if whole.dtype is geometry.dtype:
        return intern(  # type: ignore[no-any-return]
            op("aten::as_strided_scatter"), (whole, part, geometry.size, geometry.stride, geometry.offset)
        )
    to_dtype = op("aten::view.dtype", view=True)
    seen = intern(to_dtype, (flat(whole, geometry.dtype.itemsize), geometry.dtype))
    done = intern(op("aten::as_strided_scatter"), (seen, part, geometry.size, geometry.stride, geometry.offset))
    back = intern(to_dtype, (done, whole.dtype))
    everything = flat(whole)
    if back.size != everything.size:
        back = intern(op("aten::slice_scatter"), (everything, back, 0, 0, back.size[0], 1))
    return intern(_AS_STRIDED, (back, whole.size, whole.spec.stride, 0))  # type: ignore[no-any-return]


def _scattering(name: str) -> Any:
    def put_back(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
        return intern(op(name), (parent, new, *rest))  # type: ignore[no-any-return]

    return put_back


def _select(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return intern(op("aten::select_scatter"), (parent, new, *rest))  # type: ignore[no-any-return]


def _unbind(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return intern(op("aten::select_scatter"), (parent, new, rest[0], proto.index))  # type: ignore[no-any-return]


def _split(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    sizes, dim = rest[0], rest[1]
    start = sum(sizes[: proto.index]) if isinstance(sizes, tuple) else sizes * proto.index
    end = start + new.size[dim]
    return intern(op("aten::slice_scatter"), (parent, new, dim, start, end, 1))  # type: ignore[no-any-return]


def _transpose(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return intern(op("aten::transpose.int", view=True), (new, rest[0], rest[1]))  # type: ignore[no-any-return]


def _t(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return intern(op("aten::t", view=True), (new,))  # type: ignore[no-any-return]


def _permute(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    dims = [d % len(rest[0]) for d in rest[0]]
    inverse = tuple(sorted(range(len(dims)), key=dims.__getitem__))
    return intern(op("aten::permute", view=True), (new, inverse))  # type: ignore[no-any-return]


def _reshape(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    """Undo a view that keeps the elements in row-major order."""
    order = spec(new.size, _row_major(new.size), 0, new.dtype, new.spec.device)
    return intern(op("aten::view", view=True), (_dense(new, order), parent.size))  # type: ignore[no-any-return]


def _dense(new: Value, wanted: Spec) -> Value:
    return new if new.spec.stride == wanted.stride else conform(new, wanted)


def _row_major(size: tuple[int, ...]) -> tuple[int, ...]:
    from lazytensor.trace.ir import contiguous_stride

    return contiguous_stride(size)


def _conj(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return with_bits(new, 1)


def _neg_view(parent: Value, new: Value, rest: tuple[Any, ...], proto: Value) -> Value:
    return with_bits(new, 2)


_PUT_BACK = {
    "aten::_conj": _conj,
    "aten::_neg_view": _neg_view,
    "aten::slice.Tensor": _scattering("aten::slice_scatter"),
    "aten::diagonal": _scattering("aten::diagonal_scatter"),
    "aten::select.int": _select,
    "aten::unbind.int": _unbind,
    "aten::split.Tensor": _split,
    "aten::split_with_sizes": _split,
    "aten::transpose.int": _transpose,
    "aten::t": _t,
    "aten::permute": _permute,
    "aten::view": _reshape,
    "aten::_unsafe_view": _reshape,
    "aten::_reshape_alias": _reshape,
    "aten::unsqueeze": _reshape,
    "aten::squeeze": _reshape,
    "aten::squeeze.dim": _reshape,
    "aten::squeeze.dims": _reshape,
}
