"""PyTorch's own samples (OpInfo) run on CPU eager and on the device under test, and compared.

OpInfo is the database PyTorch tests itself with: for each of some 700 operators, sample arguments, arguments that must
raise, and which dtypes and variants exist.  For one entry and one dtype this module runs every sample forward and
backward, in place and with ``out=`` where the entry has these forms, each under the same seed on both devices, and
returns plain data: one :class:`Outcome` per check.

CPU eager is the definition.  If the CPU raises, the device has to raise the same.
"""

from __future__ import annotations

import functools
import gc
import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from lazytensor.conformance.compare import Rule, difference
from lazytensor.conformance.transplant import Transplant

EQUAL, DIFFERENT, ERROR, EXPECTED = "equal", "different", "error", "expected failure"
FORMS = ("forward", "inplace", "out", "errors")
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.bool)
SEED = 1234

# Where the CPU's own result depends on the addresses of its workspace: one run in sixty gave another last digit.
ADDRESS_DEPENDENT = frozenset(("linalg.lstsq",))

# Memory that no one wrote has no value to compare.
UNINITIALISED = frozenset(
    (
        "empty",
        "empty_like",
        "empty_strided",
        "empty_permuted",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "resize_as_",
    )
)


# Arguments beside the first that PyTorch wants on the CPU, whatever device the first is on.
ON_CPU = frozenset(("tensor_split",))


@dataclass(frozen=True)
class Outcome:
    """One check of one sample."""

    op: str
    dtype: str
    sample: int
    form: str  # one of FORMS
    status: str  # EQUAL, DIFFERENT (another result), ERROR (an exception where CPU gave a result, or the reverse)
    detail: str = ""
    fallbacks: tuple[str, ...] = ()  # the overloads that were not recorded


@dataclass(frozen=True)
class Target:
    """What is tested: a device, the backend that runs its graphs, and how its fallbacks are counted."""

    device: str = "ltc"
    backend: str = "reference"
    gradients: bool = True
    plain: bool = False  # arguments are moved by ``.to(device)``: the device has no strides or aliasing to test
    rule: Rule = field(default_factory=Rule)
    settle: Callable[[], None] = lambda: None  # after an error: nothing may be left pending
    fallbacks: Callable[[], dict[str, int]] = dict  # how often each overload fell back so far


def ltc(backend: str = "reference") -> Target:
    """The device ltc, its graphs run by this backend."""
    import lazytensor as lt

    if backend != lt.settings.backend:
        lt.set_backend(backend)

    def settle() -> None:
        try:
            lt.sync()
        except Exception:  # something still holds the tensors of the failed sample
            gc.collect()
            with suppress(Exception):
                lt.sync()

    rule = Rule(exact=backend == "reference")
    return Target("ltc", backend, rule=rule, settle=settle, fallbacks=lt.metrics.fallbacks)


def avoidable(outcome: Outcome) -> set[str]:
    """The fallbacks of a check that were not for results whose shape, or whose very value, is asked of the data."""
    return {name for name in outcome.fallbacks if not _data_dependent(name)}


@functools.cache
def _data_dependent(name: str) -> bool:
    base, _, overload = name.removeprefix("aten::").partition(".")
    tags = getattr(getattr(torch.ops.aten, base), overload or "default").tags
    return torch.Tag.dynamic_output_shape in tags or torch.Tag.data_dependent_output in tags


@functools.cache
def entries() -> dict[str, Any]:
    """Every entry of op_db by its name, the variant included: ``std_mean.unbiased``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return {name_of(op): op for op in op_db}


def name_of(op: Any) -> str:
    """An entry's name and variant."""
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def supports(op: Any, dtype: torch.dtype) -> bool:
    """Whether the entry has samples of this dtype on the CPU."""
    return dtype in op.supported_dtypes("cpu")


def samples(op: Any, dtype: torch.dtype, limit: int | None = None) -> list[Any]:
    """The first samples of an entry, made on the CPU under a fixed seed."""
    wants_grad = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
    with _seeded():
        found = op.sample_inputs(
            "cpu", dtype, requires_grad=wants_grad and (dtype.is_floating_point or dtype.is_complex)
        )
        return list(itertools.islice(found, limit))


