"""Random numbers: the same seed gives the same run, reads never change them, and they never recompile.

The policy is ``host``: a random op draws on the CPU when it is recorded, from the generator that CPU eager would use, with
the same geometry.  What it drew is device data.  So the numbers are bit-equal to CPU eager's, CPU draws in between
included, and there is nothing random left in a graph.

An op whose draw depends on data that is still pending (``multinomial``, ``bernoulli`` of a tensor of probabilities) needs that
data: it falls back.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.execute import fallback
from lazytensor.trace import storage
from lazytensor.trace.shapes import clean
from lazytensor.trace.storage import state_of

# In these ops the first tensor gives the geometry only: the draw does not look at what it holds.
_GEOMETRY_ONLY = frozenset(
    ["aten::normal_", "aten::uniform_", "aten::random_", "aten::random_.from", "aten::random_.to", "aten::exponential_", "aten::geometric_", "aten::log_normal_", "aten::cauchy_", "aten::bernoulli_.float", "aten::rand_like", "aten::randn_like", "aten::randint_like", "aten::randint_like.low_dtype", "aten::randint_like.Tensor", "aten::rand_like.generator", "aten::randn_like.generator", "aten::randint_like.generator", "aten::randint_like.low_generator_dtype", "aten::uniform", "aten::normal_functional", "aten::exponential", "aten::geometric", "aten::log_normal", "aten::cauchy", "aten::random", "aten::random.from", "aten::random.to", "aten::bernoulli.p"]
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
        raise storage.errors.mixed_devices(tensor.device)
    spec = state_of(tensor).spec
    target = kwargs.get("device")
    if target is not None and target.type != "ltc":
        with clean():
            like = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype)
            return op.overload(like, *args[1:], **kwargs)
    if target is not None:
        kwargs = kwargs | {"device": torch.device("cpu")}
    with clean():
        like = torch.empty((_extent(spec),), dtype=spec.dtype).as_strided(spec.size, spec.stride, 0)
        result = op.overload(like, *args[1:], **kwargs)
    if result is not like:
        return storage.make_data(result, spec.device if target is None or target.index is None else target.index)
    fallback.write_back(tensor, like)
    return tensor


def _extent(spec: Any) -> int:
    return 1 + sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True)) if spec.numel else 0
