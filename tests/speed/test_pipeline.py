"""Cuts that run in the background keep order, report errors once, and lose nothing."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.reference import ReferenceBackend
from lazytensor.trace.future import Future
from lazytensor.trace.storage import state_of


class Background(ReferenceBackend):
    """The reference backend, run in the background; it can be held up."""

    asynchronous = True
    name = "background"

    def __init__(self) -> None:
        super().__init__()
        self.open = threading.Event()
        self.open.set()
        self.ran_on: list[str] = []

    def compile(self, graph):  # type: ignore[no-untyped-def]
        program = super().compile(graph)

        def run(*inputs):  # type: ignore[no-untyped-def]
            self.open.wait()
            self.ran_on.append(threading.current_thread().name)
            return program(*inputs)

        return run


@pytest.fixture
def background():  # type: ignore[no-untyped-def]
    backend = Background()
    with lt.backend(backend):
        yield backend
        backend.open.set()
        lt.wait()


def test_sync_returns_before_the_cut_has_run(background: Background) -> None:
    background.open.clear()
    x = torch.ones(3, device="ltc") + 1
    lt.sync()
    assert isinstance(state_of(x).data, Future)
    y = x * 2
    background.open.set()
    assert y.tolist() == [4, 4, 4]
    assert x.tolist() == [2, 2, 2]


def test_waiting_leaves_real_data(background: Background) -> None:
    x = torch.ones(3, device="ltc") + 1
    lt.sync(wait=True)
    data = state_of(x).data
    assert not isinstance(data, Future) or data.run.has_run()


def test_the_cuts_of_a_program_that_waits_all_the_time_run_on_its_own_thread(background: Background) -> None:
    ran: list[str] = []
    background.ran_on = ran
    x = torch.ones(3, device="ltc")
    lt.sync(wait=True)
    ran.clear()
    for _ in range(3):
        x.add_(1)
        lt.sync()
    lt.wait()
    assert set(ran) == {"lazytensor-run"}
    ran.clear()
    for _ in range(4):
        for _ in range(5):
            (x + 1).sum().item()
        x.add_(1)
        lt.sync()
    lt.wait()
    assert set(ran[:17]) == {"lazytensor-run"}
    assert set(ran[17:]) == {"MainThread"}
    ran.clear()
    for _ in range(2):
        x.add_(1)
        lt.sync()
    lt.wait()
    assert set(ran) == {"lazytensor-run"}, "it waits no more"
    assert x.tolist() == [10, 10, 10]


def test_a_failure_under_way_comes_before_what_is_read(background: Background) -> None:
    table, bad = torch.ones(3, 2, device="ltc"), torch.tensor([7]).to("ltc")
    lost = torch.nn.functional.embedding(bad, table)
    background.open.clear()
    lt.sync()
    y = table.sum()
    background.open.set()
    with pytest.raises(IndexError):
        y.item()
    assert y.item() == 6
    del lost


def test_updates_in_place_are_applied_in_order(background: Background) -> None:
    x = torch.zeros(4, device="ltc")
    for step in range(50):
        x.add_(step)
        lt.sync()
    assert x.tolist() == [sum(range(50))] * 4


def test_no_more_cuts_are_under_way_than_allowed(background: Background) -> None:
    from lazytensor.execute.pipeline import pipeline

    background.open.clear()
    x = torch.zeros(4, device="ltc")
    with lt.settings.scope(max_in_flight=2):
        for _ in range(2):
            x = x + 1
            lt.sync()
        assert pipeline.under_way == 2
        recorder = threading.Thread(target=lambda: (background.open.wait(), None))
        recorder.start()
        background.open.set()
        recorder.join()
        x = x + 1
        lt.sync()
    assert x.tolist() == [3.0] * 4


def test_an_error_surfaces_at_the_next_read_once_with_its_line(background: Background) -> None:
    weight = torch.ones(3, 2, device="ltc")
    picked = torch.nn.functional.embedding(torch.tensor([7], device="ltc"), weight)
    weight.add_(1)
    lt.sync()
    with pytest.raises(IndexError, match="index out of range in self") as caught:
        lt.wait()
    assert "test_pipeline.py" in caught.value.__notes__[0]
    lt.wait()
    assert weight.tolist() == [[2.0, 2.0]] * 3
    with pytest.raises(lt.errors.ValueLost):
        picked.tolist()


def test_what_builds_on_a_failed_cut_fails_silently_and_parameters_keep_their_value(background: Background) -> None:
    background.open.clear()
    weight = torch.ones(3, 2, device="ltc")
    lt.sync()
    weight.add_(torch.nn.functional.embedding(torch.tensor([7, 0, 0], device="ltc"), weight))
    lt.sync()
    background.open.set()
    with pytest.raises(IndexError):
        lt.wait()
    lt.wait()
    assert weight.tolist() == [[1.0, 1.0]] * 3


def test_a_backend_with_memory_of_its_own_used_before_does_not_make_cuts_wait(
    background: Background, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lazytensor.backend import memory

    monkeypatch.setattr(memory, "in_use", True)
    background.open.clear()
    x = torch.zeros(4, device="ltc")
    for _ in range(2):
        x = x + 1
        lt.sync()
    background.open.set()
    assert x.tolist() == [2.0] * 4


def test_results_of_past_steps_are_let_go(background: Background) -> None:
    """Nobody reads the parameter, so every step's result is a future: each must not hold the one before."""
    x = torch.ones(3, device="ltc")
    for _ in range(5):
        x.add_(1)
        lt.sync()
    lt.wait()
    newest = state_of(x).data
    assert isinstance(newest, Future)
    assert newest.run.previous is None
    assert x.tolist() == [6.0] * 3


