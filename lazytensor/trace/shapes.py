"""Shape inference, on a miss only: PyTorch's meta kernels answer, and the CPU is asked for the exact error.

PyTorch's meta kernels know the size, stride and dtype of nearly every op's results.  Where they refuse, there are two
possibilities: the call is wrong, or the op has no shape rule.  The CPU kernel tells which, on zeros of the same
geometry: if it raises, that is the error eager would have raised; if not, and the shape of the results cannot depend on
data, the geometry of what it gave is the answer.  An op that is left over cannot be recorded and falls back.

For a few ops the meta kernel answers, but not what the CPU kernel gives: for these the CPU is asked in the first place.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace import elementwise, extents, probe, storage
from lazytensor.trace.ir import Const, Number, Op, Spec, Value, flatten, spec_of, values_in

if TYPE_CHECKING:
    from lazytensor.trace.record import Mutation

__all__ = ["DATA_DEPENDENT", "CannotInfer", "call_arguments", "flatten", "infer", "infer_mutation", "settle"]


class CannotInfer(Exception):
    """No shape rule can take this call: it has to run eagerly."""


def call_arguments(
    op: Op | Mutation, args: tuple[Any, ...], convert: Callable[[Any], Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Canonical arguments as a call: positional ones and keyword-only ones, each leaf converted."""
    keywords = op.keywords
    split = len(args) - len(keywords)
    positional = [_convert(a, convert) for a in args[:split]]
    return positional, {k: _convert(a, convert) for k, a in zip(keywords, args[split:], strict=True)}


def _convert(argument: Any, convert: Callable[[Any], Any]) -> Any:
    if argument.__class__ is tuple:
        return [_convert(a, convert) for a in argument]
    if argument.__class__ is Const:
        return argument.value
    return convert(argument)


class _Stand:
    """Turns canonical arguments into tensors of another device with the same geometry, and numbers into numbers."""

    def __init__(self, device: str, fill: int = 0) -> None:
        self.device = device
        self.fill = fill
        self.made: dict[Any, torch.Tensor] = {}

    def __call__(self, argument: Any) -> Any:
        kind = argument.__class__
        if kind is Value:
            tensor = self.made.get(argument)
            if tensor is None:
                tensor = self.made[argument] = self.tensor(argument.spec)
            return tensor
        if kind is Number:
            return storage.numbers[argument.index]
        if kind is torch.device:
            return torch.device(self.device)
        return argument

    def tensor(self, spec: Spec) -> torch.Tensor:
        """A tensor that looks like this, with a storage large enough for its offset."""
        if self.device == "meta":
            if spec.offset == 0 and not spec.bits:
                return _empty_strided(spec.size, spec.stride, dtype=spec.dtype, device="meta")  # type: ignore[no-any-return]
            base = _empty_strided((_extent(spec),), (1,), dtype=spec.dtype, device="meta")
        else:
            base = torch.ops.aten.full.default([_extent(spec)], self.fill, dtype=spec.dtype, device="cpu")
        return with_bits(base.as_strided(spec.size, spec.stride, spec.offset), spec.bits)


_empty_strided = torch.ops.aten.empty_strided.default


def with_bits(tensor: torch.Tensor, bits: int) -> torch.Tensor:
    """The tensor seen conjugated (1) or negated (2), as a Spec says it."""
    if bits & 1:
        tensor = tensor.conj()
    return torch._neg_view(tensor) if bits & 2 else tensor  # type: ignore[attr-defined]


def _extent(spec: Spec) -> int:
    if spec.numel == 0:
        return spec.offset
    return spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True))


class _Clean:
    """A scope in which PyTorch's modes, autocast and autograd of the user's code do not reach our own calls."""

    def __enter__(self) -> None:
        self.guards: list[Any] = [
            torch._C._AutoDispatchBelowAutograd(),  # type: ignore[attr-defined]
            torch._C._DisableAutocast(),
            torch._C.DisableTorchFunction(),
        ]
        if torch._C._len_torch_dispatch_stack():
            from torch.utils._python_dispatch import _disable_current_modes

            self.guards.append(_disable_current_modes())
        for guard in self.guards:
            guard.__enter__()

    def __exit__(self, *exc: Any) -> None:
        for guard in reversed(self.guards):
            guard.__exit__(*exc)


clean = _Clean


