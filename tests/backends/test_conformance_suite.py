"""The conformance suite passes good backends and catches planted bugs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lazytensor as lt
from lazytensor.backend import command
from lazytensor.conformance import suite

Results = list[torch.Tensor]


@pytest.mark.parametrize("backend", ["reference", "ts"])
def test_good_backends_keep_every_behaviour(backend: str) -> None:
    broken = [(f.group, f.name, f.detail) for f in suite.behaviours(backend) if not f.kept]
    assert broken == []


def planted(bug: Callable[[lt.Graph, tuple[Any, ...], Results], Results]) -> type[lt.Backend]:
    """A backend whose results are spoilt."""

    class Planted(lt.Backend):
        def compile(self, graph: lt.Graph) -> Any:
            right = graph.to_fx()
            return lambda *inputs: bug(graph, inputs, list(right(*inputs)))

    return Planted


def wrong_dtype(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    return [r.double() if r.dtype is torch.float32 and r.dim() == 0 else r for r in results]


def wrong_shape(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    return [r.reshape(1) if r.dim() == 0 else r for r in results]


def swapped_outputs(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    for i in range(len(results) - 1):
        a, b = results[i], results[i + 1]
        if a.shape == b.shape and a.dtype is b.dtype:
            results[i], results[i + 1] = b, a
            break
    return results


def reused_buffer(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    """Writes a result into the memory of an input that nobody donated."""
    for i, result in enumerate(results):
        for place, given in enumerate(inputs):
            if not isinstance(given, torch.Tensor) or place in graph.donatable or given.dtype is not result.dtype:
                continue
            if given.shape == result.shape and given.numel():
                results[i] = given.copy_(result)
                return results
    return results


def dropped_update(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    """Returns the old value of a tensor that was to be updated in place."""
    for number, place in graph.replaces.items():
        results[number] = inputs[place].clone()
    return results


def wrong_broadcasting(graph: lt.Graph, inputs: tuple[Any, ...], results: Results) -> Results:
    """Lines a vector up with the first dimension instead of the last."""
    for number, value in enumerate(graph.outputs):
        shapes = [len(v.size) for v in value.node.inputs]
        if value.node.op.name == "aten::add.Tensor" and shapes == [2, 1] and value.size[0] == value.size[1]:
            results[number] = results[number].t()
    return results


BUGS = [wrong_dtype, wrong_shape, swapped_outputs, reused_buffer, dropped_update, wrong_broadcasting]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_planted_bug_is_caught(bug: Any) -> None:
    lt.register_backend("planted", planted(bug))
    broken = [f for f in suite.behaviours("planted", ["results", "aliasing", "donation", "interface"]) if not f.kept]
    assert broken
    assert all(f.detail for f in broken)
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2, 2]


def test_the_same_backend_without_a_bug_is_passed() -> None:
    lt.register_backend("planted", planted(lambda graph, inputs, results: results))
    groups = ["results", "aliasing", "donation", "interface"]
    assert [f for f in suite.behaviours("planted", groups) if not f.kept] == []


ENTRIES = ["add", "addmm", "nn.functional.gelu", "sin", "nonzero"]


def test_coverage_tells_who_ran_each_op() -> None:
    class Some(lt.Backend):
        def supports(self, node: Any) -> bool:
            return node.op.name not in ("aten::addmm", "aten::sin", "aten::cos")

        def compile(self, graph: lt.Graph) -> Any:
            return graph.to_fx()

    lt.register_backend("some", Some)
    found = suite.coverage("some", ENTRIES)
    assert set(found["aten::add.Tensor"]) == {suite.NATIVE}
    assert set(found["aten::addmm"]) == {suite.DECOMPOSED}
    assert set(found["aten::sin"]) == {suite.INTERPRETED}
    assert set(found["aten::nonzero"]) == {suite.FALLBACK}


def test_the_command_lists_backends_and_checks_one(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(command.command)
    runner = CliRunner()
    listed = runner.invoke(app, ["--out", str(tmp_path / "list.json")])
    assert listed.exit_code == 0
    assert "reference (in force)" in listed.output
    rows = {row["name"]: row for row in json.loads((tmp_path / "list.json").read_text())}
    assert json.loads(runner.invoke(app, ["--json"]).output) == list(rows.values())
    assert rows["ts"]["devices"] == ["CPU0", "CPU1"]
    assert "chunk" in rows["ts"]["options"]
    lt.register_backend("planted", planted(wrong_dtype))
    checked = runner.invoke(app, ["planted", "--op", "add", "--out", str(tmp_path / "one.json")])
    assert checked.exit_code == 1
    assert "✗" in checked.output
    found = json.loads((tmp_path / "one.json").read_text())
    assert "aten::add.Tensor" in found["coverage"]
    assert any(not behaviour["kept"] for behaviour in found["behaviours"])
