"""Every optimizer of ``torch.optim`` for ten steps with default options; the foreach, fused and capturable forms."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from support import same
from torch import nn

import lazytensor as lt

OPTIMIZERS = sorted(
    name
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
)


def train(device: str, name: str, steps: int = 10, **options: Any) -> Any:
    """Losses, parameters and the optimizer's state.

    By default PyTorch takes the foreach form on an accelerator and the loop on the CPU, which rounds differently for
    some optimizers; so the CPU is told to take the foreach form too (Adafactor takes the loop everywhere).
    """
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    sparse = name == "SparseAdam"  # takes sparse gradients only, which an embedding gives
    if sparse:
        model = nn.Sequential(nn.Embedding(5, 4, sparse=True)).to(device)
    parameters = model.parameters()
    kind = getattr(torch.optim, name)
    if device == "cpu" and not options and name != "Adafactor" and "foreach" in inspect.signature(kind).parameters:
        options = {"foreach": True}
    if name == "Muon":  # takes matrices only
        parameters = (p for p in parameters if p.dim() == 2)
    optimizer = kind(parameters, **options)
    inputs = torch.randn(steps, 6, 3)
    losses = []
    for step in range(steps):
        x = torch.tensor([0, 2, step % 5]).to(device) if sparse else inputs[step].to(device)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - 1).pow(2).mean()
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).detach())
    if sparse:
        optimizer.zero_grad()  # a sparse gradient has no strides to compare
    return losses, list(model.parameters()), optimizer.state_dict()["state"]


def test_the_list_is_whole() -> None:
    assert {"SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "RMSprop", "Rprop", "LBFGS", "NAdam"} <= set(OPTIMIZERS)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_ten_steps_with_default_options(name: str) -> None:
    same(lambda device: train(device, name), versions=False, twice=False)


FORMS = [
    *[(name, {"foreach": True}) for name in ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "Rprop")],
    *[(name, {"foreach": False}) for name in ("SGD", "Adam")],
    *[(name, {"fused": True}) for name in ("SGD", "Adam", "AdamW", "Adagrad")],
    ("SGD", {"fused": True, "momentum": 0.9, "weight_decay": 0.1}),
    ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    ("Adam", {"amsgrad": True, "maximize": True}),
]


@pytest.mark.parametrize(("name", "options"), FORMS, ids=str)
def test_forms(name: str, options: dict[str, Any]) -> None:
    same(lambda device: train(device, name, steps=4, **options), versions=False, twice=False)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RMSprop", "Adadelta"])
@pytest.mark.parametrize("foreach", [False, True])
def test_capturable(name: str, foreach: bool) -> None:
    """The CPU refuses ``capturable``; its own arithmetic (bias corrections on the device, in float32) rounds a little
    differently.
    """
    torch.manual_seed(0)
    expected, parameters, _ = train("cpu", name, steps=4)
    torch.manual_seed(0)
    losses, ours, _ = train("ltc", name, steps=4, capturable=True, foreach=foreach)
    for a, b in zip([*losses, *ours], [*expected, *parameters], strict=True):
        torch.testing.assert_close(a.detach().cpu(), b.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}, {"capturable": True}], ids=str)
def test_a_warm_step_compiles_nothing_and_never_falls_back(options: dict[str, Any]) -> None:
    model = nn.Linear(3, 1).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    x = torch.randn(4, 3).to("ltc")

    def step() -> None:
        optimizer.zero_grad()
        model(x).pow(2).mean().backward()
        optimizer.step()
        if "capturable" not in options:
            scheduler.step()
        lt.sync()

    for _ in range(3):
        step()
    misses, counters = lt.cache_info()["misses"], lt.metrics.counter_names()
    fallbacks = [n for n in counters if n.startswith("aten::")]
    before = {n: lt.metrics.counter_value(n) for n in fallbacks}
    for _ in range(4):
        step()
    assert lt.cache_info()["misses"] == misses
    assert before == {n: lt.metrics.counter_value(n) for n in lt.metrics.counter_names() if n.startswith("aten::")}


@pytest.mark.parametrize("foreach", [None, False, True])
def test_clipping(foreach: bool | None) -> None:
    def program(device: str) -> Any:
        model = nn.Linear(3, 2).to(device)
        (model(torch.randn(4, 3).to(device)) * 100).pow(2).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        inf = nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type=float("inf"), foreach=foreach)
        nn.utils.clip_grad_value_(model.parameters(), 0.1, foreach=foreach)
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()], foreach=foreach)
        return norm, inf, total

    same(program, versions=False)
