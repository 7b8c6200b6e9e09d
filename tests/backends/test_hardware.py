"""Graphs for an accelerator, as far as they can be looked at without one: every tensor of them is on it.

The graphs are those of real programs.  PyTorch's fake tensors have a device and no memory, so they may be on CUDA.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import MODELS, losses
from torch import nn
from torch._inductor import lowering  # noqa: F401  (its decompositions need it)
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

import lazytensor as lt
from lazytensor.backend import cpu_only, hardware
from lazytensor.backend.inductor.build import fake_inputs
from lazytensor.backend.inductor.lower import Lowering, Unsupported
from lazytensor.backend.inductor.tiers import entry_key
from lazytensor.backend.reference import Program
from lazytensor.conformance import suite
from lazytensor.device.library import on_host

CUDA = torch.device("cuda:0")


class Keeper(lt.Backend):
    """Runs graphs as they are and keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs: list[lt.Graph] = []

    def compile(self, graph: lt.Graph) -> Program:
        self.graphs.append(graph)
        return Program(graph)


@pytest.fixture
def keeper(reference_backend: None) -> Keeper:
    lt.register_backend("keeper", Keeper)
    backend = lt.set_backend("keeper")
    assert isinstance(backend, Keeper)
    return backend


def attention(x: torch.Tensor) -> Any:
    x = x.clone().requires_grad_()
    F.scaled_dot_product_attention(x, x, x, is_causal=True).sum().backward()
    return x.grad


def factories(x: torch.Tensor) -> Any:
    d = x.device
    return [
        torch.zeros(3, device=d) + torch.arange(3, device=d),
        torch.full((2,), 3.5, device=d),
        torch.eye(3, device=d),
        torch.tril_indices(3, 3, device=d),
        torch.scalar_tensor(2.5, device=d) * x.mean(),
        x.new_zeros(3) + torch.ones_like(x)[0, 0, 0, :3],
        torch.linspace(0, 1, 4, device=d),
        x.to(torch.float64).to(torch.int32),
    ]


def numbers_and_indices(x: torch.Tensor) -> Any:
    y, i = x[0, 0].clone(), torch.tensor([0, 2]).to(x.device)
    y[i] = 1.5
    y.index_add_(0, i, y[:2].clone(), alpha=0.5)
    y[y > 0] = 0
    return [
        y[:, i],
        y.scatter(0, torch.zeros(2, 8, dtype=torch.long, device=x.device), 2.0),
        torch.where(y > 0, y, -1.0),
        y.masked_fill(y > 1, 0.5),
        y.clamp(0.1, 0.7).clamp_min(0.3),
        [y % 3, torch.remainder(5.0, y), y**1.5, 2.0**y, 1 - y, y.mean() * 0.1],
        F.one_hot(i, 5),
        torch.topk(y, 2),
        torch.lerp(y, y * 2, 0.3),
        y.mean() + torch.tensor(2.0),
    ]


def random(x: torch.Tensor) -> Any:
    return [
        torch.rand(3, device=x.device) + torch.randn_like(x).sum(),
        torch.bernoulli(x.sigmoid()),
        F.dropout(x * 1.5, 0.3),
        torch.multinomial(torch.rand(4, device=x.device) + 1, 2),
        torch.normal(x, x.abs() + 1),
    ]


def layers(x: torch.Tensor) -> Any:
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).to(x.device)
    norm, up = nn.GroupNorm(2, 4).to(x.device), nn.ConvTranspose2d(4, 2, 2).to(x.device)
    images = up(F.max_pool2d(norm(F.interpolate(x, scale_factor=2, mode="bilinear")), 2))
    target = torch.zeros(images[:, 0].shape, dtype=torch.long, device=x.device)
    loss = F.cross_entropy(images, target, label_smoothing=0.1) + encoder(x[0]).sum()
    loss.backward()
    parameters = [*encoder.parameters(), *up.parameters()]
    nn.utils.clip_grad_norm_(parameters, 1.0)
    torch.optim.AdamW(parameters, 0.01).step()
    return [loss, parameters]


def trained(name: str) -> Callable[[torch.Tensor], Any]:
    return lambda x: losses(name, "ltc", 2)


