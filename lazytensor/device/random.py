"""Random numbers: the same seed gives the same run, reads never change them, and they never recompile.

The policy is ``host``: a random op draws on the CPU when it is recorded, from the generator that CPU eager would use,
with the same geometry.  What it drew is device data.  So the numbers are bit-equal to CPU eager's, CPU draws in between
included, and there is nothing random left in a graph.

An op that looks at data that may be pending (``multinomial``, ``bernoulli`` of a tensor of probabilities) is recorded
together with the state of its generator, which becomes a leaf; the generator itself is moved on as eager would, by a
draw for arguments of the same geometry.  That is exact where the count of numbers drawn depends on the geometry alone.
The others (``poisson``, ``rrelu``, the gamma family) need the data: they fall back.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

from lazytensor import errors
from lazytensor.device import geometry, library
from lazytensor.execute import fallback
from lazytensor.trace import record, storage
from lazytensor.trace.ir import Value
from lazytensor.trace.shapes import clean
from lazytensor.trace.storage import state_of

# In these ops the first tensor gives the geometry only: the draw does not look at what it holds.
_GEOMETRY_ONLY = frozenset(
    (
        "aten::normal_",
        "aten::uniform_",
        "aten::random_",
        "aten::random_.from",
        "aten::random_.to",
        "aten::exponential_",
        "aten::geometric_",
        "aten::log_normal_",
        "aten::cauchy_",
        "aten::bernoulli_.float",
        "aten::rand_like",
        "aten::randn_like",
        "aten::randint_like",
        "aten::randint_like.low_dtype",
        "aten::randint_like.Tensor",
        "aten::rand_like.generator",
        "aten::randn_like.generator",
        "aten::randint_like.generator",
        "aten::randint_like.low_generator_dtype",
        "aten::uniform",
        "aten::normal_functional",
        "aten::exponential",
        "aten::geometric",
        "aten::log_normal",
        "aten::cauchy",
        "aten::random",
        "aten::random.from",
        "aten::random.to",
        "aten::bernoulli.p",
    )
)


def draw(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw now, on the CPU."""
    generator = kwargs.get("generator")
    if generator is not None and generator.device.type != "cpu":
        kwargs = kwargs | {"generator": _host_generator(generator)}
    if op.name in _GEOMETRY_ONLY:
        return _draw_like(op, args, kwargs)
    tensors = [a for a in [*args, *kwargs.values()] if isinstance(a, torch.Tensor)]
    if not tensors:
        return _draw_new(op, args, kwargs)
    form = _FORMS.get(op.name)
    if form is not None:
        return _draw_later(op, form, args, kwargs)
    return fallback.run_call(op, args, kwargs, "its draw depends on data")


def _host_generator(generator: torch.Generator) -> torch.Generator:
    raise RuntimeError(f"Expected a 'cpu' device type for generator but found '{generator.device.type}'")


def _draw_new(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    from lazytensor.device.runtime import this_device

    device = this_device(kwargs.get("device"))
    with clean():
        data = op.overload(*args, **(kwargs | {"device": torch.device("cpu"), "pin_memory": None}))
    return storage.make_data(data, device.index)


def _draw_like(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    tensor = args[0]
    if tensor.device.type != "ltc":
        raise errors.mixed_devices(tensor.device)
    spec = state_of(tensor).spec
    target = kwargs.get("device")
    if target is not None and target.type != "ltc":
        with clean():
            like = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
            return op.overload(like, *args[1:], **kwargs)
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    with clean():
        like = _like(spec)
        result = op.overload(like, *args[1:], **kwargs)
    if result is not like:
        return storage.make_data(result, spec.device if target is None or target.index is None else target.index)
    fallback.write_back(tensor, like)
    return tensor


# Mutating overloads and the functional one that is recorded for them.
_FORMS = {name: name for name in library.DRAWS} | {
    "aten::bernoulli_.Tensor": "aten::bernoulli.Tensor",
    "aten::bernoulli.out": "aten::bernoulli",
    "aten::bernoulli.Tensor_out": "aten::bernoulli.Tensor",
    "aten::multinomial.out": "aten::multinomial",
    "aten::normal.Tensor_float_out": "aten::normal.Tensor_float",
    "aten::normal.float_Tensor_out": "aten::normal.float_Tensor",
    "aten::normal.Tensor_Tensor_out": "aten::normal.Tensor_Tensor",
}


def _draw_later(op: Any, form: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record the draw with the generator's state, and move the generator on."""
    generator = kwargs.get("generator") or torch.default_generator
    out = kwargs.get("out")
    arguments = _arguments(record.op(form), args, kwargs)
    device = next(a.device.index for a in arguments if isinstance(a, torch.Tensor) and a.device.type == "ltc")
    before = generator.get_state()
    _move_on(op if out is not None else record.op(form), arguments, generator, out)
    state = storage.value_of(storage.make_data(before, device))
    values = [storage.value_of(a) if isinstance(a, torch.Tensor | float) else a for a in arguments]
    entry = record.intern(record.op(library.DRAWS[form]), (state, *values))
    if out is not None:
        return _put(out, entry)
    if op.overload._schema.is_mutable:
        storage.write(args[0], record.conform(entry, state_of(args[0]).spec))
        return args[0]
    return record.wrap(entry)


def _put(out: torch.Tensor, value: Value) -> torch.Tensor:
    """Write a value into an ``out=`` tensor, which is resized if need be."""
    if not _is_ltc(out):
        raise errors.mixed_devices(out.device)
    if out.shape != value.size:
        if out.numel():
            geometry.warn_resized(out, value.size)
        geometry.resize(out, value.size)
    storage.write(out, record.conform(value, state_of(out).spec))
    return out


def _arguments(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The arguments of a call in the order of the schema, defaults filled in, the generator left out."""
    found = []
    for number, argument in enumerate(op.overload._schema.arguments):
        if argument.name != "generator":
            given = args[number] if number < len(args) else kwargs.get(argument.name, argument.default_value)
            found.append(given)
    return found


def _move_on(op: Any, arguments: list[Any], generator: torch.Generator, out: torch.Tensor | None) -> None:
    """Draw as many numbers as eager would, and raise what eager would raise for this geometry."""

    def stand(argument: Any) -> Any:
        # Ones are valid probabilities, weights and deviations.
        return torch.ones_like(_like(state_of(argument).spec)) if _is_ltc(argument) else argument

    with clean(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given: dict[str, Any] = (
            {"generator": generator} if any(a.name == "generator" for a in op.overload._schema.arguments) else {}
        )
        if out is not None:
            given["out"] = _like(state_of(out).spec) if _is_ltc(out) else out
        op.overload(*map(stand, arguments), **given)


def _is_ltc(argument: Any) -> bool:
    return isinstance(argument, torch.Tensor) and argument.device.type == "ltc"


def _like(spec: Any) -> torch.Tensor:
    return torch.empty((_extent(spec),), dtype=spec.dtype).as_strided(spec.size, spec.stride, 0)


def _extent(spec: Any) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True)) if spec.numel else 0
