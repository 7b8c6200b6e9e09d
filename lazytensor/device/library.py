"""The ops that lazytensor adds to PyTorch's: forms of ATen ops that can stand in a graph where ATen's own cannot.

``lazytensor::draw_…``
    A random op that is given the state of its generator.  ATen's takes the numbers from a generator whose state when
    the graph runs is not the one when the op was recorded.
``lazytensor::check_…``
    An op that only checks, and returns nothing: here it returns what it checked, so that a graph can have it as a
    result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

_library = torch.library.Library("lazytensor", "DEF")


def define(
    schema: str, function: Callable[..., Any], meta: Callable[..., Any], on_cuda: Callable[..., Any] | None = None
) -> str:
    """Add an op; its name.  On CUDA it is the same function, unless there is another."""
    name = schema.partition("(")[0]
    _library.define(schema)
    _library.impl(name, function, "CPU")
    _library.impl(name, on_cuda or function, "CUDA")
    _library.impl(name, meta, "Meta")
    return "lazytensor::" + name


# --- random ops with the state of their generator as an argument ------------------------------------------------------


def _draw(overload: Any) -> tuple[Callable[..., Any], ...]:
    """An ATen random op as a function of its generator's state, the same on meta tensors, which draws nothing, and on
    those of an accelerator.
    """

    def draw(state: torch.Tensor, *args: Any) -> Any:
        generator = torch.Generator()
        generator.set_state(state)
        return overload(*args, generator=generator)

    def meta(state: torch.Tensor, *args: Any) -> Any:
        return overload(*args)

    return draw, meta, on_host(draw)


def on_host(draw: Callable[..., Any]) -> Callable[..., Any]:
    """The same on tensors of an accelerator.  The generator is the CPU's, whose numbers the program is to have: they
    are drawn there.
    """

    def draw_there(*args: Any) -> Any:
        given = [a.cpu() if isinstance(a, torch.Tensor) else a for a in args]
        return tree_map_only(torch.Tensor, lambda drawn: drawn.to(args[0].device), draw(*given))

    return draw_there


def _dropout(state: torch.Tensor, input: torch.Tensor, p: float, train: bool | None) -> Any:
    # native_dropout takes no generator: the default one stands in for the length of the call.
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(state)
        return torch.ops.aten.native_dropout.default(input, p, train)


def _dropout_meta(state: torch.Tensor, input: torch.Tensor, p: float, train: bool | None) -> Any:
    return torch.ops.aten.native_dropout.default(input, p, train)


aten = torch.ops.aten

# ATen overload -> the op that takes the state first and then the same arguments.  In each the count of numbers drawn
# depends on the geometry of the arguments only; elsewhere (poisson, rrelu, gamma) it depends on their values.
DRAWS: dict[str, str] = {
    "aten::bernoulli": define("draw_bernoulli(Tensor state, Tensor self) -> Tensor", *_draw(aten.bernoulli.default)),
    "aten::bernoulli.Tensor": define(
        "draw_bernoulli_like(Tensor state, Tensor self, Tensor p) -> Tensor", *_draw(aten.bernoulli.Tensor)
    ),
    "aten::multinomial": define(
        "draw_multinomial(Tensor state, Tensor self, int num_samples, bool replacement) -> Tensor",
        *_draw(aten.multinomial.default),
    ),
    "aten::normal.Tensor_float": define(
        "draw_normal_mean(Tensor state, Tensor mean, float std) -> Tensor", *_draw(aten.normal.Tensor_float)
    ),
    "aten::normal.float_Tensor": define(
        "draw_normal_std(Tensor state, float mean, Tensor std) -> Tensor", *_draw(aten.normal.float_Tensor)
    ),
    "aten::normal.Tensor_Tensor": define(
        "draw_normal(Tensor state, Tensor mean, Tensor std) -> Tensor", *_draw(aten.normal.Tensor_Tensor)
    ),
    "aten::native_dropout": define(
        "draw_dropout(Tensor state, Tensor input, float p, bool? train) -> (Tensor, Tensor)",
        _dropout,
        _dropout_meta,
        on_host(_dropout),
    ),
}


# --- checks -----------------------------------------------------------------------------------------------------------


def _linalg(info: torch.Tensor, api_name: str, is_matrix: bool) -> torch.Tensor:
    torch._linalg_check_errors(info, api_name, is_matrix=is_matrix)
    return info.clone()


def _linalg_meta(info: torch.Tensor, api_name: str, is_matrix: bool) -> torch.Tensor:
    return torch.empty_like(info)


def _assert(self: torch.Tensor, message: str) -> torch.Tensor:
    torch._assert_async(self, message) if message else torch._assert_async(self)
    return self.clone()


def _assert_meta(self: torch.Tensor, message: str) -> torch.Tensor:
    return torch.empty_like(self)


CHECK_LINALG = define("check_linalg(Tensor info, str api_name, bool is_matrix) -> Tensor", _linalg, _linalg_meta)
CHECK_ASSERT = define("check_assert(Tensor self, str message) -> Tensor", _assert, _assert_meta)