def infer(op: Op, args: tuple[Any, ...]) -> Any:
    """The outputs of this op as meta tensors.  Raises eager's own error, or CannotInfer."""
    if not op.view:
        quick = probe.infer(op, args, _shielded)
        if quick is None:
            quick = extents.infer(op, args, _shielded)
        if quick is not None:
            return quick
    positional, keyword = call_arguments(op, args, _Stand("meta"))
    if keyword.get("layout", torch.strided) not in (None, torch.strided):
        raise CannotInfer(f"layout {keyword['layout']} has no lazy form")
    try:
        with clean():
            result = op.overload._op(*positional, **keyword)
    except Exception as refusal:
        result = _without_meta(op, args, refusal)
    else:
        if not op.view:
            result = _as_the_cpu(op, args, result, positional)
    return result if op.view else _in_own_memory(_wanted(op, args, result))


def _shielded(overload: Any, positional: list[Any], keyword: dict[str, Any]) -> Any:
    with clean():
        return overload._op(*positional, **keyword)


CHEAP = 1 << 14  # elements, in and out, up to which the CPU kernel is asked: it is then quicker than most meta kernels


def _as_the_cpu(op: Op, args: tuple[Any, ...], result: Any, operands: list[Any]) -> Any:
    """What a meta kernel said, set right where the CPU kernel says otherwise: other strides, an error it lets pass."""
    tags = op.overload.tags
    if op.name not in CPU_DECIDES:
        if DATA_DEPENDENT & set(tags) or not op.name.startswith("aten::"):
            return result
        values = values_in(args)
        mixed = len({v.dtype for v in values}) > 1  # which most errors that they let pass are about
        limit = CHEAP << 6 if mixed else CHEAP
        if sum(v.spec.numel for v in values) + _elements(result) > limit:
            # clone is tagged pointwise too, but its memory_format decides: x.mT.clone(contiguous) kept x's strides.
            decided = "memory_format" in op.keywords
            return _elementwise(result, operands) if torch.Tag.pointwise in tags and not decided else result
    try:
        found = on_zeros(op, args)
    except Exception as error:
        # Zeros may be bad data (a remainder by zero).  What is wrong with ones as well is wrong with any; but a matrix
        # of either is singular, and integers may be lengths that have to add up (segment_reduce), unless the error is
        # about their type.  Where each element stands for itself nothing has to add up.
        try:
            found = on_zeros(op, args, 1)
        except Exception as again:
            whole = torch.Tag.pointwise not in op.overload.tags and any(v.dtype in _WHOLE for v in values_in(args))
            suspect = whole and "type" not in str(error) and not isinstance(error, NotImplementedError)
            if isinstance(error, torch.linalg.LinAlgError) or suspect or str(again) != str(error):
                return result
            raise error.with_traceback(None) from None
    return found if op.name in CPU_DECIDES or _sizes(found) == _sizes(result) else result


_WHOLE = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def _elements(result: Any) -> int:
    if isinstance(result, tuple | list):
        return sum(map(_elements, result))
    return result.numel() if isinstance(result, torch.Tensor) else 0


def _sizes(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [_sizes(r) for r in result]
    return result.shape if isinstance(result, torch.Tensor) else None


def _elementwise(result: Any, arguments: list[Any]) -> Any:
    """An elementwise result with the strides of the CPU's iterator."""
    operands = [a for a in arguments if isinstance(a, torch.Tensor)]
    if not isinstance(result, torch.Tensor) or not operands:
        return result
    shape = tuple(result.shape)
    if tuple(torch.broadcast_shapes(*[t.shape for t in operands])) != shape:
        return result
    return _empty_strided(shape, elementwise.strides(shape, operands), dtype=result.dtype, device="meta")


def _wanted(op: Op, args: tuple[Any, ...], result: Any) -> Any:
    """Without the outputs that ``output_mask`` leaves out: meta kernels make them all the same, the CPU's do not."""
    names = [a.name for a in op.overload._schema.arguments]
    if "output_mask" not in names or not isinstance(result, tuple):
        return result
    mask = args[names.index("output_mask")]
    return tuple(r if wanted else None for r, wanted in zip(result, mask, strict=True))


# The meta kernels of these ops describe other results than the CPU kernels give.
CPU_DECIDES = frozenset(
    (
        "aten::_native_multi_head_attention",  # no weights are returned unless they were asked for
        "aten::native_layer_norm",  # the CPU's statistics have the weights' dtype, the meta kernel's the widest
        "aten::native_group_norm",
        "aten::native_batch_norm",  # in evaluation the CPU returns empty statistics, the meta kernel full ones
        "aten::_native_batch_norm_legit_functional",
        "aten::_embedding_bag",  # the CPU's fast path leaves its bookkeeping empty
        "aten::_embedding_bag_forward_only",
        "aten::_fft_r2c",  # strides
        "aten::_fft_c2r",
        "aten::_fft_c2c",
        "aten::linalg_eig",
        "aten::_linalg_svd",
        "aten::max_unpool2d",
        "aten::mkldnn_rnn_layer",  # the CPU's workspace has a size that only oneDNN knows
        "aten::mkldnn_rnn_layer_backward",
        "aten::nonzero_static",
        "aten::_linalg_eigvals",
    )
)


def _without_meta(op: Op, args: tuple[Any, ...], refusal: Exception) -> Any:
    """What the CPU gives for zeros, where the meta kernel refused.  Raises eager's error, or CannotInfer."""
    missing = isinstance(refusal, NotImplementedError)
    reason = CannotInfer(str(refusal).split("\n", 1)[0] or type(refusal).__name__)
    try:
        result = on_zeros(op, args)
    except Exception as error:
        # With no meta kernel nothing tells that the geometry is at fault, and not the zeros: the real data will tell.
        raise (reason if missing else error.with_traceback(None)) from None
    if not missing or DATA_DEPENDENT & set(op.overload.tags):
        raise reason from None
    return result


DATA_DEPENDENT = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}


