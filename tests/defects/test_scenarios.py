"""The whole programs that fail on the C++ Lazy Tensor Core (its scenario table, cases a to l and the rest): each works
on ltc.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import bits, same
from torch import nn

import lazytensor as lt


def steps(
    device: str, model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[[], torch.Tensor]
) -> list[Any]:
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        losses.append(value.detach())
    return losses


def fallbacks() -> dict[str, int | None]:
    return {n: lt.metrics.counter_value(n) for n in lt.metrics.counter_names() if n.startswith("aten::")}


# --- a: optimizers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"capturable": True}, {"fused": True}, {"foreach": True}], ids=str)
def test_adam_in_every_form_without_fallback(options: dict[str, Any]) -> None:
    def train(device: str) -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)).to(device)
        mine = {k: v for k, v in options.items() if device == "ltc" or k != "capturable"}
        optimizer = torch.optim.Adam(model.parameters(), **mine)
        x = torch.randn(5, 3).to(device)

        def loss() -> torch.Tensor:
            return F.mse_loss(model(x), torch.ones(5, 1, device=device))

        return steps(device, model, optimizer, loss), list(model.parameters())

    before = fallbacks()
    lazy = train("ltc")
    assert fallbacks() == before
    # capturable computes its bias corrections on the device, in float32
    close = {"rtol": 1e-5, "atol": 1e-6} if "capturable" in options else {"rtol": 0, "atol": 0}
    for a, b in zip([*lazy[0], *lazy[1]], [t for part in train("cpu") for t in part], strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), **close)


def test_clipping_with_foreach_and_bounded_compilation() -> None:
    model = nn.Linear(3, 1).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(5, 3).to("ltc")
    before = fallbacks()
    misses = []
    for _ in range(5):
        optimizer.zero_grad()
        F.mse_loss(model(x), torch.ones(5, 1, device="ltc")).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        lt.sync()
        misses.append(lt.cache_info()["misses"])
    assert misses[-1] == misses[2]
    assert fallbacks() == before


# --- b, c: networks ---------------------------------------------------------------------------------------------------


def mobile(device: str) -> Any:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU6(),
        nn.Conv2d(4, 4, 3, padding=1, groups=4),
        nn.GroupNorm(2, 4),
        nn.Hardswish(),
        nn.ConvTranspose2d(4, 4, 2, stride=2),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 3, 4, 4).to(device), torch.tensor([0, 2], device=device)
    return steps(device, model, optimizer, lambda: F.cross_entropy(model(x), y, label_smoothing=0.1)), model


def encoder(device: str) -> Any:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 5, 8).to(device)
    return steps(device, model, optimizer, lambda: model(x).pow(2).mean()), model


class Attention(nn.Module):
    """Attention as nanoGPT has it: one projection, split in three."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.view(2, 5, 2, 4).transpose(1, 2) for t in self.project(x).split(8, dim=2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).contiguous().view(2, 5, 8))


