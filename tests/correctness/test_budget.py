"""A program that never reads is cut by itself; long chains record, run and are freed without recursion."""

from __future__ import annotations

import gc
import logging
import sys
import tracemalloc

import pytest
import torch
from support import bits, subprocess_run

import lazytensor as lt
from lazytensor.execute import budget, cut


@pytest.fixture
def unsaid(monkeypatch):
    monkeypatch.setattr(budget, "_said", False)


def test_too_many_pending_operations_cut_by_themselves_and_say_so_once(unsaid, caplog):
    x = torch.zeros(2, device="ltc")
    before = cut.hits + cut.misses
    with lt.settings.scope(max_pending=100), caplog.at_level(logging.WARNING, "lazytensor"):
        for _ in range(1000):
            x = x + 1
            line = sys._getframe().f_lineno - 1
    assert 5 <= cut.hits + cut.misses - before <= 20
    said = [r.getMessage() for r in caplog.records if "max_pending" in r.getMessage()]
    assert len(said) == 1
    assert f"{__file__}:{line}" in said[0] and "lazytensor.sync()" in said[0]
    assert x.tolist() == [1000, 1000]


def test_steps_between_which_the_caches_are_cleared_do_not_add_up(unsaid):
    x = torch.zeros(2, device="ltc")
    with lt.settings.scope(max_pending=60):
        for number in range(4):
            lt.clear_cache()
            y = x
            for _ in range(40):
                y = y + number
            before = cut.misses
            lt.sync()
            assert cut.misses - before == 1 and before == 0
    assert y.tolist() == [120, 120]


def test_wide_graphs_count_too(unsaid):
    x = torch.zeros(2, device="ltc")
    before = cut.hits + cut.misses
    with lt.settings.scope(max_pending=50):
        parts = [x + torch.full((2,), float(i), device="ltc").sin().cos() for i in range(60)]
        parts += [x * p for p in parts]
    assert cut.hits + cut.misses > before
    assert torch.stack(parts[:60])[:, 0].tolist() == [torch.tensor(float(i)).sin().cos().item() for i in range(60)]


def test_too_many_pending_bytes_cut_by_themselves(unsaid, caplog):
    x = torch.zeros(1000, device="ltc")
    before = cut.hits + cut.misses
    with lt.settings.scope(max_pending_bytes=100_000), caplog.at_level(logging.WARNING, "lazytensor"):
        kept = [x]
        for _ in range(100):
            kept.append(kept[-1] + 1)
    assert cut.hits + cut.misses - before in range(2, 8)
    assert any("max_pending_bytes" in r.getMessage() for r in caplog.records)
    assert [k[0].item() for k in kept] == list(range(101))


def test_bytes_of_what_has_died_do_not_count(unsaid):
    x = torch.zeros(1000, device="ltc")
    before = cut.hits + cut.misses
    with lt.settings.scope(max_pending_bytes=100_000):
        for _ in range(200):
            x = x + 1
    assert cut.hits + cut.misses == before
    assert x[0].item() == 200


def test_in_place_out_and_copy_ops_are_counted(unsaid):
    x, y = torch.zeros(3, device="ltc"), torch.ones(3, device="ltc")
    expected = torch.zeros(3)
    with lt.settings.scope(max_pending=17):
        for i in range(60):
            x.add_(y, alpha=i)
            x[1:].mul_(0.5)
            torch.sub(x, 0.25, out=x)
            x[:1].copy_(x[1:2])
            expected.add_(torch.ones(3), alpha=i)
            expected[1:].mul_(0.5)
            torch.sub(expected, 0.25, out=expected)
            expected[:1].copy_(expected[1:2])
    assert bits(x) == bits(expected)


def test_a_long_chain_records_runs_and_is_freed():
    """In a process of its own, with little stack: nothing recurses.

    ``python -m lazytensor.bench.endurance chain`` has 200,000 operations.
    """
    done = subprocess_run(
        """
        import gc, resource, sys, threading, torch
        sys.setrecursionlimit(300)
        import lazytensor as lt
        def main():
            x = torch.zeros(1, device="ltc")
            for _ in range(20_000):
                x = x + 1
            print(x.item())
            keep = x
            del x
            lt.clear_cache()
            gc.collect()
            print((keep * 2).item())
        main()
        """,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["20000.0", "40000.0"]


def test_steps_leave_no_memory_behind():
    """The quick form; `python -m lazytensor.bench.endurance memory` has the 10,000 steps."""
    from torch import nn

    model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.randn(4, 8, device="ltc")).pow(2).mean().backward()
        optimizer.step()
        lt.sync()

    for _ in range(50):
        step()
    gc.collect()
    tracemalloc.start()
    ledgers = lt.settings.diagnostics
    lt.settings.diagnostics = False  # they keep the last few thousand cuts, and no more
    try:
        step()
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(300):
            step()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        lt.settings.diagnostics = ledgers
        tracemalloc.stop()
    assert after - before < 100_000, f"{after - before} bytes more after 300 steps"
