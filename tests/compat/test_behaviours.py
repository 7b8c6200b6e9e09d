"""The behaviours that PyTorch's own tests of its lazy device assert, asked of ltc."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import lazytensor as lt
import lazytensor.compat as lazy
from lazytensor.compat.extract_compiled_graph import extract_compiled_graph
from lazytensor.inspect.dump import save_graphs

# --- bindings, debugging ----------------------------------------


def test_before_any_use_no_counter_has_counted() -> None:
    script = "import lazytensor.compat as lazy; print(lazy.metrics.counter_names())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_graph_file_has_the_stack_of_the_sync(tmp_path: Path) -> None:
    def helper() -> None:
        out = nn.Linear(5, 5).to("lazy")(torch.ones(2, 5, device="lazy"))
        lazy.mark_step()
        assert out.shape == (2, 5)

    def outer() -> None:
        helper()

    with lt.settings.scope(save_tensors_file=str(tmp_path / "graphs.txt")):
        save_graphs()
        outer()
    save_graphs()
    text = (tmp_path / "graphs.txt").read_text().partition("Python Stacktrace:")[2]
    order = [text.index(name) for name in ("in test_the_graph_file", "in outer", "in helper", "lazy.mark_step()")]
    assert order == sorted(order)


# --- extracting a compiled graph ----------------------------------------


class Sub(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a - b


class ConstScale(nn.Module):
    def forward(self, a: torch.Tensor) -> Any:
        return a * 2


class Addcmul(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return torch.addcmul(a, b, c, value=5)


class ReturnMulti(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        return (b + 1, a - 1)


class ReturnDuplicate(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        c = a + b
        return a - b, c, a + 1, c


class InplaceUpdate(nn.Module):
    def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
        a.sub_(b)
        return b - 1, b + 1


class WithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, a: torch.Tensor) -> Any:
        return self.linear(a) + torch.ones(2)


CASES = [
    (Sub, 2),
    (ConstScale, 1),
    (Addcmul, 3),
    (ReturnMulti, 2),
    (ReturnDuplicate, 2),
    (InplaceUpdate, 2),
    (WithParameters, 1),
]


@pytest.mark.parametrize(("kind", "count"), CASES, ids=[k.__name__ for k, _ in CASES])
def test_an_extracted_graph_equals_the_model_on_other_inputs(kind: type[nn.Module], count: int) -> None:
    torch.manual_seed(0)
    model = kind()
    example = [torch.randn(4, 3) for _ in range(count)]
    compiled = extract_compiled_graph(fx.symbolic_trace(model), example)
    for _ in range(10):
        given = [torch.randn(4, 3) for _ in range(count)]
        theirs = copy.deepcopy(given)
        want = model(*given)
        got = compiled(*theirs)
        for a, b in zip(want if isinstance(want, tuple) else [want], got, strict=True):
            assert torch.equal(a, b)
        for a, b in zip(given, theirs, strict=True):
            assert torch.equal(a, b)


def test_the_same_tensor_returned_twice_is_the_same_tensor() -> None:
    got = extract_compiled_graph(fx.symbolic_trace(ReturnDuplicate()), [torch.ones(2), torch.ones(2)])(
        torch.ones(2), torch.ones(2)
    )
    assert got[1] is got[3]


def test_a_model_that_falls_back_cannot_be_extracted() -> None:
    lazy.config.set_force_fallback("aten::sub")
    with pytest.raises(RuntimeError, match=r"fallback.*aten::sub"):
        extract_compiled_graph(fx.symbolic_trace(Sub()), [torch.ones(2), torch.ones(2)])


# --- functionalization ----------------------------------------


def test_a_model_made_on_the_device_and_used_through_a_transpose() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1 = nn.Linear(4, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.fc1.weight.transpose(0, 1)

    found = []
    for device in ("cpu", "lazy"):
        torch.manual_seed(42)
        with torch.device("ltc" if device == "lazy" else "cpu"):
            model = Model()
        assert model.fc1.weight.device.type == ("ltc" if device == "lazy" else "cpu")
        lazy.mark_step()
        torch.manual_seed(1)
        out = model(torch.randn(4, 4).to(device))
        out.sum().backward()
        lazy.mark_step()
        found.append((out.detach().cpu(), model.fc1.weight.grad.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_assigning_data_shows_in_the_graph() -> None:
    t = torch.ones(3).to("lazy")
    assert "aten::" not in lazy.debug.dump_ir([t], "text")
    t.data = t.to(torch.bfloat16)
    text = lazy.debug.dump_ir([t], "text")
    assert text.count("aten::") == 1
    assert "aten::_to_copy" in text
    assert t.dtype is torch.bfloat16


# --- generators ----------------------------------------


def drawn(device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.tensor(0.0).to(device).expand(3).clone().uniform_(generator=generator),
        torch.tensor(0.0).to(device).expand(3).clone().normal_(generator=generator),
    )


def test_a_generator_gives_the_cpus_numbers_whatever_the_global_seed_is() -> None:
    torch.manual_seed(1)
    want = drawn("cpu", 2024)
    torch.manual_seed(2)
    got = drawn("lazy", 2024)
    assert all(torch.equal(a, b.cpu()) for a, b in zip(want, got, strict=True))


def test_another_seed_does_not_compile_again() -> None:
    """PyTorch's device compiles once for each seed; here the numbers are data."""
    for seed in (1, 2, 1):
        drawn("lazy", seed)
        lazy.mark_step()
    before = lt.cache_info()["misses"]
    first = [t.tolist() for t in drawn("lazy", 5)]
    assert [t.tolist() for t in drawn("lazy", 5)] == first
    assert [t.tolist() for t in drawn("lazy", 6)] != first
    assert lt.cache_info()["misses"] <= before + 1


