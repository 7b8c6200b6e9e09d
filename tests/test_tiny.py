"""The smoke test: in a few seconds, the essence of the device.  If this fails, look at nothing else first."""

from __future__ import annotations

import pytest
import torch
from support import bits, same
from torch import nn

import lazytensor as lt
from lazytensor.execute import cut


def test_an_op_is_recorded_and_runs_at_the_read():
    x = torch.ones(2, device="ltc") + 1
    assert len(cut.pending()) >= 1
    assert x.tolist() == [2, 2]
    assert cut.pending() == []


def test_a_write_through_a_view_reaches_the_base():
    def program(device):
        x = torch.arange(6.0, device=device).view(2, 3)
        x.t()[1].mul_(10)
        total = x.sum().item()

    same(program)


def test_dropout_is_eagers_and_does_not_change_between_reads():
    def program(device):
        x = nn.functional.dropout(torch.ones(8, device=device), 0.5)
        first, second = x.tolist(), x.tolist()

    same(program)


def test_a_wrong_shape_is_eagers_error_at_once():
    with pytest.raises(RuntimeError, match=r"The size of tensor a \(2\) must match the size of tensor b \(3\)"):
        torch.ones(2, device="ltc") + torch.ones(3, device="ltc")


def test_training_equals_eager_bit_by_bit_and_compiles_one_graph_per_step():
    def train(device: str) -> tuple[list[float], list[bytes]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 1))
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        losses = []
        for _ in range(6):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4, device=device)).pow(2).mean()
            loss.backward()
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
        return losses, [bits(t) for t in model.state_dict().values()]

    assert train("ltc") == train("cpu")
    before = lt.cache_info()["misses"]
    train("ltc")
    assert lt.cache_info()["misses"] - before <= 1, "the same program a second time is known"