def error_samples(op: Any) -> list[Any]:
    """The calls that the entry says must raise."""
    if op.error_inputs_func is None:
        return []
    with _seeded():
        return list(op.error_inputs("cpu"))


def check_entry(
    op: Any,
    dtype: torch.dtype,
    target: Target,
    limit: int | None = None,
    forms: tuple[str, ...] = FORMS,
    skip: int = 0,
    every: int = 1,
) -> Iterator[Outcome]:
    """Check one entry: ``limit`` bounds its samples; of the checks they give, ``skip`` are left out, then ``every``-th
    taken.
    """
    planned = _checks(op, dtype, limit, forms)
    for outcome, run, sample in itertools.islice(planned, skip, None, every):
        yield _check(outcome, run, sample, target, op)


def _checks(
    op: Any, dtype: torch.dtype, limit: int | None, forms: tuple[str, ...]
) -> Iterator[tuple[Outcome, Callable[..., Any], Any]]:
    name, label = name_of(op), str(dtype).removeprefix("torch.")
    inplace = op.get_inplace()
    for number, sample in enumerate(samples(op, dtype, limit)):
        if "forward" in forms:
            yield Outcome(name, label, number, "forward", EQUAL), _forward(op, sample), sample
        if "inplace" in forms and inplace is not None and not sample.broadcasts_input:
            yield Outcome(name, label, number, "inplace", EQUAL), _inplace(inplace), sample
        if "out" in forms and op.supports_out:
            yield Outcome(name, label, number, "out", EQUAL), _out(op), sample
    if "errors" in forms and dtype is torch.float32:
        for number, wrong in enumerate(error_samples(op)):
            sample = wrong.sample_input
            yield Outcome(name, label, number, "errors", EQUAL), _forward(op, sample), sample


# --- one run, on either device ----------------------------------------------------------------------------------------


def _forward(op: Any, sample: Any) -> Callable[..., Any]:
    def run(target: Target, move: Transplant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = op(*args, **kwargs)
        grads = _gradients(result, move, sample) if target.gradients else None
        return result, grads

    return run


def _gradients(result: Any, move: Transplant, sample: Any) -> Any:
    """The gradients of every argument that wants one, for a fixed random cotangent per result."""
    if not move.leaves:
        return None
    if sample.output_process_fn_grad is not None:
        result = sample.output_process_fn_grad(result)
    outputs = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.requires_grad]
    if not outputs:
        return None
    cotangents = []
    for number, output in enumerate(outputs):
        made = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(number))
        if output.layout is not torch.strided:
            return None
        cotangents.append(made.to(output.device))
    return torch.autograd.grad(outputs, move.leaves, cotangents, allow_unused=True)