def test_a_read_waits_and_is_one_row_of_the_ledger(background: Background) -> None:
    before = len(lt.syncs().data["cuts"])
    assert (torch.ones(3, device="ltc") + 1).sum().item() == 6.0
    (cut,) = lt.syncs().data["cuts"][before:]
    assert cut["execute"] > 0


def test_only_a_small_cut_that_is_waited_for_runs_where_it_is_made(background: Background) -> None:
    from lazytensor.execute.pipeline import pipeline

    pipeline.rest()
    x = torch.ones(3, device="ltc")
    assert (x + 1).tolist() == [2, 2, 2]
    for _ in range(100):
        x = x + 1
    assert x.tolist() == [101, 101, 101]
    small, large = background.ran_on
    assert small == threading.current_thread().name
    assert large == "lazytensor-run"


FREED = """
import sys
from pathlib import Path
from lazytensor.backend import heap

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1])

blocks = [bytearray(100_000) for _ in range(400)]
last = bytearray(100_000)  # keeps the end of the heap in use
del blocks
before = resident()
heap.give_back()
print(before - resident())
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux how much memory is resident")
def test_memory_that_was_freed_is_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 20_000  # kB, of 40,000


PACKED = """
import ctypes
from pathlib import Path
import torch
import lazytensor as lt

mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
mkl.mkl_serv_mem_stat.restype = ctypes.c_longlong

def kept():
    return mkl.mkl_serv_mem_stat(ctypes.byref(ctypes.c_int()))

lt.set_backend("auto")
x = torch.randn(256, 1024, device="ltc")
w = torch.randn(1024, 1024, device="ltc")
lt.sync(wait=True)
x = x @ w  # new, so it runs here
lt.sync(wait=True)
here = kept()
for _ in range(3):
    x = x @ w
    lt.sync()  # in the background
    lt.wait()
print(here, kept())
"""


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="this PyTorch multiplies without MKL")
def test_what_mkl_keeps_for_a_thread_is_freed_when_cuts_leave_it() -> None:
    done = subprocess.run([sys.executable, "-c", PACKED], capture_output=True, text=True, check=True)
    here, then = map(int, done.stdout.split())
    assert here > 1 << 20
    assert then < 1.5 * here  # twice, if both threads' are kept
