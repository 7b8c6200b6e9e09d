"""The nodes that the compiled recorder makes for a new step are those that Python would have made."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_recorder import compiled, needs_it  # noqa: F401  (a fixture)
from torch import nn

import lazytensor as lt
from lazytensor.backend.reference import ReferenceBackend
from lazytensor.execute import ahead, cut
from lazytensor.trace import ir, record, shapes, source, storage
from lazytensor.trace.ir import Node, Number, Value

pytestmark = [needs_it, pytest.mark.usefixtures("compiled", "running_ahead")]


class Ahead(ReferenceBackend):
    """The reference backend, whose first runs are run ahead."""

    name = "ahead"
    runs_ahead = True


@pytest.fixture
def running_ahead(tmp_path: Path) -> Iterator[None]:
    """New steps are run as they are recorded."""
    with lt.settings.scope(cache_dir=str(tmp_path)):
        lt.register_backend("ahead", Ahead)
        lt.set_backend("ahead")
        yield
        lt.set_backend("reference")
    lt.clear_cache()


def described(program: Callable[[str], Any], in_cpp: bool) -> tuple[list[Any], Any]:
    """Everything there is to know of the nodes that a program makes when it is new, and what it gives."""
    lt.clear_cache()
    before = ir.nodes_made()
    with pytest.MonkeyPatch.context() as patch:
        if not in_cpp:
            patch.setattr(ahead, "switched", lambda limit: None)  # C++ is not told
        result = program("ltc")
        assert ahead.on, "all of it was run ahead"
    values = [state.value for state in cut.pending()]
    nodes = ir.walk([v for v in values if v is not None])
    names: dict[Any, Any] = {}

    def name(each: Any) -> Any:
        if isinstance(each, tuple):
            return tuple(map(name, each))
        if isinstance(each, Value):
            return each.node.args if each.leaf else (names[each.node], each.index)
        return each.name if isinstance(each, Number) else each

    found = []
    for node in nodes:
        names[node] = len(names)
        assert node.seq > before
        assert node.__class__ is Node
        specs = [None if v is None else (v.spec, v.size, v.dtype, v.plain, v.index, v.leaf) for v in node.outputs]
        assert all(v is None or v.node is node for v in node.outputs)
        inputs = [name(v) for v in node.inputs]
        found.append((node.op.name, name(node.args), inputs, specs, node.depth, node.mark, node.line))
    return found, result


def alike(program: Callable[[str], Any]) -> list[Any]:
    """Check that C++ makes what Python makes; the nodes."""
    in_cpp, ours = described(program, True)
    lt.sync()
    in_python, theirs = described(program, False)
    lt.sync()
    assert in_cpp == in_python
    for one, other, eager in zip(ours, theirs, program("cpu"), strict=True):
        assert torch.equal(one.cpu(), eager) and torch.equal(other.cpu(), eager)
        assert one.stride() == eager.stride() and one._version == other._version
    return in_cpp


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4, bias=False)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x) * 2  # type: ignore[no-any-return]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Inner(), nn.Linear(4, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x).tanh())  # type: ignore[no-any-return]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_training_step(optimizer: Any) -> None:
    torch.manual_seed(0)
    start = Outer().state_dict()
    x, y = torch.randn(5, 6), torch.tensor([0, 1, 2, 1, 0])

    def program(device: str) -> list[torch.Tensor]:
        model = Outer()
        model.load_state_dict(start)
        model.to(device)
        update = optimizer(model.parameters(), lr=0.1)
        loss = nn.functional.cross_entropy(model(x.to(device)), y.to(device))
        loss.backward()
        update.step()
        return [loss.detach(), *(p.detach() for p in model.parameters()), *(p.grad for p in model.parameters())]  # type: ignore[list-item]

    found = alike(program)
    lines = [line for *_, line in found]
    assert {line.module for line in lines} >= {"Outer.one.layers.0", "Outer.one", "Outer", "Outer.two", None}
    backward = [line for line in lines if line.forward is not None]
    assert len(backward) > 10 and {line.module for line in backward} >= {"Outer.one.layers.0", "Outer.one", "Outer.two"}


def views_and_lists(device: str) -> list[torch.Tensor]:
    x = torch.arange(24.0).reshape(4, 6).to(device)
    y = x.t()[1:].unsqueeze(0).expand(2, 5, 4)
    first, second = x.split(3, dim=1)
    values, order = (first * 2).sort(dim=0)
    parts = torch._foreach_mul([values, second.contiguous()], [2.0, 3.0])
    return [y + 1, order, *parts, torch.cat([first, second]), x.new_zeros(3), torch.zeros_like(x, dtype=torch.int64)]


def writes(device: str) -> list[torch.Tensor]:
    x, y = torch.arange(6.0).to(device), torch.arange(6.0).to(device) + 1
    x.mul_(2).add_(y, alpha=3)
    x[1:3].neg_()  # a view: Python's
    y.sub_(x.sum())
    torch._foreach_add_([x, y], 1.5)
    torch._foreach_mul_([x], [y])
    z = y.clone()
    z.add_(z)
    i = torch.arange(3).to(device)
    i.mul_(2)
    return [x, y, z, i]


@pytest.mark.parametrize("program", [views_and_lists, writes])
def test_every_kind_of_op(program: Callable[[str], list[torch.Tensor]]) -> None:
    assert len(alike(program)) > 8


def test_a_module_that_takes_the_place_of_another_has_its_own_name() -> None:
    x = torch.randn(3, 4).to("ltc")
    seen = []
    for kind in (nn.Tanh, nn.Sigmoid, nn.ReLU, nn.Softplus):
        module = kind()  # likely at the address of the one before
        y = module(x)
        del module
        seen.append(cut.pending()[-1].value.node.line.module)  # type: ignore[union-attr]
        del y
    assert seen == ["Tanh", "Sigmoid", "ReLU", "Softplus"]


def test_backward_of_a_loop_that_reads_knows_its_lines_without_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first turn of the loop is new, but the backward of all turns is."""
    layer = nn.Linear(5, 5).to("ltc")
    asked = []
    monkeypatch.setattr(source, "_origin", lambda node, args: asked.append(node.name()))
    state = torch.ones(2, 5, device="ltc")
    for _ in range(4):
        state = torch.tanh(layer(state))
        line = sys._getframe().f_lineno - 1
        state.sum().item()
    state.sum().backward()
    lines = {n.op.name: n.line for n in nodes_behind(layer.weight.grad) if n.line.forward is not None}
    assert lines["aten::tanh_backward"].forward[:2] == (__file__, line) == lines["aten::mm"].forward[:2]
    assert len(asked) <= 1, "the first new op of a trace is Python's: it decides whether to run ahead"


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.t(),
        lambda x: x[1:].t(),
        lambda x: x.view(-1)[2:8],
        lambda x: x.split(1)[1],
        lambda x: x.unbind(1)[2],
        lambda x: x.view(torch.int32),
        lambda x: x.unsqueeze(0).expand(2, 2, 4),
    ],
)
def test_a_view_made_before_a_cut_is_recorded_after_it_without_python(
    monkeypatch: pytest.MonkeyPatch, view: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """As those are that a backward pass finds saved."""
    cpu = torch.arange(8.0).reshape(2, 4)
    x = cpu.to("ltc")
    seen = view(x)
    x.add_(1)
    lt.sync()
    before = x + 1
    with monkeypatch.context() as patch:
        patch.setattr(record, "intern", lambda op, args: pytest.fail(f"{op.name} is Python's"))
        y = seen * 2
    assert ahead.on
    nodes = nodes_behind(y)
    assert any(node.op.view for node in nodes) and all(node.line.file == __file__ for node in nodes)
    assert torch.equal(y.cpu(), view(cpu + 1) * 2)
    del before


def nodes_behind(tensor: torch.Tensor | None) -> list[Node]:
    """Every node of what a tensor is pending for."""
    assert tensor is not None
    found: list[Node] = []
    waiting = [storage.value_of(tensor).node]
    while waiting:
        node = waiting.pop()
        if node not in found and node.line is not None:
            found.append(node)
            waiting += [v.node for v in node.inputs if not v.leaf]
    return found


def test_what_was_told_by_running_is_not_inferred_when_it_is_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(x @ x.t() + 1.5, -1).view(-1)[1:].cumsum(0)

    x = torch.randn(5, 5).to("ltc")
    y = program(x), x * 2
    lt.sync()
    monkeypatch.setattr(shapes, "infer", lambda op, args: pytest.fail(f"{op.name} was asked about"))
    ahead.stop()
    z = program(x * 2)  # new nodes with known looks
    assert not ahead._young
    assert torch.equal(z.cpu(), program(x.cpu() * 2))
    del y


def test_a_pending_step_is_cut_when_it_is_over_its_budget() -> None:
    x = torch.randn(3).to("ltc")
    with lt.settings.scope(max_pending=100):
        before = cut.misses + cut.hits
        for i in range(250):
            x = x + i
        assert cut.misses + cut.hits == before + 2
    with lt.settings.scope(max_pending_bytes=10 * 4096 * 4):
        x = torch.zeros(4096).to("ltc")
        before, held = cut.misses + cut.hits, []
        for i in range(25):
            x = x * i
            held.append(x)
        assert cut.misses + cut.hits == before + 2


def test_an_op_that_raises_leaves_nothing_behind() -> None:
    x = torch.randn(3, 4).to("ltc") + 1
    made, tables = ir.nodes_made(), {o: len(o.table) for o in record.ops.values()}
    with pytest.raises(RuntimeError, match="shapes"):
        x @ x
    assert ahead.on
    assert {o: len(o.table) for o in record.ops.values()} == tables
    assert ir.nodes_made() == made
    assert torch.equal((x * 2).cpu(), x.cpu() * 2)
