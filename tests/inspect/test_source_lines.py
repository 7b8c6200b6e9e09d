"""Every node knows the user's line and module that made it; an op of backward knows its forward line."""

from __future__ import annotations

import pytest
import torch
from marked import here
from torch import nn

import lazytensor as lt
from lazytensor.inspect import events
from lazytensor.trace import source, storage
from lazytensor.trace.ir import Node, Op, walk


def nodes_of(*tensors: torch.Tensor) -> list[Node]:
    return walk([storage.value_of(t) for t in tensors])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)  # <project>
        return torch.tanh(y)  # <tanh>


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"attn": Attention()}) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block["attn"](x)
        return x.sum()  # <sum>


def test_a_node_knows_the_line_that_recorded_it() -> None:
    x = torch.ones(3, device="ltc")
    y = x.exp()  # <exp>
    node = storage.value_of(y).node
    assert node.op.name == "aten::exp"
    assert (node.line.file, node.line.number) == (__file__, here("exp"))
    assert node.line.function == "test_a_node_knows_the_line_that_recorded_it"


def test_library_frames_are_skipped() -> None:
    parameter = nn.Parameter(torch.ones(3, device="ltc"))
    parameter.grad = torch.ones(3, device="ltc")
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.step()  # <step>
    line = storage.value_of(parameter).node.line
    assert (line.file, line.number) == (__file__, here("step"))


def test_a_node_knows_the_path_of_its_module() -> None:
    model = Model().to("ltc")
    out = model(torch.ones(2, 4, device="ltc"))
    by_op = {(n.op.name, n.line.module): n.line.number for n in nodes_of(out)}
    for block in range(3):
        assert by_op["aten::addmm", f"Model.blocks.{block}.attn.project"] == here("project")
        assert by_op["aten::tanh", f"Model.blocks.{block}.attn"] == here("tanh")
    assert by_op["aten::sum", "Model"] == here("sum")


def test_a_module_is_called_by_the_name_of_its_global_variable() -> None:
    space = {"Model": Model, "torch": torch}
    exec(compile("net = Model().to('ltc')\nout = net(torch.ones(2, 4, device='ltc'))", "script.py", "exec"), space)
    modules = {n.line.module for n in nodes_of(space["out"])}
    assert "net.blocks.2.attn.project" in modules
    assert "net" in modules


def test_reading_the_stack_keeps_no_tensor_alive() -> None:
    model = Model().to("ltc")
    x = torch.ones(2, 4, device="ltc")
    hidden = x * 2
    model(x)
    del hidden
    lt.sync()
    (cut,) = [c for c in events.all_cuts() if c.explicit][-1:]
    assert "aten::mul.Tensor" not in cut.known.ops


def backward_lines(model: nn.Module) -> dict[str, set[tuple[int, str | None]]]:
    loss = model(torch.ones(2, 4, device="ltc"))
    loss.backward()
    found: dict[str, set[tuple[int, str | None]]] = {}
    for node in nodes_of(*[p.grad for p in model.parameters() if p.grad is not None]):
        if node.line.forward is not None:
            assert node.line.forward[0] == __file__
            found.setdefault(node.op.name, set()).add((node.line.forward[1], node.line.module))
    return found


def check_backward(found: dict[str, set[tuple[int, str | None]]]) -> None:
    blocks = range(3)
    assert found["aten::tanh_backward"] == {(here("tanh"), f"Model.blocks.{b}.attn") for b in blocks}
    assert {(here("project"), f"Model.blocks.{b}.attn.project") for b in blocks} <= found["aten::mm"]
    assert {line for line, _ in found["aten::mm"]} == {here("project")}
    assert {line for line, _ in found["aten::expand"]} == {here("sum")}


def test_backward_belongs_to_the_forward_line() -> None:
    check_backward(backward_lines(Model().to("ltc")))


def test_backward_belongs_to_the_forward_line_when_the_forward_was_not_new() -> None:
    model = Model().to("ltc")
    with torch.no_grad():
        model(torch.ones(2, 4, device="ltc"))  # the same nodes, without autograd
    check_backward(backward_lines(model))


def test_lines_are_found_on_a_miss_only(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    original = source.here

    def counted(op: Op, args: tuple[object, ...]) -> source.Line:
        calls.append(op.name)
        return original(op, args)

    monkeypatch.setattr(source, "here", counted)
    seen = []
    for _ in range(3):
        torch.ones(3, device="ltc").cos().sin()
        lt.sync()
        seen.append(len(calls))
    assert seen[0] > 0
    assert seen == [seen[0]] * 3