def gpt(device: str) -> Any:
    model = nn.Sequential(nn.LayerNorm(8), Attention(), nn.GELU(), nn.Linear(8, 8)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(2, 5, 8).to(device)
    return steps(device, model, optimizer, lambda: model(x).pow(2).mean()), model


def cross_attention(device: str) -> Any:
    model = nn.MultiheadAttention(8, 2, batch_first=True).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(2, 5, 8).to(device), torch.randn(2, 4, 8).to(device)
    return steps(device, model, optimizer, lambda: model(x, y, y)[0].pow(2).mean()), model


@pytest.mark.parametrize("program", [mobile, encoder, gpt, cross_attention], ids=lambda p: p.__name__)
def test_networks_without_fallback(program: Any) -> None:
    before = fallbacks()
    same(program, versions=False)
    assert fallbacks() == before


# --- d: recurrent layers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell])
def test_recurrent_layers(kind: Any) -> None:
    def program(device: str) -> Any:
        layer = kind(3, 4).to(device)
        out = layer(torch.randn(2, 3).to(device))
        out = out[0] if isinstance(out, tuple) else out
        out.sum().backward()
        return out

    same(program, close=2e-6, versions=False)  # off the CPU, PyTorch adds a cell's biases after its products


# --- e: ops -----------------------------------------------------------------------------------------------------------

Call = Callable[[torch.Tensor], Any]

# Every op that falls back on the C++ system although its shape does not depend on data.
OPS: dict[str, Call] = {
    "index": lambda x: x[torch.tensor([0, 2], device=x.device)],
    "index_put": lambda x: x.clone().index_put_((torch.tensor([0], device=x.device),), x[1]),
    "scatter value": lambda x: x.scatter(1, x.long().clamp(0, 1), 2.0),
    "scatter_reduce": lambda x: x.scatter_reduce(1, x.long().clamp(0, 1), x, "amax"),
    "index_add": lambda x: x.index_add(0, torch.tensor([0, 1, 0], device=x.device), x),
    "sort stable": lambda x: x.sort(stable=True, dim=1),
    "where": lambda x: torch.where(x > 0, x, x * 2),
    "argmax, argmin": lambda x: (x.argmax(1), x.argmin(1)),
    "min.dim, amax": lambda x: (x.min(1), x.amax(1)),
    "cumprod, cummax, prod": lambda x: (x.cumprod(1), x.cummax(1), x.prod(1)),
    "var, var_mean": lambda x: (x.var(1), torch.var_mean(x, 1)),
    "pointwise": lambda x: (
        x.sin(),
        x.erf(),
        x.abs().log1p(),
        x.expm1(),
        x.atan2(x + 1),
        x.round(),
        x.ceil(),
        x.sign(),
    ),
    "tests": lambda x: (x.isnan(), (x > 0).logical_and(x < 1), ~(x > 0), x.long() ^ 1, x.any(1), x.all(1)),
    "activations": lambda x: (F.hardtanh(x), F.mish(x), F.hardswish(x), F.prelu(x, x[0, :1])),
    "factories": lambda x: (torch.linspace(0, 1, 5, device=x.device), torch.eye(3, device=x.device)),
    "histc, cdist": lambda x: (x.histc(4, -1, 1), torch.cdist(x, x)),
    "linalg": lambda x: (torch.linalg.qr(x), torch.linalg.svdvals(x), torch.linalg.inv(x @ x.t() + torch.eye(3).to(x))),
    "norms": lambda x: (torch.linalg.vector_norm(x), x.norm(p=1)),
    "fft": lambda x: (torch.fft.fft(x), torch.fft.rfft(x), torch.view_as_real(torch.fft.fft(x))),
    "roll, pad": lambda x: (
        x.roll(1, 0),
        F.pad(x[None], (1, 1), mode="reflect"),
        F.pad(x[None], (1, 1), mode="replicate"),
    ),
    "interpolation": lambda x: F.interpolate(x[None, None], size=(4, 4), mode="bicubic"),
    "pooling": lambda x: (F.adaptive_max_pool2d(x[None], 2), F.max_pool3d(x[None, None], 1)),
    "losses": lambda x: (F.mse_loss(x, x + 1), F.huber_loss(x, x + 1), torch.xlogy(x, x.abs() + 1)),
    "lerp, addmv": lambda x: (x.lerp(x + 1, 0.3), torch.addmv(x[:, 0], x, x[0])),
    "searching": lambda x: (torch.searchsorted(x[0].sort()[0], x[1]), torch.bucketize(x, x[0].sort()[0])),
    "orders": lambda x: (x.median(1), x.kthvalue(2, 1), x.quantile(0.5, dim=1), x.mode(1), x.nan_to_num()),
    "embedding_bag": lambda x: F.embedding_bag(torch.tensor([[0, 1], [1, 2]], device=x.device), x),
    "logsumexp": lambda x: x.logsumexp(1),
    "one_hot": lambda x: F.one_hot(torch.tensor([0, 2], device=x.device), 3),
}


@pytest.mark.parametrize("name", OPS)
def test_ops_are_recorded(name: str) -> None:
    before = fallbacks()
    same(lambda device: OPS[name](torch.randn(3, 4).to(device)), versions=False)
    assert fallbacks() == before


# These read data: what they give has a shape or a value that only the data tells.
READERS: dict[str, Call] = {
    "nonzero": lambda x: (x > 0).nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.round().unique(return_counts=True),
    "bincount": lambda x: x.long().abs().flatten().bincount(),
    "multinomial": lambda x: x.softmax(1).multinomial(2),
    "randperm": lambda x: torch.randperm(5, device=x.device),
    "repeat_interleave": lambda x: x.repeat_interleave(torch.tensor([1, 0, 2], device=x.device), dim=0),
    "equal": lambda x: (torch.equal(x, x), torch.equal(x, x + 1)),
}


@pytest.mark.parametrize("name", READERS)
def test_ops_that_read(name: str) -> None:
    same(lambda device: READERS[name](torch.randn(3, 4).to(device)))


def test_ctc_loss() -> None:
    def program(device: str) -> Any:
        x = torch.randn(6, 2, 4).to(device).requires_grad_()
        targets = torch.tensor([[1, 2], [3, 1]], device=device)
        loss = F.ctc_loss(x.log_softmax(2), targets, torch.tensor([6, 5]), torch.tensor([2, 2]))
        loss.backward()
        return loss

    same(program)


# --- f: views and geometry --------------------------------------------------------------------------------------------


def test_geometry_is_true() -> None:
    def program(device: str) -> Any:
        x = torch.arange(24.0, device=device).view(1, 2, 3, 4)
        last = x.to(memory_format=torch.channels_last)
        parts = [x.transpose(1, 2), x[..., 1:], last, last * 2, x.expand(2, 2, 3, 4), x.permute(3, 0, 1, 2)[1]]
        strides = [str(p.stride()) for p in parts]
        contiguous = [p.is_contiguous(memory_format=torch.channels_last) for p in parts]
        return parts, strides, contiguous, [p.storage_offset() for p in parts]

    same(program)


def test_writes_through_split_chunk_and_unbind() -> None:
    def program(device: str) -> Any:
        x = torch.zeros(4, 3, device=device)
        a, b = x.split(2)
        a.add_(1)
        b.chunk(2)[1].sub_(1)
        for i, row in enumerate(x.unbind()):
            row[0] = i
        x.t()[1].mul_(3)
        return x, a, b

    same(program)


# --- g: masks ---------------------------------------------------------------------------------------------------------


def test_boolean_masks() -> None:
    def program(device: str) -> Any:
        x = torch.randn(4, 3).to(device).requires_grad_()
        y = x * 2
        mask = y > 0
        picked = y[mask].sum()
        z = y.clone()
        z[mask] = 1
        z.masked_fill_(~mask, -1)
        z.masked_scatter_(mask, torch.arange(12.0, device=device))
        (picked + z.sum()).backward()
        return picked, z

    same(program)


# --- h, i, k: mixed precision, files, transforms; more of them stand in tests/integration -----------------------------


def test_autocast_casts() -> None:
    x = torch.randn(3, 3)
    with torch.autocast("ltc", dtype=torch.bfloat16):
        y = x.to("ltc") @ x.to("ltc")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = x @ x
    assert y.dtype is torch.bfloat16
    assert bits(y) == bits(expected)


def test_files_and_pickles() -> None:
    x = torch.arange(3.0, device="ltc")
    file = io.BytesIO()
    torch.save({"x": x, "model": nn.Linear(2, 2).to("ltc").state_dict()}, file)
    for location in (None, "cpu", "ltc"):
        file.seek(0)
        assert torch.load(file, map_location=location)["x"].tolist() == [0, 1, 2]
    assert pickle.loads(pickle.dumps(x)).tolist() == copy.deepcopy(x).tolist() == [0, 1, 2]


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    x = torch.ones(2, 2, device="ltc", requires_grad=True)
    checkpoint(lambda x: F.dropout(x.exp(), 0.5), x, use_reentrant=False).sum().backward()
    assert x.grad is not None


# --- l: torch.compile and what it stands on ---------------------------------------------------------------------------


def test_fake_tensors_and_make_fx() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    x = torch.ones(2, 3, device="ltc")
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert (fake @ fake.t()).shape == (2, 2)
        assert fake.device == x.device
    graph = make_fx(lambda x: x.sin() + 1)(x)
    names = [str(n.target) for n in graph.graph.nodes]
    assert "aten.sin.default" in names
    assert names[0].startswith("x"), "the input is an argument of the traced function, not a constant in it"
    assert bits(graph(x * 2)) == bits((x.cpu() * 2).sin() + 1)


# --- the rest ---------------------------------------------------------------------------------------------------------


def test_the_device_module_is_there() -> None:
    assert torch.get_device_module("ltc") is torch.ltc  # type: ignore[attr-defined]
    assert torch.ltc.is_available()  # type: ignore[attr-defined]
    assert torch.Generator(device="ltc").manual_seed(1).initial_seed() == 1
    assert torch.ones(2).pin_memory().is_pinned()


def test_sparse_tensors_run_eagerly() -> None:
    def program(device: str) -> Any:
        table = nn.Embedding(5, 2, sparse=True).to(device)
        table(torch.tensor([0, 2, 0]).to(device)).sum().backward()
        assert table.weight.grad is not None
        assert table.weight.grad.layout is torch.sparse_coo
        assert table.weight.grad.device.type == device
        return table.weight.grad.to_dense()

    eager, lazy = program("cpu"), program("ltc")
    assert bits(eager) == bits(lazy)


def test_nested_tensors_are_refused_with_an_error() -> None:
    x = torch.eye(3, device="ltc")
    with warnings.catch_warnings(), pytest.raises((RuntimeError, NotImplementedError)):
        warnings.simplefilter("ignore")
        torch.nested.nested_tensor([x[0], x[1, :2]], device="ltc").unbind()
    assert x.sum().item() == 3, "the device is usable afterwards"


def test_mixing_devices() -> None:
    x = torch.ones(2, device="ltc")
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + torch.ones(2)
    assert (x + torch.tensor(2.0)).tolist() == [3, 3]
