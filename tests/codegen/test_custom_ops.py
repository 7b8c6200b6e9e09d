"""Custom ops: `lt.register_op` and a YAML make an op of a user's library lazy, if it has a shape rule."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
import torch

import lazytensor as lt
from lazytensor.trace.storage import value_of

sys.path.insert(0, str(Path(__file__).parent))
import packages


@torch.library.custom_op("ltc_tests::axpy", mutates_args=())
def axpy(x: torch.Tensor, y: torch.Tensor, by: float, note: str = "") -> torch.Tensor:
    return torch.from_numpy(x.numpy() * by + y.numpy())  # numpy: it cannot run on a tensor without memory


@axpy.register_fake
def _(x, y, by, note=""):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.by = inputs[2]


torch.library.register_autograd("ltc_tests::axpy", lambda ctx, g: (g * ctx.by, g, None, None), setup_context=_keep)


@torch.library.custom_op("ltc_tests::parts", mutates_args=())
def parts(xs: list[torch.Tensor], weight: torch.Tensor | None, sizes: list[int]) -> list[torch.Tensor]:
    return [torch.from_numpy(x.numpy() * n) for x, n in zip(xs, sizes, strict=True)]


@parts.register_fake
def _(xs, weight, sizes):
    return [torch.empty_like(x) for x in xs]


@torch.library.custom_op("ltc_tests::no_rule", mutates_args=())
def no_rule(x: torch.Tensor) -> torch.Tensor:
    no_rule_calls.append(x.shape)
    return torch.from_numpy(x.numpy() + 1)


no_rule_calls: list[torch.Size] = []


@torch.library.custom_op("ltc_tests::bump", mutates_args=("x",))
def bump(x: torch.Tensor) -> None:
    x.numpy()[:] += 1


@torch.library.custom_op("ltc_tests::by_yaml", mutates_args=())
def by_yaml(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
    return torch.from_numpy(x.numpy() * by)


@by_yaml.register_fake
def _(x, by=2.0):
    return torch.empty_like(x)


@pytest.fixture(autouse=True, scope="module")
def registered() -> None:
    for name in ("axpy", "parts", "no_rule", "bump"):
        lt.register_op(f"ltc_tests::{name}")


def test_an_op_with_a_fake_kernel_is_recorded_and_its_numbers_are_lifted() -> None:
    x = torch.ones(3, device="ltc")
    results = []
    for by in (2.0, 5.0):
        lt.sync()
        y = torch.ops.ltc_tests.axpy(x, x, by)
        results.append(value_of(y))
        assert value_of(y).node.op.name == "ltc_tests::axpy"
        assert y.tolist() == [by + 1] * 3
    assert results[0] is results[1], "another number is the same structure"


def test_another_string_is_another_node() -> None:
    x = torch.ones(2, device="ltc")
    a, b = (value_of(torch.ops.ltc_tests.axpy(x, x, 1.0, note)) for note in ("a", "b"))
    assert a is not b


def test_autograd_runs_above_and_its_backward_is_recorded() -> None:
    x = torch.ones(3, device="ltc", requires_grad=True)
    loss = torch.ops.ltc_tests.axpy(x * 2, x, 3.0).sum()
    loss.backward()
    assert x.grad is not None
    assert not value_of(x.grad).leaf
    assert x.grad.tolist() == [7, 7, 7]


def test_lists_come_and_go() -> None:
    a, b = torch.ones(2, device="ltc"), torch.ones(3, device="ltc")
    first, second = torch.ops.ltc_tests.parts([a, b], None, [2, 3])
    assert (first.tolist(), second.tolist()) == ([2, 2], [3, 3, 3])


def test_without_a_fake_kernel_it_falls_back_once_per_call_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    no_rule_calls.clear()
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert torch.ops.ltc_tests.no_rule(torch.ones(2, device="ltc") * 2).tolist() == [3, 3]
    assert len(no_rule_calls) == 1
    assert 'torch.library.register_fake("ltc_tests::no_rule", ...) would let it be recorded' in caplog.text
    assert (lt.metrics.counter_value("ltc_tests::no_rule") or 0) >= 1


def test_what_it_writes_is_written_back() -> None:
    x = torch.zeros(4, device="ltc")
    torch.ops.ltc_tests.bump(x[1:3])
    assert x.tolist() == [0, 1, 1, 0]


def test_wrong_names_are_named() -> None:
    with pytest.raises(ValueError, match=r"no custom op ltc_tests::axpi.*Did you mean ltc_tests::axpy"):
        lt.register_op("ltc_tests::axpi")
    with pytest.raises(ValueError, match="torch's own ops are recorded already"):
        lt.register_op("aten::add.Tensor")
    with pytest.raises(ValueError, match="recorded already"):
        lt.register_op(torch.ops.aten.add.Tensor)
    with pytest.raises(TypeError, match="such as mylib::op"):
        lt.register_op(3)  # type: ignore[arg-type]


def test_a_yaml_takes_a_custom_op(tmp_path: Path) -> None:
    yaml = """
        backend: PrivateUse1
        namespace: customs
        full_codegen:
          - ltc_tests::by_yaml
          - relu
        """
    packages.generate(tmp_path, yaml, name="customs")
    package = packages.load(tmp_path, "customs")
    assert package.nodes.LtcTestsByYaml.op.name == "ltc_tests::by_yaml"
    package.register()
    try:
        y = torch.ops.ltc_tests.by_yaml(torch.ones(2, device="ltc"), 4.0)
        assert value_of(y).node.op.name == "ltc_tests::by_yaml"
        assert y.tolist() == [4, 4]
        assert lt.metrics.counter_value("customs.ltc_tests_by_yaml") == 1
    finally:
        package.unregister()


def test_a_yaml_names_an_unknown_custom_op_with_its_line(tmp_path: Path) -> None:
    from lazytensor.codegen.yaml_document import CodegenErrors

    yaml = "backend: PrivateUse1\nnamespace: customs\nfull_codegen:\n  - ltc_tests::by_yamm\n"
    with pytest.raises(CodegenErrors) as caught:
        packages.generate(tmp_path, yaml, name="unknown")
    (problem,) = caught.value.errors
    assert problem.line == 4
    assert problem.text == "there is no operator ltc_tests::by_yamm; is its library loaded?"
    assert problem.suggestion == "ltc_tests::by_yaml"
    assert not (tmp_path / "unknown").exists()