PROGRAMS: dict[str, Callable[[torch.Tensor], Any]] = {
    **{f"a step of {name}": trained(name) for name in MODELS},
    "attention": attention,
    "factories": factories,
    "numbers and indices": numbers_and_indices,
    "random": random,
    "layers": layers,
}


def graphs_of(keeper: Keeper, program: Callable[[torch.Tensor], Any]) -> list[lt.Graph]:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 6, 8).to("ltc")
    kept = program(x)
    lt.sync()
    del kept
    assert keeper.graphs
    return keeper.graphs


def numbers_of(graph: lt.Graph) -> list[Any]:
    return [number.kind(1) for number in graph.numbers]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tensor_of_a_lowered_graph_is_on_the_accelerator(
    name: str, keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    # PyTorch's decompositions write ~, which asks for the hardware of a fake tensor's device.
    monkeypatch.setattr(torch.Tensor, "__invert__", torch.Tensor.bitwise_not)
    for graph in graphs_of(keeper, PROGRAMS[name]):
        lowered = Lowering(graph, numbers_of(graph), CUDA).run()
        mode = FakeTensorMode()
        inputs = fake_inputs(graph, lowered, mode, CUDA)
        assert len(inputs) == len(graph.data) + bool(lowered.floats) + bool(lowered.ints)
        with mode, torch.no_grad():
            traced = make_fx(lowered.module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
        for node in itertools.chain(lowered.module.graph.nodes, traced.graph.nodes):
            named = [a for a in tree_leaves((node.args, node.kwargs)) if isinstance(a, torch.device)]
            made = [t.device for t in tree_leaves(node.meta.get("val")) if isinstance(t, torch.Tensor)]
            assert {*named, *made} <= {CUDA}, node.format_node()


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_tensor_of_the_first_tier_is_on_the_accelerator(name: str, keeper: Keeper) -> None:
    """On the device "meta", whose tensors have no memory either, and whose kernels refuse any other's."""
    meta = torch.device("meta")
    for graph in graphs_of(keeper, PROGRAMS[name]):
        data = [torch.empty_strided(v.size, v.spec.stride, dtype=v.dtype, device=meta) for v in graph.data]
        results = Program(graph, meta)(*data, *numbers_of(graph))
        assert [getattr(r, "device", r) for r in results] == [meta] * len(results)


def test_an_operator_of_the_cpu_alone_is_not_compiled_for_an_accelerator(keeper: Keeper) -> None:
    def lstm(x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = nn.LSTM(8, 4).to(x.device)(x[0])[0]
        return out.detach()

    (graph,) = graphs_of(keeper, lstm)
    Lowering(graph, numbers_of(graph)).run()
    with pytest.raises(Unsupported, match="mkldnn_rnn_layer is computed on the CPU"):
        Lowering(graph, numbers_of(graph), CUDA).run()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("causal", "masked", "scale"), [(False, False, None), (True, False, 0.3), (False, True, 0.3)])
def test_attention_written_out_is_what_the_cpus_kernel_gives(
    dtype: torch.dtype, causal: bool, masked: bool, scale: float | None
) -> None:
    forward, backward = (
        getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{suffix}") for suffix in ("", "_backward")
    )
    torch.manual_seed(0)
    q, k, v, slope = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (6, 9, 9, 6))
    mask = torch.randn(6, 9, dtype=dtype) if masked else None
    if mask is not None:
        mask[2] = float("-inf")  # a row that sees nothing
    options = {"attn_mask": mask, "scale": scale}
    want = forward(q, k, v, 0.0, causal, **options)
    arguments = (slope, q, k, v, *want, 0.0, causal)
    found = [*cpu_only.attention(q, k, v, 0.0, causal, **options), *cpu_only.attention_backward(*arguments, **options)]
    near = 0.02 if dtype is torch.bfloat16 else 1e-5
    for a, b in zip(found, [*want, *backward(*arguments, **options)], strict=True):
        torch.testing.assert_close(a, b, atol=near, rtol=near)


def test_a_draw_on_an_accelerator_gives_the_cpus_numbers() -> None:
    state, chances = torch.Generator().get_state(), torch.full((20,), 0.5)
    there = on_host(lambda state, p: [torch.bernoulli(p, generator=torch.Generator().set_state(state))])
    (drawn,) = there(state, chances)
    assert torch.equal(drawn, torch.bernoulli(chances, generator=torch.Generator().set_state(state)))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
@pytest.mark.parametrize("name", ["inductor", "auto"])
def test_cuda_is_refused_where_there_is_none(name: str) -> None:
    told = (
        rf"'{name}' could not be loaded: RuntimeError: the backend '{name}' was asked for CUDA "
        r"\(option device='cuda', setting hardware or LAZYTENSOR_HARDWARE\), and PyTorch \S+ finds no CUDA device\. "
        "The backend in force has not changed"
    )
    with pytest.raises(lt.errors.BackendNotLoaded, match=told):
        lt.set_backend(name, device="cuda")
    assert lt.current_backend().name == "reference"
    with pytest.raises(lt.errors.BackendNotLoaded, match=f"{name!r} runs on cpu or cuda, not on 'tpu'"):
        lt.set_backend(name, device="tpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA")
def test_the_kind_of_hardware_is_a_setting() -> None:
    script = "import lazytensor as lt; print(lt.settings.hardware); lt.current_backend()"
    for name in ("auto", "inductor", "ts"):
        environment = os.environ | {"LAZYTENSOR_BACKEND": name, "LAZYTENSOR_HARDWARE": "cuda"}
        done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True)
        assert done.stdout == "cuda\n"
        assert "asked for CUDA" in done.stderr.strip().splitlines()[-1]
    with lt.settings.scope(hardware="cuda"), pytest.raises(lt.errors.BackendNotLoaded, match="finds no CUDA device"):
        lt.set_backend("auto", wait=True)
    with lt.settings.scope(hardware="cuda"), lt.backend("auto", device="cpu", first="reference") as backend:
        assert (backend.own_memory, backend.asynchronous) == (False, True)