# --- meta kernels ----------------------------------------


def test_mixed_dtypes_in_a_linear_layer_raise_when_it_is_called() -> None:
    layer = nn.Linear(3, 2).to("lazy", torch.float16)
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        layer(torch.ones(2, 3, device="lazy"))


@pytest.mark.parametrize("bias", [True, False])
def test_a_half_precision_linear_layer_stays_half(bias: bool) -> None:
    out = nn.Linear(3, 2, bias=bias).to("lazy", torch.float16)(torch.ones(2, 3, device="lazy", dtype=torch.float16))
    assert out.dtype is torch.float16
    assert out.cpu().dtype is torch.float16


def test_cpu_and_lazy_tensors_do_not_mix() -> None:
    with pytest.raises(RuntimeError, match="at least two devices"):
        torch.randn(3) + torch.randn(3).to("lazy")


# --- reuse of nodes ----------------------------------------


def equal_with_reuse(step: Callable[[int, torch.Tensor], torch.Tensor], counter: str, at_least: int) -> None:
    lazy.config.set_reuse_ir(True)
    torch.manual_seed(0)
    start = torch.randn(2, 3, 4)
    lt.clear_cache()
    lazy.metrics.reset()
    here, there = start.clone(), start.to("lazy")
    for number in range(10):
        here, there = step(number, here), step(number, there)
        lazy.mark_step()
        assert torch.equal(here, there.cpu())
    assert (lazy.metrics.counter_value(counter) or 0) >= at_least
    lazy.config.set_reuse_ir(False)


def test_reuse_add() -> None:
    equal_with_reuse(lambda n, z: z + z + z, "IrNodeReused_torch::lazy::AddTensor", 14)


def test_reuse_add_then_sub() -> None:
    equal_with_reuse(lambda n, z: z + z if n < 5 else z - z * 0.5, "IrNodeReused_torch::lazy::AddTensor", 4)


def test_reuse_with_a_forced_fallback() -> None:
    lazy.config.set_force_fallback("aten::sub")
    equal_with_reuse(lambda n, z: z + z if n < 5 else z - z * 0.5, "IrNodeReused_torch::lazy::AddTensor", 4)
    assert (lazy.metrics.counter_value("aten::sub.Tensor") or 0) == 5


@pytest.mark.parametrize("training", [True, False])
def test_reuse_batch_norm(training: bool) -> None:
    def step(number: int, z: torch.Tensor) -> torch.Tensor:
        weight, mean, var = torch.ones(3).to(z.device), torch.zeros(3).to(z.device), torch.ones(3).to(z.device)
        return F.batch_norm(z, mean, var, weight, mean + 1, training)

    name = "NativeBatchNormLegitFunctional" if training else "NativeBatchNorm"
    equal_with_reuse(step, f"IrNodeReused_torch::lazy::{name}", 7)


# --- step closures ----------------------------------------


def test_a_closure_has_run_when_mark_step_returns() -> None:
    seen = []
    x = torch.ones(2, device="lazy") * 2
    lazy.add_step_closure(lambda t: seen.append(t.tolist()), args=(x,))
    assert seen == []
    lazy.mark_step()
    assert seen == [[2, 2]]


def test_mark_step_does_not_wait_for_an_asynchronous_closure() -> None:
    may_go, done = threading.Event(), threading.Event()

    def closure() -> None:
        may_go.wait(30)
        done.set()

    lazy.add_step_closure(closure, run_async=True)
    lazy.mark_step()
    assert not done.is_set()
    may_go.set()
    assert done.wait(30)


