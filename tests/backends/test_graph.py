"""The graph handed to a backend: printable as a program that runs, walkable at any depth, convertible to FX."""

from __future__ import annotations

import operator
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.plan import divide, simplified
from lazytensor.trace import storage
from lazytensor.trace.ir import Node, Number


def graph_of(*tensors: torch.Tensor) -> lt.Graph:
    return lt.Graph([storage.value_of(t) for t in tensors])


def sample() -> tuple[list[torch.Tensor], lt.Graph]:
    x = torch.arange(6.0).view(2, 3).to("ltc")
    y = (x * 1.5).t()
    top, where = y.max(0)
    parts = x.split(1, dim=1)
    whole = torch.cat([parts[2], parts[0]], 1).add(parts[1], alpha=2)
    norm = torch.nn.functional.layer_norm(x, (3,))
    tensors = [y, top, where, whole, norm, x.to(torch.float64), torch.full((2,), float("inf"), device="ltc")]
    return tensors, graph_of(*tensors)


def run(graph: lt.Graph, function: Any) -> list[torch.Tensor]:
    inputs = [storage.leaf_data[v.node.args[1]] for v in graph.data]
    return function(*inputs, *[storage.numbers[n.index] for n in graph.numbers])


def check(graph: lt.Graph, function: Any) -> None:
    found = run(graph, function)
    for value, got, want in zip(graph.outputs, found, run(graph, lt.current_backend().compile(graph)), strict=True):
        assert torch.equal(got, want)
        assert tuple(got.shape) == value.size
    places = [t.untyped_storage().data_ptr() for t in found]
    assert len(set(places)) == len(places)


def test_the_printed_program_runs_and_gives_the_results(tmp_path: Path) -> None:
    _tensors, graph = sample()
    text = graph.python()
    scope: dict[str, Any] = {}
    exec(text, scope)
    check(graph, scope["step"])
    assert "test_graph.py" in text
    assert "a lifted float" in text
    (tmp_path / "step.py").write_text(text)
    done = subprocess.run([sys.executable, str(tmp_path / "step.py")], capture_output=True, text=True, check=True)
    assert done.stdout.count("tensor(") == len(graph.outputs)


def test_fx_has_numbers_as_placeholders_and_lines_in_meta() -> None:
    _tensors, graph = sample()
    module = graph.to_fx()
    check(graph, module)
    placeholders = [n for n in module.graph.nodes if n.op == "placeholder"]
    assert len(placeholders) == len(graph.inputs)
    assert [n.meta["number"] for n in placeholders if "number" in n.meta] == [n.kind for n in graph.numbers]
    assert any(n.target is operator.getitem for n in module.graph.nodes)
    calls = [n for n in module.graph.nodes if n.target is torch.ops.aten.mul.Tensor]
    assert "test_graph.py" in str(calls[0].meta["source"])
    assert "test_graph.py" in calls[0].stack_trace


def test_uses_and_last_uses() -> None:
    x = torch.ones(3).to("ltc")
    y = x + 1
    z = y * y
    w = z.exp()
    graph = graph_of(w, y)
    add, mul, exp = graph.nodes
    assert graph.uses[add.outputs[0]] == [mul, mul]
    assert graph.last_uses == {exp: [mul.outputs[0]], add: [graph.data[0]]}
    assert [type(leaf) for leaf in graph.inputs] == [type(graph.data[0]), Number]


def test_which_inputs_may_be_donated() -> None:
    x = torch.ones(3).to("ltc")
    assert lt.Graph([storage.value_of(x + 1)], {0: 0}).donatable == {0}
    assert graph_of(x + 2).donatable == frozenset()


@pytest.mark.parametrize("depth", [3000])
def test_no_walk_recurses(depth: int) -> None:
    x = torch.ones(1).to("ltc")
    y = x
    for _ in range(depth):
        y = y.neg()
    graph = graph_of(y)
    assert len(graph) == depth
    assert len(graph.last_uses) == depth
    scope: dict[str, Any] = {}
    exec(graph.python(), scope)
    assert run(graph, scope["step"])[0].item() == 1
    assert run(graph, graph.to_fx())[0].item() == 1
    halves = divide(graph, lambda node: graph.nodes.index(node) % 1000 < 500)
    assert len(halves) == 6


BASIC = {
    "add.Tensor",
    "add.Scalar",
    "mul.Tensor",
    "mul.Scalar",
    "sub.Tensor",
    "div.Tensor",
    "sum.dim_IntList",
    "exp",
    "t",
    "mm",
    "amax",
    "log",
}


def basic(node: Node) -> bool:
    return node.op.name.removeprefix("aten::") in BASIC


def test_what_is_not_supported_is_decomposed_with_its_numbers_still_lifted() -> None:
    x = torch.randn(4, 3).to("ltc")
    bias, weight = torch.randn(2).to("ltc"), torch.randn(2, 3).to("ltc")
    y = torch.addmm(bias, x, weight.t(), alpha=0.5)
    z = torch.log_softmax(y, 1)
    graph = graph_of(z)
    simple, count = simplified(graph, basic)
    assert count == Counter({"aten::addmm": 1, "aten::_log_softmax": 1})
    assert all(map(basic, simple.nodes))
    assert simple.numbers == graph.numbers
    for value in (0.5, 3.0):
        storage.numbers[graph.numbers[0].index] = value
        (got,) = run(simple, simple.to_fx())
        (want,) = run(graph, graph.to_fx())
        assert torch.allclose(got, want, atol=1e-6)


def test_an_op_whose_decomposition_computes_with_a_number_stays_whole() -> None:
    x = torch.randn(4, 3).to("ltc")
    mean, var = torch.zeros(3).to("ltc"), torch.ones(3).to("ltc")
    torch.nn.functional.batch_norm(x, mean, var, training=True, momentum=0.3)
    graph = graph_of(mean)
    _simple, count = simplified(graph, lambda node: "batch_norm" not in node.op.name)
    assert count == Counter()


def test_views_are_made_again_on_each_side_of_a_boundary() -> None:
    class Half(lt.Backend):
        def supports(self, node: Node) -> bool:
            return node.op.name not in ("aten::tanh", "aten::sin")

        def compile(self, graph: lt.Graph) -> Any:
            return graph.to_fx()

    lt.register_backend("half", Half)
    lt.set_backend("half")
    x = torch.randn(4, 6)
    results = []
    for device in ("cpu", "ltc"):
        a = x.clone().to(device)
        b = (a * 2).t()
        c = torch.tanh(b) + b.reshape(4, 6).t()
        d = torch.sin(c)[1:, ::2].expand(2, 5, 2)
        e = a[1]
        e += c.sum()
        results.append((b, c, d, a))
    for cpu, lazy in zip(*results, strict=True):
        assert torch.equal(cpu, lazy.cpu())
        assert cpu.stride() == lazy.stride()