def _inplace(inplace: Callable[..., Any]) -> Callable[..., Any]:
    def run(target: Target, move: Transplant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaf, *rest = args
        written = tree_map(lambda t: t.clone() if isinstance(t, torch.Tensor) else t, leaf)
        result = inplace(written, *rest, **kwargs)
        return written, result is written

    return run


def _functional(op: Any) -> Callable[..., Any]:
    """What ``_inplace`` gives, by way of the functional op."""

    def run(target: Target, move: Transplant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaf, *rest = args
        written = leaf.clone()
        written.copy_(op(leaf, *rest, **kwargs))
        return written, True

    return run


def _out(op: Any) -> Callable[..., Any]:
    def run(target: Target, move: Transplant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with torch.no_grad():
            torch.default_generator.manual_seed(SEED)
            shaped = op(*args, **kwargs)
            out = tree_map(lambda t: torch.zeros_like(t) if isinstance(t, torch.Tensor) else t, shaped)
            torch.default_generator.manual_seed(SEED)
            result = op(*args, **kwargs, out=out)
        return tuple(tree_leaves(out)), all(a is b for a, b in zip(tree_leaves(result), tree_leaves(out), strict=True))

    return run


@dataclass
class _Ran:
    """What a run gave: a result (read to the CPU's side), or the exception it raised."""

    result: Any = None
    error: BaseException | None = None
    generator: Any = None


def _run(run: Callable[..., Any], sample: Any, target: Target, device: str, op: Any) -> _Ran:
    ran = _Ran()
    with _seeded():
        try:
            move = Transplant(device, target.plain)
            if op.name in ON_CPU:
                args, kwargs = (move(sample.input), *sample.args), sample.kwargs
            else:
                args, kwargs = move.call((sample.input, *sample.args), sample.kwargs)
            torch.default_generator.manual_seed(SEED)
            ran.result = run(target, move, args, kwargs)
            if device != "cpu":
                tree_map(lambda t: t.detach().cpu() if isinstance(t, torch.Tensor) else t, ran.result)
        except Exception as error:
            ran.error = error.with_traceback(None)
        ran.generator = torch.get_rng_state()
    return ran


def _check(outcome: Outcome, run: Callable[..., Any], sample: Any, target: Target, op: Any) -> Outcome:
    cpu = _run(run, sample, target, "cpu", op)
    before = target.fallbacks()
    found = _run(run, sample, target, target.device, op)
    fallbacks = tuple(name for name, count in target.fallbacks().items() if count != before.get(name, 0))
    if found.error is not None:
        target.settle()
    status, detail = _judge(cpu, found, target, op)
    if status is DIFFERENT and outcome.form == "inplace" and outcome.dtype.startswith("complex"):
        # The CPU's kernels for complex numbers round in place otherwise than out of place; ltc records the latter.
        apart = _run(_functional(op), sample, target, "cpu", op)
        if _judge(apart, found, target, op)[0] is EQUAL:
            status, detail = EQUAL, "equal to the CPU's functional form, from which its in-place form differs"
    if status is DIFFERENT and not _deterministic(cpu, run, sample, target, op):
        status, detail = EQUAL, "the CPU's own result changes from run to run"
    return Outcome(outcome.op, outcome.dtype, outcome.sample, outcome.form, status, detail, fallbacks)


def _judge(cpu: _Ran, found: _Ran, target: Target, op: Any) -> tuple[str, str]:
    if cpu.error is not None or found.error is not None:
        if cpu.error is None:
            return ERROR, f"{type(found.error).__name__}: {_text(found.error)}"
        if found.error is None:
            return ERROR, f"no error, but on CPU {type(cpu.error).__name__}: {_text(cpu.error)}"
        if type(cpu.error) is not type(found.error) or _text(cpu.error) != _text(found.error, target.device):
            return ERROR, (
                f"{type(found.error).__name__}: {_text(found.error)}; "
                f"on CPU {type(cpu.error).__name__}: {_text(cpu.error)}"
            )
        return EQUAL, ""
    rule = target.rule
    if op.name in UNINITIALISED:
        rule = replace(rule, values=False)
    if op.name in ADDRESS_DEPENDENT:
        rule = replace(rule, exact=False)
    told = difference(cpu.result, found.result, rule)
    if told is None and rule.exact and not torch.equal(cpu.generator, found.generator):
        told = "the random number generator stands at another place afterwards"
    return (EQUAL, "") if told is None else (DIFFERENT, told)


def _deterministic(cpu: _Ran, run: Callable[..., Any], sample: Any, target: Target, op: Any) -> bool:
    """Whether the CPU gives the same result again, at other addresses."""
    kept = []
    for attempt in range(16):
        kept.append(torch.empty(17 + 24 * attempt))
        if difference(cpu.result, _run(run, sample, target, "cpu", op).result, Rule()) is not None:
            return False
    return True


def _text(error: BaseException | None, device: str = "") -> str:
    """An exception's message as far as the device cannot show in it."""
    text = str(error).split("\nException raised from")[0].split("\nPosition: ")[0]  # what follows shows the arguments
    if device:
        text = text.replace(f"{device}:0", "cpu").replace(device, "cpu")
    return text.strip()


@contextmanager
def _seeded() -> Iterator[None]:
    """A scope with every generator that samples draw from at a fixed place, which does not move them outside."""
    import numpy  # op_db itself needs it

    python, arrays = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        numpy.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(python)
            numpy.random.set_state(arrays)


__all__ = [
    "DIFFERENT",
    "DTYPES",
    "EQUAL",
    "ERROR",
    "EXPECTED",
    "FORMS",
    "Outcome",
    "Target",
    "avoidable",
    "check_entry",
    "entries",
    "ltc",
    "name_of",
    "supports",
]
