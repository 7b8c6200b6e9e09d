"""Clean-up leaves results bit-equal, and leaves out what need not be done."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import passes
from lazytensor.backend.graph import Graph
from lazytensor.backend.reference import Program
from lazytensor.execute import cut
from lazytensor.trace.record import intern, op
from lazytensor.trace.storage import value_of


def ops_of(program: Callable[[torch.Tensor], torch.Tensor], without: str = "") -> tuple[list[str], torch.Tensor]:
    """The ops that a program's graph runs, and its result."""
    lt.clear_cache()
    x = torch.arange(6.0).view(2, 3).to("ltc")
    with lt.settings.scope(without_passes=without):
        result = program(x)
        lt.sync()
    graph = list(cut.computations.values())[-1].graph
    return [node.op.name.removeprefix("aten::") for node in graph.nodes], result.cpu()


CASES = {
    "copies": (lambda x: (x + 1).clone() * 2, "clone"),
    "copies of a whole write": (lambda x: (x + 1).copy_(x * 3) * 2, "copy"),
    "casts": (lambda x: torch.ops.aten._to_copy(x + 1, dtype=torch.float32) * 2, "_to_copy"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_pass_leaves_out_an_op_and_keeps_the_result(name: str) -> None:
    program, op = CASES[name]
    cleaned, result = ops_of(program)
    whole, expected = ops_of(program, "copies,casts,views")
    assert op in whole
    assert op not in cleaned
    assert torch.equal(result, expected)
    assert torch.equal(result, program(torch.arange(6.0).view(2, 3)))


def test_one_pass_alone_can_be_switched_off() -> None:
    cleaned, _ = ops_of(CASES["copies"][0], "copies")
    assert "clone" in cleaned


def test_views_that_come_back_to_where_they_began_are_left_out() -> None:
    x = torch.arange(6.0).view(2, 3).to("ltc")
    base = value_of(x + 1)
    there = intern(op("aten::view", view=True), (intern(op("aten::t", view=True), (base,)), (3, 2)))
    back = intern(op("aten::t", view=True), (there,))
    graph = Graph([intern(op("aten::neg"), (back,))])
    assert [n.op.name for n in graph.nodes] == ["aten::add.Tensor", "aten::t", "aten::view", "aten::t", "aten::neg"]
    cleaned = passes.clean(graph)
    assert [n.op.name for n in cleaned.nodes] == ["aten::add.Tensor", "aten::neg"]
    inputs = [torch.arange(6.0).view(2, 3), 1]
    assert torch.equal(Program(cleaned)(*inputs)[0], Program(graph)(*inputs)[0])


def test_a_copy_that_is_an_output_has_memory_of_its_own() -> None:
    x = torch.ones(4).to("ltc")
    y = x.clone()
    lt.sync()
    y.add_(1)
    lt.sync()
    assert x.tolist() == [1] * 4 and y.tolist() == [2] * 4


def test_an_overwritten_value_is_not_computed() -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        y.copy_(x.t().contiguous().t() + 1)
        return y

    cleaned, result = ops_of(program)
    assert "sin" not in cleaned
    assert torch.equal(result, program(torch.arange(6.0).view(2, 3)))
