"""The ts backend: JIT graphs with typed inputs and source lines, exact results, any depth."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.ts import TorchScriptBackend, TSData, TSProgram
from lazytensor.execute import cut
from lazytensor.trace import storage
from lazytensor.trace.ir import spec


@pytest.fixture(autouse=True)
def ts_backend(reference_backend: None) -> None:
    lt.set_backend("ts")


def built(function: Callable[..., Any], *arguments: torch.Tensor) -> tuple[Any, TSProgram]:
    """The result of the third run, by when the JIT function is built and has run, and the program."""
    with torch.no_grad():
        for _ in range(3):
            result = function(*[a.to("ltc") for a in arguments])
            lt.sync()
    backend = lt.current_backend()
    made = [c for k, c in cut.computations.items() if k[0] is backend][-1]
    program = made.compiled.callable
    assert isinstance(program, TSProgram)
    return result, program


def test_the_graph_has_typed_inputs_and_source_lines() -> None:
    result, program = built(lambda x: torch.nn.functional.leaky_relu(x * 2.5 + 3, 0.25).sum(), torch.arange(-4.0, 4.0))
    text = program.text
    assert "p0 : Tensor" in text
    assert ": float" in text
    assert ": int" in text
    assert "test_ts.py" in text
    assert "aten::mul" in text
    want = torch.nn.functional.leaky_relu(torch.arange(-4.0, 4.0) * 2.5 + 3, 0.25).sum()
    assert torch.equal(result.cpu(), want)


CASES: dict[str, Callable[[torch.Tensor], Any]] = {
    "0-d times number keeps float32": lambda x: x.sum() * 0.1,
    "int tensor times float": lambda x: x.to(torch.int32) * 2.5,
    "int tensor plus int": lambda x: x.to(torch.int32).sum(dtype=torch.int32) + 7,
    "comparison with a number": lambda x: x.gt(0.5),
    "division with rounding": lambda x: torch.div(x, 0.3, rounding_mode="floor"),
    "power": lambda x: x.abs() ** 1.5,
    "reversed power": lambda x: 2.0**x,
    "where with a number": lambda x: torch.where(x > 0, x, -1.0),
    "lists of tensors": lambda x: torch.cat([x, x[:1]], 0),
    "several results": lambda x: torch.topk(x, 2, dim=1),
    "a list of results": lambda x: [p * 2 for p in x.unbind(1)],
    "optional tensors in a list": lambda x: x[:, torch.tensor([0, 2]).to(x.device)],
    "memory formats": lambda x: x[None, :, :, None].expand(2, -1, -1, 2).contiguous(memory_format=torch.channels_last),
    "dtype arguments": lambda x: x.to(torch.bfloat16).float(),
    "complex numbers": lambda x: x.to(torch.complex64) * (1 + 2j),
    "foreach with a list of numbers": lambda x: torch._foreach_mul([x, x + 1], [2.0, 3.0]),
    "a transposed result": lambda x: (x + 1).t(),
    "an input as a result": lambda x: x.view(-1),
    "a view without dimensions": lambda x: (x + 1)[0, 0],
    "a copy without dimensions": lambda x: [x.sum(), x.sum().clone(), x[1, 1].detach()],
    "writes through views": lambda x: x.clone().t()[0].mul_(3) + x[:, 0],
    "strings": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "empty tensors": lambda x: x[:0].sum(0),
    "factories": lambda x: torch.zeros(3, device=x.device) + torch.arange(3, device=x.device),
    "batch norm in training": lambda x: torch.nn.functional.batch_norm(x, x[0] * 0, x[0] * 0 + 1, training=True),
    "convolution": lambda x: torch.conv2d(x[None, None], x[None, None, :2, :2], padding=1),
}


@pytest.mark.parametrize("case", CASES)
def test_results_are_exactly_eagers(case: str) -> None:
    function = CASES[case]
    torch.manual_seed(0)
    x = torch.randn(4, 5)
    found, program = built(function, x)
    assert program.steps, "the JIT function was not built"
    want = function(x)
    for got, expected in zip(
        torch.utils._pytree.tree_leaves(found), torch.utils._pytree.tree_leaves(want), strict=True
    ):
        assert got.dtype is expected.dtype
        assert got.stride() == expected.stride()
        assert torch.equal(got.cpu(), expected)


def test_results_are_in_memory_of_their_own() -> None:
    x = torch.ones(3).to("ltc")
    for _ in range(4):
        y = x.view(3)
        z, w = x + 1, x.clone()
        lt.sync()
        w.zero_()
        z.zero_()
        lt.sync()
        assert x.tolist() == [1, 1, 1]
        assert y.tolist() == [1, 1, 1]


@pytest.mark.parametrize("chunk", [7, 50])
def test_a_large_graph_is_divided_into_functions(chunk: int) -> None:
    lt.set_backend("ts", chunk=chunk)

    def chain(x: torch.Tensor) -> list[torch.Tensor]:
        y, kept = x, []
        for i in range(60):
            y = y * 1.01 if i % 2 else y + x
            if i % 20 == 0:
                kept.append(y.view(-1)[1:])
        return [y, *kept]

    found, program = built(chain, torch.ones(2, 2))
    assert len(program.steps) >= 60 // chunk
    for got, want in zip(found, chain(torch.ones(2, 2)), strict=True):
        assert torch.equal(got.cpu(), want)


def test_twenty_thousand_operations_in_a_chain() -> None:
    x = torch.zeros(1).to("ltc")
    for _ in range(2):
        y = x
        for _ in range(20_000):
            y = y.neg()
        lt.sync()
        assert y.item() == 0


def test_an_op_without_a_jit_operator_runs_in_the_interpreter() -> None:
    mine = lt.define_op("testts::odd(Tensor x) -> Tensor", lambda x: x * 3)
    torch.library.Library("testts", "FRAGMENT")
    builder = lt.IrBuilder()

    def step(x: torch.Tensor) -> torch.Tensor:
        if x.device.type == "cpu":
            return (x * 3) + 1
        return storage.make(builder.node(mine, storage.value_of(x))) + 1

    found, _program = built(step, torch.arange(3.0))
    assert found.tolist() == [1, 4, 7]


def test_lowering_by_hand_through_the_context() -> None:
    backend = TorchScriptBackend()
    x = torch.ones(3).to("ltc")
    graph = lt.Graph([storage.value_of(x * 2 + x)])
    context = backend.lowering_context("by_hand", backend.devices()[0], graph.nodes)
    context.add_result(graph.outputs[0])
    assert context.emitted_count == len(graph.nodes)
    function = context.finish(set())
    inputs = [torch.ones(3) if hasattr(p, "spec") else 2 for p in context.parameters]
    assert function(*inputs).tolist() == [3, 3, 3]


def test_cuda_is_refused_where_there_is_none() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    with pytest.raises(lt.errors.BackendNotLoaded, match=r"asked for CUDA.*LTC_TS_CUDA.*finds no CUDA device"):
        lt.set_backend("ts", device="cuda")
    with pytest.raises(ValueError, match="cpu or cuda"):
        TorchScriptBackend(device="tpu")
    with lt.settings.scope(ts_cuda=True), pytest.raises(RuntimeError, match="finds no CUDA device"):
        TorchScriptBackend()
    script = "import lazytensor as lt; lt.current_backend()"
    environment = {**os.environ, "LAZYTENSOR_BACKEND": "ts", "LTC_TS_CUDA": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode != 0
    assert "asked for CUDA" in done.stderr


def test_memory_of_its_own_as_on_cuda() -> None:
    """The path that CUDA takes, on the CPU's own memory: uploads, results as TSData, reads, and a switch away."""

    class Elsewhere(TorchScriptBackend):
        def __init__(self) -> None:
            super().__init__()
            self.own_memory = True

    lt.register_backend("elsewhere", Elsewhere)
    backend = lt.set_backend("elsewhere")
    data = backend.to_device(torch.ones(2), spec((2,), (1,), 0, torch.float32, 0), backend.devices()[0])
    assert isinstance(data, TSData)
    x = torch.ones(3).to("ltc")
    for _ in range(3):
        x.add_(1.5)
        lt.sync()
    assert isinstance(storage.state_of(x).data, TSData)
    assert x.tolist() == [5.5, 5.5, 5.5]
    lt.set_backend("ts")
    assert (x + 1).tolist() == [6.5, 6.5, 6.5]


def test_seed_metrics_memory_and_devices() -> None:
    backend = lt.current_backend()
    backend.seed(3)
    first = torch.rand(2)
    backend.seed(3)
    assert torch.equal(first, torch.rand(2))
    built(lambda x: x + 1, torch.ones(2))
    assert backend.metrics()["executed"] >= 3
    assert backend.memory_info().total > 0
    assert (backend.device_type, backend.device_ordinal) == ("cpu", 0)
    assert "ts: executed" in backend.metric_report()


def test_the_executor_setting_of_the_process_is_left_alone() -> None:
    before = torch._C._jit_set_profiling_mode(True)
    try:
        built(lambda x: x - 5, torch.ones(2))
        assert torch._C._jit_set_profiling_mode(True) is True
    finally:
        torch._C._jit_set_profiling_mode(before)