def test_an_exception_in_a_closure_comes_out_of_mark_step() -> None:
    def closure() -> None:
        raise RuntimeError("Simulating exception in closure")

    lazy.add_step_closure(closure)
    with pytest.raises(RuntimeError, match="Simulating exception in closure"):
        lazy.mark_step()
    lazy.mark_step()


def test_an_exception_in_an_asynchronous_closure_comes_with_the_next_one() -> None:
    failed, ran = threading.Event(), []

    def closure() -> None:
        failed.set()
        raise RuntimeError("Simulating exception in closure")

    from lazytensor.inspect.observers import wait_for_closures

    lazy.add_step_closure(closure, run_async=True)
    lazy.mark_step()
    assert failed.wait(30)
    wait_for_closures()
    lazy.add_step_closure(lambda: ran.append(1), run_async=True)
    with pytest.raises(RuntimeError, match="Cannot run asynchronous closure due to previously raised exception"):
        lazy.mark_step()
    wait_for_closures()
    assert ran == []


# --- the lazy tensor ----------------------------------------


def test_gradients_of_a_convolution() -> None:
    found = []
    for device in ("cpu", "lazy"):
        torch.manual_seed(3)
        x, w, b = torch.rand(1, 3, 5, 5), torch.rand(2, 3, 3, 3), torch.rand(2)
        moved = [t.to(device).requires_grad_() for t in (x, w, b)]
        F.conv2d(moved[0], moved[1], moved[2], padding=1).sum().backward()
        found.append([t.grad.cpu() for t in moved])
    for a, b in zip(*found, strict=True):
        assert torch.equal(a, b)


def test_a_view_is_still_a_view_after_mark_step() -> None:
    found = []
    for device in ("cpu", "lazy"):
        base = torch.zeros(4, 2, device=device)
        view = base[1:3]
        lazy.mark_step()
        view.add_(1)
        lazy.mark_step()
        base.mul_(3)
        view[0] = 9
        lazy.mark_step()
        found.append((base.cpu(), view.cpu()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_a_tensor_made_on_the_device_can_be_viewed() -> None:
    assert torch.tensor([[1, 2], [3, 4]], device="lazy").view(4).tolist() == [1, 2, 3, 4]


def test_the_size_of_nonzero_is_that_of_the_data() -> None:
    t = torch.tensor([[1.0, 0.0], [2.0, 3.0]], device="lazy")
    assert t.nonzero().shape == (3, 2)
    assert t.nonzero().narrow(0, 1, 2).tolist() == [[1, 0], [1, 1]]


def test_adaptive_pooling_in_three_dimensions() -> None:
    x = torch.rand(1, 2, 4, 5, 6)
    assert torch.equal(F.adaptive_avg_pool3d(x, (2, 2, 2)), F.adaptive_avg_pool3d(x.to("lazy"), (2, 2, 2)).cpu())


def test_after_the_first_step_nothing_compiles() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2)).to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    misses = []
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(3, 6).to("lazy")).sum().backward()
        optimizer.step()
        lazy.mark_step()
        misses.append(lt.cache_info()["misses"])
    assert misses[-1] == misses[1]


OPS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: x + x,
    "addmm": lambda x: torch.addmm(x, x, x),
    "cat": lambda x: torch.cat([x, x]),
    "split": lambda x: tuple(part * 2 for part in x.split(2)),
    "softmax": lambda x: x.softmax(0),
    "topk": lambda x: x.topk(2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "index": lambda x: x[torch.tensor([0, 2]).to(x.device)],
    "std": lambda x: x.std(1),
    "embedding": lambda x: torch.embedding(x, torch.tensor([1, 1]).to(x.device)),
}


@pytest.mark.parametrize("op", OPS)
def test_ops_reach_the_lazy_device_and_agree_with_and_without_reuse(op: str) -> None:
    x = torch.rand(4, 4)
    want = OPS[op](x)
    lt.clear_cache()
    lazy.metrics.reset()
    for reuse in (False, True, True):
        lazy.config.set_reuse_ir(reuse)
        got = OPS[op](x.to("lazy"))
        lazy.mark_step()
        for a, b in zip(
            want if isinstance(want, tuple) else [want], got if isinstance(got, tuple | list) else [got], strict=True
        ):
            assert torch.equal(a, b.cpu())
    assert [n for n in lazy.metrics.counter_names() if n.startswith("lazy::")]
    assert [n for n in lazy.metrics.counter_names() if n.startswith("aten::")] == []
