"""Numbers are run-time inputs: changing one never recompiles, and its type promotes as in eager."""

from __future__ import annotations

import math

import pytest
import torch
from support import same
from torch import nn

import lazytensor as lt


def misses_of(step, warm: int = 3, steps: int = 30) -> int:
    """How many graphs are compiled after the first few steps."""
    for i in range(warm):
        step(i)
    lt.sync()
    before = lt.cache_info()["misses"]
    for i in range(warm, warm + steps):
        step(i)
    lt.sync()
    return lt.cache_info()["misses"] - before


@pytest.mark.parametrize("foreach", [False, True, "fused"])
def test_100_steps_of_adam_with_a_schedule_are_one_graph(foreach):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to("ltc")
    kind = {"fused": True} if foreach == "fused" else {"foreach": foreach}
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1, weight_decay=0.01, **kind)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    x = torch.randn(6, 4, device="ltc")

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        lt.sync()

    assert misses_of(step, 3, 97) <= 2


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
def test_optimizers_with_a_schedule(kind):
    model = nn.Linear(4, 2).to("ltc")
    options = {"momentum": 0.9} if kind is torch.optim.SGD else {}
    optimizer = kind(model.parameters(), lr=0.1, **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    x = torch.randn(6, 4, device="ltc")

    def step(_: int) -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        schedule.step()
        lt.sync()

    assert misses_of(step, 3, 20) == 0


CHANGING = {
    "x * float": lambda x, v: x * v,
    "float * x": lambda x, v: v * x,
    "x + float": lambda x, v: x + v,
    "x - int": lambda x, v: x - int(v * 100),
    "1 / x": lambda x, v: v / x,
    "x ** float": lambda x, v: (x.abs() + 1) ** (v + 2.5),
    "alpha": lambda x, v: torch.add(x, x, alpha=v),
    "clamp(max)": lambda x, v: x.clamp(max=v),
    "clamp": lambda x, v: x.clamp(-v, v),
    "dropout(p)": lambda x, v: nn.functional.dropout(x, v),
    "masked_fill": lambda x, v: x.masked_fill(x > 0, v),
    "full": lambda x, v: x + torch.full((3,), v, device="ltc"),
    "where": lambda x, v: torch.where(x > v, x, v),
    "addcmul": lambda x, v: torch.addcmul(x, x, x, value=v),
    "lerp": lambda x, v: torch.lerp(x, x + 1, v),
    "threshold": lambda x, v: nn.functional.threshold(x, v, v),
    "leaky_relu": lambda x, v: nn.functional.leaky_relu(x, v),
    "layer_norm(eps)": lambda x, v: nn.functional.layer_norm(x, (3,), eps=v),
    "fill_": lambda x, v: x.clone().fill_(v),
    "x[0] = float": lambda x, v: _assigned(x, v),
    "compare": lambda x, v: (x > v) & (x < v + 1) | (x == v),
    "foreach": lambda x, v: torch._foreach_mul([x, x + 1], v),
    "foreach list": lambda x, v: torch._foreach_add([x, x + 1], [v, v + 1]),
    "softplus": lambda x, v: nn.functional.softplus(x, v + 1, 20),
    "gelu then scale": lambda x, v: nn.functional.gelu(x) * v,
    "smooth_l1(beta)": lambda x, v: nn.functional.smooth_l1_loss(x, x * 2, beta=v + 0.1),
    "label_smoothing": lambda x, v: nn.functional.cross_entropy(
        x[None], torch.tensor([1], device="ltc"), label_smoothing=v
    ),
    "0-d tensor": lambda x, v: x * torch.tensor(v, device="ltc"),
    "cpu scalar tensor": lambda x, v: x * torch.tensor(v),
}


def _assigned(x, v):
    y = x.clone()
    y[0] = v
    return y


@pytest.mark.parametrize("name", CHANGING)
def test_a_changing_number_never_recompiles(name):
    call = CHANGING[name]
    x = torch.tensor([-1.0, 0.25, 2.0], device="ltc")
    kept = []

    def step(i: int) -> None:
        kept.append(call(x, 0.1 + i / 50))
        lt.sync()

    assert misses_of(step, 2, 10) == 0


def test_changed_numbers_have_their_effect():
    x = torch.arange(4.0, device="ltc")
    for value in (0.5, 2.0, -1.0):
        y = (x * value).clamp(max=value + 1)
        assert y.tolist() == (torch.arange(4.0) * value).clamp(max=value + 1).tolist()


def test_types_of_numbers_promote_as_in_eager():
    def program(device):
        results = {}
        tensors = {
            "i": torch.arange(3, device=device),
            "u8": torch.arange(3, dtype=torch.uint8, device=device),
            "f": torch.arange(3.0, device=device),
            "h": torch.arange(3.0, device=device).half(),
            "b": torch.tensor([True, False], device=device),
            "c": torch.tensor([1 + 1j], device=device),
            "i0": torch.tensor(3, device=device),
            "f0": torch.tensor(2.5, device=device),
            "d0": torch.tensor(2.5, dtype=torch.float64, device=device),
        }
        for name, x in tensors.items():
            for number in (1, 1.0, True, 0, -0.0) if name == "h" else (1, 1.0, True, 2j, 0, -0.0):
                results[f"{name}*{number!r}"] = x * number
                results[f"{number!r}+{name}"] = number + x
                results[f"{name}=={number!r}"] = x == number
        for a in ("i", "u8", "f", "h", "b"):
            for b in ("i0", "f0", "d0"):
                results[f"{a}*{b}"] = tensors[a] * tensors[b]
        results["i/2"] = tensors["i"] / 2
        results["i//2"] = tensors["i"] // 2
        results["i%2.0"] = tensors["i"] % 2.0
        results["i**2"] = tensors["i"] ** 2
        results["i**2.0"] = tensors["i"] ** 2.0
        results["2**i"] = 2 ** tensors["i"]
        results["full"] = [torch.full((2,), v, device=device) for v in (1, 1.0, True, 1j)]
        results["where"] = [torch.where(tensors["f"] > 1, tensors["f"], v) for v in (1, 1.0, True)]

    same(program)


def test_special_numbers_keep_their_bits():
    def program(device):
        x = torch.tensor([-1.0, 0.0, 1.0], device=device)
        results = []
        for number in (-0.0, 0.0, math.nan, math.inf, -math.inf, 1e-320, 2**53 + 1, -(2**63)):
            results += [x * number, x + number, torch.full((2,), number, device=device, dtype=torch.float64)]
            results += [torch.copysign(x, float(number)), x.clamp(min=number), torch.full_like(x, number)]
        big = torch.tensor([2**62], device=device) + 1
        small = torch.tensor([1], dtype=torch.uint8, device=device) + 255

    same(program)


def test_structure_numbers_are_structure():
    def program(device):
        results = [torch.arange(n, device=device) for n in (3, 4.0, 5)]
        results += [torch.arange(0, 1, step, device=device) for step in (0.5, 0.25)]
        results += [torch.ones(2, 3, device=device).sum(d) for d in (0, 1, -1)]
        results += [torch.ones(4, device=device).view(n, -1) for n in (1, 2, 4)]
        results += [torch.linspace(0, 1, n, device=device) for n in (2, 5)]
        results += [torch.arange(True, 4, device=device)]

    same(program)


def test_numbers_lifted_in_another_order_are_still_right():
    x = torch.ones(2, device="ltc")
    for flip in (False, True, False):
        a, b = (2.0, 3) if flip else (3, 2.0)
        y, z = x * a, x.long() * b
        assert y.dtype is torch.float32 and z.dtype is (torch.float32 if isinstance(b, float) else torch.int64)
        assert y.tolist() == [a, a] and z.tolist() == [b, b]
