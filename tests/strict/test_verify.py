"""``lt.verify`` and ``lazytensor bisect`` name the first operation that a backend gets wrong, and repeat it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import lazytensor as lt
from lazytensor.backend.graph import Graph
from lazytensor.backend.reference import Program
from lazytensor.execute.bisect_command import command


class Fused(lt.Backend):
    """Wrong only when exp is fused into the sum that follows: when its result is not an output."""

    def compile(self, graph: Graph) -> Any:
        program = Program(graph)
        hidden = {n for n in graph.nodes if n.op.name == "aten::exp" and n.outputs[0] not in graph.outputs}
        off = 0.5 if hidden else 0.0
        wrong = [i for i, v in enumerate(graph.outputs) if any(w in hidden for w in _above(v.node))]
        return lambda *inputs: [r + off if i in wrong else r for i, r in enumerate(program(*inputs))]


def _above(node: Any) -> set[Any]:
    found: set[Any] = set()
    stack = [node]
    while stack:
        found.add(stack.pop())
        stack += [v.node for n in list(found) for v in n.inputs if v.node not in found and v.node not in stack]
    return found


class Wrong(lt.Backend):
    def compile(self, graph: Graph) -> Any:
        program = Program(graph)
        for instruction in program.instructions:
            if instruction[0] is not None and instruction[0].op.name == "aten::tanh":
                instruction[1] = torch.sin
        return lambda *inputs: program(*inputs)


class Refuses(lt.Backend):
    def compile(self, graph: Graph) -> Any:
        if any(n.op.name == "aten::tanh" for n in graph.nodes):
            raise ValueError("no tanh")
        return Program(graph)


@pytest.fixture(autouse=True)
def backends(tmp_path: Path) -> Iterator[None]:
    for kind in (Fused, Wrong, Refuses):
        lt.register_backend(kind.__name__.lower(), kind)
    with lt.settings.scope(cache_dir=str(tmp_path)):
        yield


def step() -> list[torch.Tensor]:
    x = torch.linspace(0, 1, 12).reshape(3, 4).to("ltc")
    a = (x @ x.T).exp()
    b = a.sum(0) * 0.5
    c = b.tanh()
    return [c, (c + b).mean()]


@pytest.mark.parametrize("backend", ["reference", "ts"])
def test_a_backend_that_is_right_has_no_difference(backend: str) -> None:
    kept = step()
    assert lt.verify(backend) is None
    assert lt.verify() is None  # nothing is pending any more
    assert kept[1].item() > 0


def test_the_first_wrong_operation_is_named_and_the_program_goes_on() -> None:
    right = [t.tolist() for t in step()]
    kept = step()
    difference = lt.verify("wrong")
    assert difference is not None and difference.node.op.name == "aten::tanh" and difference.alone
    assert "test_verify.py" in str(difference.node.line)
    assert [t.tolist() for t in kept] == right


def test_a_fault_that_hides_when_everything_is_an_output_is_found_by_bisection() -> None:
    kept = step()
    difference = lt.verify("fused")
    assert difference is not None and difference.node.op.name == "aten::sum.dim_IntList"
    assert difference.alone is False
    assert kept


def test_an_operation_that_cannot_be_compiled_is_found() -> None:
    kept = step()
    difference = lt.verify("refuses")
    assert difference is not None and difference.node.op.name == "aten::tanh" and "no tanh" in difference.what
    assert kept


def test_the_file_and_the_script_repeat_it(tmp_path: Path) -> None:
    kept = step()
    difference = lt.verify("wrong", path=tmp_path / "small.step")
    assert difference is not None and kept
    scope: dict[str, Any] = {}
    with pytest.raises(AssertionError):
        exec(difference.script, scope)
    assert lt.load_step(tmp_path / "small.step").graph.nodes[-1].op.name == "aten::tanh"


def test_the_command(tmp_path: Path) -> None:
    kept = step()
    path = lt.save_step(tmp_path / "whole")
    app = typer.Typer()
    app.command()(command)
    run = CliRunner().invoke
    assert kept
    good = run(app, [str(path), "--backend", "reference"])
    assert good.exit_code == 0 and "agree" in good.output
    bad = run(app, [str(path), "--backend", "wrong", "--save", str(tmp_path / "small.step")])
    assert bad.exit_code == 1 and "aten::tanh, recorded at" in bad.output and "test_verify.py" in bad.output
    again = run(app, [str(tmp_path / "small.step"), "--backend", "wrong"])
    assert again.exit_code == 1
    (tmp_path / "no.step").write_text("nothing")
    assert run(app, [str(tmp_path / "no.step")]).exit_code == 2


def test_a_tolerance_is_relative_to_the_largest_element() -> None:
    from lazytensor.execute.verify import differs

    right = torch.tensor([1000.0, 0.001])
    assert differs(right, right + 0.01) is None
    assert differs(right, right + 1.0) is not None
    assert differs(right, right + 1.0, tolerance=0.01) is None
    assert differs(right, right + 0.01, tolerance=0) is not None
    assert differs(torch.tensor([1, 2]), torch.tensor([1, 3]), tolerance=1.0) is not None
    assert differs(torch.tensor([float("nan")]), torch.tensor([float("nan")])) is None
