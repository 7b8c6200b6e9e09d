"""Training as people write it: losses and parameters are those of CPU eager, over ten steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import same, subprocess_run
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import lazytensor as lt

STEPS = 10


class Net(nn.Module):
    """A little of everything: convolution, batch norm, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.drop = nn.Dropout(0.2)
        self.head = nn.Linear(3 * 4 * 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(F.relu(self.norm(self.conv(x)))).flatten(1))


def batches(device: str, count: int = STEPS) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(torch.randn(4, 1, 4, 4).to(device), torch.randint(3, (4,)).to(device)) for _ in range(count)]


def plain(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def gradient_accumulation(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for i, (x, y) in enumerate(batches(device)):
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
        losses.append(loss.detach())
        if i % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()
    return model, losses


def mixed_precision(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=3)
    losses = []
    for x, y in batches(device):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.detach())
    return model, losses, scaler.get_scale()


def gradient_clipping(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    norms = []
    for x, y in batches(device):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
    return model, norms


def schedulers(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    warmup = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    cosine = lr_scheduler.CosineAnnealingLR(optimizer, 7)
    schedule = lr_scheduler.SequentialLR(optimizer, [warmup, cosine], milestones=[3])
    plateau = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
    rates, losses = [], []
    for x, y in batches(device):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        schedule.step()
        plateau.step(loss.item())
        losses.append(loss.detach())
        rates.append(optimizer.param_groups[0]["lr"])
    return model, losses, rates


def moving_average_of_weights(device: str) -> Any:
    model = Net().to(device)
    library = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    by_hand = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(device):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        library.update_parameters(model)
        with torch.no_grad():
            for ours, theirs in zip(by_hand.parameters(), model.parameters(), strict=True):
                ours.mul_(0.9).add_(theirs, alpha=0.1)
    return model, library.module, by_hand


def freezing_and_unfreezing(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for i, (x, y) in enumerate(batches(device)):
        frozen = 3 <= i < 7
        model.conv.requires_grad_(not frozen)
        model.norm.train(not frozen)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def weight_tying(device: str) -> Any:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5, bias=False))
    model[1].weight = model[0].weight
    model.to(device)
    assert model[1].weight is model[0].weight
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        x = torch.randint(5, (6,)).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), x.roll(1))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


def parametrization(device: str) -> Any:
    class Symmetric(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu() + x.triu(1).t()

        def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
            return x.triu()

    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)).to(device)
    nn.utils.parametrize.register_parametrization(model[0], "weight", Symmetric())
    nn.utils.parametrizations.weight_norm(model[1])
    nn.utils.parametrizations.spectral_norm(model[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3).to(device)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses, model[0].weight


def data_dependent_control_flow(device: str) -> Any:
    model = nn.Linear(3, 3).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for _ in range(STEPS):
        x = torch.randn(4, 3).to(device)
        optimizer.zero_grad()
        y = model(x)
        while y.norm() > 1.5:
            y = y / 2
        if y.mean() > 0:
            y = y * 3
            taken.append(True)
        else:
            taken.append(False)
        kept = y[y.sum(1) > -0.5]
        loss = kept.pow(2).sum() + y.pow(2).mean()
        loss.backward()
        optimizer.step()
    return model, taken


def growing_list_of_outputs(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    outputs, losses = [], []
    for x, y in batches(device):
        optimizer.zero_grad()
        out = model(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        outputs.append(out.detach())
        losses.append(loss.detach())
    return model, torch.cat(outputs), torch.stack(losses).mean()


def evaluation_between_steps(device: str) -> Any:
    model = Net().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    right = []
    for x, y in batches(device):
        model.train()
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            right.append((model(x).argmax(1) == y).sum().item())
    return model, right


def gradient_penalty(device: str) -> Any:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        x = torch.randn(4, 3).to(device).requires_grad_()
        optimizer.zero_grad()
        y = model(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        loss = y.mean() + (slope.norm(dim=1) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return model, losses


PROGRAMS = [
    plain,
    gradient_accumulation,
    mixed_precision,
    gradient_clipping,
    schedulers,
    moving_average_of_weights,
    freezing_and_unfreezing,
    weight_tying,
    parametrization,
    data_dependent_control_flow,
    growing_list_of_outputs,
    evaluation_between_steps,
    gradient_penalty,
]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_ten_steps(program: Any) -> None:
    same(program, versions=False, twice=False)


@pytest.mark.parametrize("program", [plain, gradient_accumulation], ids=lambda p: p.__name__)
def test_cuts_anywhere_change_nothing(program: Any) -> None:
    torch.manual_seed(0)
    expected = program("ltc")[0].state_dict()
    hook = nn.modules.module.register_module_forward_hook(lambda *_: lt.sync())
    try:
        torch.manual_seed(0)
        got = program("ltc")[0].state_dict()
    finally:
        hook.remove()
    assert all(torch.equal(got[k], v) for k, v in expected.items())


RESTART = """
import sys, torch, torch.nn as nn, torch.nn.functional as F
import lazytensor
sys.path.insert(0, {here!r})
from test_training import Net

def begin():
    torch.manual_seed(0)
    model = Net().to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

def steps(model, optimizer, schedule, count):
    for _ in range(count):
        x, y = torch.randn(4, 1, 4, 4).to("ltc"), torch.randint(3, (4,)).to("ltc")
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        schedule.step()

if {restart}:
    model, optimizer, schedule = begin()
    torch.manual_seed(99)
    saved = torch.load({path!r}, weights_only=True)
    for part, state in zip((model, optimizer, schedule), saved["parts"]):
        part.load_state_dict(state)
    torch.set_rng_state(saved["rng"])
    steps(model, optimizer, schedule, 5)
else:
    model, optimizer, schedule = begin()
    steps(model, optimizer, schedule, 5)
    parts = [model.state_dict(), optimizer.state_dict(), schedule.state_dict()]
    torch.save({{"parts": parts, "rng": torch.get_rng_state()}}, {path!r})
    steps(model, optimizer, schedule, 5)
for name, value in model.state_dict().items():
    print(name, value.double().cpu().flatten().tolist())
"""


def test_restart_from_a_checkpoint_in_a_new_process_goes_on_bit_equal(tmp_path: Path) -> None:
    here = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]
    results = []
    for restart in (False, True):
        code = RESTART.format(here=here[0], path=str(tmp_path / "checkpoint.pt"), restart=restart)
        result = subprocess_run(f"import sys; sys.path.append({here[1]!r})\n{code}")
        assert result.returncode == 0, result.stderr
        results.append(result.stdout)
    assert len(results[0].splitlines()) == 9
    assert results[0] == results[1]