def on_zeros(op: Op, args: tuple[Any, ...], fill: int = 0) -> Any:
    """What the CPU gives, or raises, for this call on zeros, or on another number, of the same geometry."""
    positional, keyword = call_arguments(op, args, _Stand("cpu", fill))
    with clean(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return op.overload._op(*positional, **keyword)


def _in_own_memory(result: Any) -> Any:
    """The geometry of results that are not views: each starts a storage of its own, and no bit is set on it."""
    if isinstance(result, tuple | list):
        return type(result)(map(_in_own_memory, result))
    if not isinstance(result, torch.Tensor):
        return result
    if result.layout is not torch.strided:
        raise CannotInfer(f"layout {result.layout} has no lazy form")
    if result.storage_offset() or result.is_conj() or result.is_neg():
        return _empty_strided(result.shape, result.stride(), dtype=result.dtype, device="meta")
    return result


def infer_mutation(
    mutation: Mutation,
    args: tuple[Any, ...],
    outs: tuple[Spec, ...],
    device: int,
    shared: Callable[[], bool],
    out_values: tuple[Value, ...],
) -> tuple[list[Any], bool]:
    """The geometry of each written argument after the op, and whether that holds whoever shares memory with whom.

    Its own geometry, unless an out= argument had to be resized.  Two storages may have the same value, so the values
    tell only whether written memory *could* be that of another argument; ``shared`` tells whether it is.
    """
    written = [args[i] for i in mutation.positions]
    twice, aliased = _suspicions(args, written, out_values)
    question = None if twice or aliased else (mutation, device, outs, looks(args))
    known = inferred_mutations.get(question)
    if known is not None:
        return known, True
    if len(inferred_mutations) > 100_000:
        inferred_mutations.clear()
    if (
        question is not None
        and not outs
        and any(quick.accepts(mutation, args, _shielded) for quick in (probe, extents))
    ):
        known = inferred_mutations[question] = [_specs(w) for w in written]
        return known, True
    stand = _Apart("meta")
    out_tensors = [stand.tensor(s) for s in outs]
    failed = _try(mutation, args, stand, out_tensors)
    specs = outs or tuple(v.spec for v in values_in(written))
    general = True
    if twice or aliased:
        sharing = _Sharing("cpu")
        error = _try(mutation, args, sharing, [sharing(v) for v in out_values] or [sharing.tensor(s) for s in outs])
        if shared():
            if error is not None:
                raise error
            if twice:
                raise CannotInfer("what it writes shares memory")
        else:
            general = error is None and not twice
    overlap = any(map(may_overlap, specs))
    if failed is not None or overlap:
        apart = _Apart("cpu")
        error = _try(mutation, args, apart, [apart.tensor(s) for s in outs])
        if error is not None:
            raise error
        if overlap or outs or not isinstance(failed, NotImplementedError):  # else only the meta kernel is missing
            raise CannotInfer(str(failed).split("\n", 1)[0] if failed else "elements it writes share memory")
    elif not aliased and sum(v.spec.numel for v in values_in(args)) <= CHEAP:
        _ask_about_mutation(mutation, args, outs)
    wanted = [spec_of(t, device) for t in out_tensors] if outs else [_specs(w) for w in written]
    if question is not None:
        inferred_mutations[question] = wanted
    return wanted, general


def _ask_about_mutation(mutation: Mutation, args: tuple[Any, ...], outs: tuple[Spec, ...]) -> None:
    """Raise the error of a mutating call that its meta kernel lets pass, if the CPU raises it whatever the data.

    Symptom: ``float_tensor += complex_tensor`` was recorded, and lost the imaginary part.
    """
    said: list[Exception] = []
    for fill in (0, 1):
        stand = _Apart("cpu", fill)
        error = _try(mutation, args, stand, [stand.tensor(s) for s in outs])
        if error is None:
            return
        said.append(error)
    if str(said[0]) == str(said[1]):
        raise said[1]


# Like the one that record keeps for functional ops: what was inferred, by what the arguments look like.
inferred_mutations: dict[tuple[Any, ...] | None, list[Any]] = {}


def looks(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """What the geometry of results can depend on: what a value looks like, the type of a number, and all the rest."""
    return tuple([_look(a) for a in args])


def _look(argument: Any) -> Any:
    kind = argument.__class__
    if kind is Value:
        return argument.spec
    if kind is Number:
        return argument.kind
    return looks(argument) if kind is tuple else argument


def _try(mutation: Mutation, args: tuple[Any, ...], stand: _Stand, outs: list[torch.Tensor]) -> Exception | None:
    """Run a mutating op on stand-ins; the error, if it raises one."""
    positional, keyword = call_arguments(mutation, args, stand)
    names = [a.name for a in mutation.overload._schema.arguments if a.is_out]
    keyword.update(zip(names, outs, strict=True))
    try:
        with clean(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mutation.overload._op(*positional, **keyword)
    except Exception as error:
        return error.with_traceback(None)
    return None


def check_out(mutation: Mutation, args: tuple[Any, ...], outs: tuple[Spec, ...], results: list[Any]) -> None:
    """Raise what eager raises for out= tensors of another dtype than the results: not every meta kernel looks."""
    stand = _Apart("cpu")
    error = _try(mutation, args, stand, [stand.tensor(s) for s in outs])
    if error is not None and _try(mutation, args, stand, [stand.tensor(v.spec) for v in results]) is None:
        raise error


def check_overlap(mutation: Mutation, args: tuple[Any, ...], outs: tuple[Spec, ...]) -> None:
    """Raise what eager raises for an out= tensor of which elements share memory: it looks at that before the size."""
    if any(map(may_overlap, outs)):
        stand = _Apart("cpu")
        error = _try(mutation, args, stand, [stand.tensor(s) for s in outs])
        if error is not None:
            raise error


class _Apart(_Stand):
    """Stand-ins of which no two share memory, also where two arguments have the same value."""

    def __call__(self, argument: Any) -> Any:
        return self.tensor(argument.spec) if argument.__class__ is Value else super().__call__(argument)


class _Sharing(_Stand):
    """Stand-ins that share memory wherever their values are seen in the same one."""

    def __call__(self, argument: Any) -> Any:
        if argument.__class__ is Value and argument.node.op.view:
            base = super().__call__(root(argument))
            if base.dtype is argument.dtype:
                spec = argument.spec
                return with_bits(base.as_strided(spec.size, spec.stride, spec.offset), spec.bits)
        return super().__call__(argument)


def _suspicions(args: tuple[Any, ...], written: list[Any], outs: tuple[Value, ...]) -> tuple[bool, bool]:
    """Whether the op could write the same memory twice, or write memory that it also reads, as far as the values tell.

    An op over lists goes through them one by one, so there reading what was written before is as bad as writing twice.
    """
    targets = [root(v) for v in (*values_in(written), *outs)]
    roots = set(targets)
    count = sum(root(v) in roots for v in values_in(args)) - (0 if outs else len(targets))
    in_lists = any(w.__class__ is tuple for w in written)
    return len(roots) < len(targets) or (in_lists and count > 0), count > 0


def suspicions(args: tuple[Any, ...], written: list[Any]) -> tuple[bool, bool]:
    """Whether what an op writes can share memory with another argument, and whether with itself."""
    return any(_suspicions(args, written, ())), any(may_overlap(v.spec) for v in values_in(written))


def _specs(written: Any) -> Any:
    return [v.spec for v in written] if written.__class__ is tuple else written.spec


def may_overlap(spec: Spec) -> bool:
    """Whether two elements of this geometry can have the same place in memory, as after ``expand``."""
    reach = 0
    for stride, length in sorted((s, n) for n, s in zip(spec.size, spec.stride, strict=True) if n > 1):
        if stride <= reach:
            return spec.numel > 0
        reach += stride * (length - 1)
    return False


def root(value: Value) -> Value:
    """The value whose memory this one sees: through any number of view ops."""
    while value.node.op.view:
        value = value.node.args[0]
    return value


def settle(op: Op, args: tuple[Any, ...], specs: list[Spec | None]) -> tuple[Any, ...]:
    """The arguments a node keeps: a factory's dtype is written out, as PyTorch's default may change until it runs."""
    keywords = op.keywords
    if "device" not in keywords or "dtype" not in keywords:
        return args
    at = len(args) - len(keywords) + keywords.index("dtype")
    if args[at] is None and specs and specs[0] is not None:
        return (*args[:at], specs[0].dtype, *args[at + 1 :])
    return args