def test_code_for_another_device_has_another_name(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = graphs_of(keeper, lambda x: x.mul(2.5).sum())
    numbers = numbers_of(graph)
    names = [entry_key(graph, numbers), entry_key(graph, numbers, torch.device("cpu"))]
    for traits in ("cuda=12.8 name=A capability=8.0", "cuda=12.8 name=A capability=9.0", "cuda=13.0 name=A"):
        monkeypatch.setattr(hardware, "traits", lambda device, traits=traits: traits)
        names.append(entry_key(graph, numbers, CUDA))
    assert len(set(names)) == len(names)


class Elsewhere(hardware.HardwareBackend):
    """Runs graphs on data of its own, as on an accelerator, in the host's memory."""

    name = "elsewhere"
    device_types = ("cpu",)
    host_types = ()

    def compile(self, graph: lt.Graph) -> Any:
        assert self.target is not None
        return self.on_data(Program(graph, self.target), graph)


def test_an_upload_is_a_copy_laid_out_as_declared() -> None:
    backend = Elsewhere()
    for tensor in (torch.randn(3, 4).t(), torch.arange(3.0).expand(2, 3), torch.randn(2, 2).to(torch.complex64).conj()):
        spec = lt.trace.ir.spec_of(tensor, 0)
        data = backend.to_device(tensor, spec, backend.devices()[0])
        assert (data.value.stride(), data.value.is_conj()) == (tensor.stride(), False)
        assert data.value.data_ptr() != tensor.data_ptr()
        assert torch.equal(backend.to_host(data), tensor)
    assert (backend.target, backend.memory_info().total > 0) == (torch.device("cpu"), True)


@pytest.mark.parametrize("model", MODELS)
def test_models_train_on_data_of_their_own_to_the_cpus_losses(model: str) -> None:
    lt.register_backend("elsewhere", Elsewhere)
    lt.set_backend("elsewhere")
    assert losses(model, "ltc") == pytest.approx(losses(model, "cpu"), abs=1e-6)


def test_data_of_their_own_keep_every_promise_of_a_backend() -> None:
    lt.register_backend("elsewhere", Elsewhere)
    broken = [f for f in suite.behaviours("elsewhere") if not f.kept]
    assert not broken
