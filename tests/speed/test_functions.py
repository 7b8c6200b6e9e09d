"""Compiled code's own exp, tanh and erf are as exact as a float can be used for, for every size of vector."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch._inductor import config
from torch._inductor.cpu_vec_isa import valid_vec_isa_list

import lazytensor as lt
from lazytensor.backend import compiler
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.build import build
from lazytensor.backend.inductor.load import Compiled
from lazytensor.trace import storage

WIDTHS = sorted({isa.bit_width() for isa in valid_vec_isa_list()} & {256, 512})
MOST = {"exp": 1.0, "tanh": 2.5, "erf": 6.0, "sigmoid": 2.5}  # units in the last place

pytestmark = pytest.mark.skipif(compiler.find() is None, reason="needs a C++ compiler")


def every_kind_of_float() -> torch.Tensor:
    """A float for every 1,009 bit patterns, and the ones where something changes."""
    patterns = torch.arange(-(2**31), 2**31, 1009).to(torch.int32).view(torch.float32)
    edges = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, 88.7, 88.8, 89.0, -87.3, -87.4, -103.9, -104.1, 9.0, 10.0]
    near = torch.linspace(-12, 12, 200_003)
    return torch.cat([patterns, torch.tensor(edges), near])


def compiled(folder: Path, name: str, given: torch.Tensor) -> torch.Tensor:
    """What compiled code gives for it."""
    x = given.to("ltc")
    made = getattr(torch, name)(x)
    graph = Graph([storage.value_of(made)])
    build(graph, [], folder)
    (result,) = Compiled(folder, {}, len(graph.data))(given)
    assert f"lazytensor::{'exp' if name == 'sigmoid' else name}(" in (folder / "graph.cpp").read_text()
    return result  # type: ignore[no-any-return]


def units(result: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """How many units in the last place a result is off."""
    exponent = torch.frexp(exact).exponent.double()
    return (result.double() - exact).abs() / torch.exp2((exponent - 24).clamp_min(-149))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", MOST)
def test_last_digits(name: str, width: int, tmp_path: Path) -> None:
    given = every_kind_of_float()
    with lt.settings.scope(run_ahead=False), config.patch({"cpp.simdlen": width}):
        result = compiled(tmp_path, name, given)
    exact = getattr(torch, name)(given.double())
    as_float = exact.float()
    assert torch.equal(result.isnan(), as_float.isnan())
    finite = as_float.isfinite()
    if name == "sigmoid":  # 1 / (1 + exp(-x)), as in eager: nothing comes between 1 / the largest float and 0
        finite &= as_float > torch.finfo(torch.float32).tiny
    # the largest floats may be rounded to infinity, and the other way round
    assert bool((result[as_float.isinf()].abs() >= torch.finfo(torch.float32).max).all())
    off = units(result[finite], exact[finite])
    worst = off.argmax()
    assert off[worst] <= MOST[name], f"{name}({given[finite][worst]})"
    assert bool((result[finite].abs() <= 1).all()) or name == "exp"


@pytest.mark.parametrize("name", MOST)
def test_functions_of_one_number_that_all_elements_share(name: str, tmp_path: Path) -> None:
    with lt.settings.scope(run_ahead=False):
        made = getattr(torch.ones(3, device="ltc") * 2, name)()
        graph = Graph([storage.value_of(made)])
    build(graph, [2.0], tmp_path)
    (result,) = Compiled(tmp_path, {}, 0)(2.0)
    torch.testing.assert_close(result, getattr(torch.ones(3) * 2, name)())
