"""Signals, forks, threads and the end of the process: nothing is lost, nothing crashes."""

from __future__ import annotations

import os
import sys
import threading

import pytest
import torch
from support import bits, subprocess_run
from torch import nn

import lazytensor as lt
from lazytensor.device import threads


def test_a_real_interrupt_during_a_cut_loses_nothing():
    """SIGINT arrives while a graph runs; afterwards everything pending runs and gives eager's result."""
    done = subprocess_run("""
        import os, signal, threading, torch, lazytensor as lt
        signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in what a shell has put in the background
        def program(x):
            for _ in range(40):
                x = (x @ x).tanh()
            return x
        torch.manual_seed(0)
        lt.set_backend("reference")  # the default one runs a new step as it is recorded
        start = torch.randn(400, 400)
        x = program(start.to("ltc"))
        y = x * 2
        running, sent = threading.Event(), threading.Event()
        from lazytensor.backend import reference
        whole = reference.Program.__call__
        def watched(self, *inputs):
            running.set()
            results = whole(self, *inputs)
            sent.wait()
            return results
        reference.Program.__call__ = watched
        def interrupt():
            running.wait()
            os.kill(os.getpid(), signal.SIGINT)
            sent.set()
        threading.Thread(target=interrupt).start()
        try:
            y.sum().item()
            print("not interrupted")
        except KeyboardInterrupt:
            print("interrupted")
        expected = program(start)
        print(torch.equal(x.cpu(), expected), torch.equal(y.cpu(), expected * 2))
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    first, rest = done.stdout.splitlines()
    assert first == "interrupted" and rest == "True True"


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_goes_on_with_the_parents_tensors():
    done = subprocess_run("""
        import os, torch, lazytensor as lt
        from torch import nn
        torch.set_num_threads(1)
        model = nn.Linear(3, 3).to("ltc")
        data = torch.ones(2, 3, device="ltc")
        lt.sync(wait=True)
        pending = model(data) * 2
        child = os.fork()
        if child == 0:
            value = pending.sum()
            value.backward()
            here = [value.item(), model.weight.grad.sum().item(), (data + 1).sum().item()]
            os.write(1, (repr(here) + "\\n").encode())
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        value = pending.sum()
        value.backward()
        print([value.item(), model.weight.grad.sum().item(), (data + 1).sum().item()])
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    child, parent = done.stdout.splitlines()
    assert child == parent


def test_a_fork_while_other_threads_record():
    done = subprocess_run("""
        import os, threading, torch, lazytensor as lt
        torch.set_num_threads(1)
        stop = threading.Event()
        def busy():
            x = torch.ones(3, device="ltc")
            while not stop.is_set():
                x = (x * 1.5).clamp(max=3.0)
                x.sum().item()
        others = [threading.Thread(target=busy) for _ in range(2)]
        for t in others: t.start()
        mine = torch.arange(3.0, device="ltc") + 1
        for _ in range(5):
            child = os.fork()
            if child == 0:
                ok = mine.tolist() == [1, 2, 3] and (torch.ones(2, device="ltc") * 4).tolist() == [4, 4]
                os._exit(0 if ok else 3)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        stop.set()
        for t in others: t.join()
        print(mine.tolist())
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "[1.0, 2.0, 3.0]\n"


# --- threads --------------------------------------------------------------------------------------------------------


def work(device: str, seed: int, steps: int) -> torch.Tensor:
    """Recording, writing through views, reading, falling back and cutting, all mixed."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.zeros(4, device=device)
    w = torch.randn(4, 4, generator=generator).to(device)
    for i in range(steps):
        x = (x @ w * 0.1 + i * 0.5).tanh()
        x[1:3].mul_(1.5 + seed)
        x.add_(torch.full((4,), float(i), device=device), alpha=0.01)
        if i % 7 == 0:
            x.sum().item()
        if i % 11 == 0:
            lt.sync()
        if i % 13 == 0:
            (x > 0).nonzero()
    return x.cpu()


def in_threads(jobs):
    """Run each job in its own thread, switching as often as can be; return their results or raise the first error."""
    results: dict[int, object] = {}
    errors: list[BaseException] = []
    gate = threading.Barrier(len(jobs))

    def run(i: int) -> None:
        gate.wait()
        try:
            results[i] = jobs[i]()
        except BaseException as error:
            errors.append(error)

    everyone = [threading.Thread(target=run, args=(i,)) for i in range(len(jobs))]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in everyone:
            thread.start()
        for thread in everyone:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    if errors:
        raise errors[0]
    return [results[i] for i in range(len(jobs))]


@pytest.mark.parametrize("devices", [("ltc", "ltc", "ltc"), ("ltc:0", "ltc:1")])
def test_threads_that_record_read_and_cut(devices):
    expected = [work("cpu", seed, 150) for seed in range(len(devices))]
    for _ in range(2):
        got = in_threads([lambda d=d, s=s: work(d, s, 150) for s, d in enumerate(devices)])
        assert [bits(g) for g in got] == [bits(e) for e in expected]
    assert threads.locked


def test_threads_that_train():
    def train(device: str, seed: int) -> list[bytes]:
        generator = torch.Generator().manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
        with torch.no_grad():
            for p in model.parameters():
                p.normal_(generator=generator)
        model.to(device)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        x = torch.randn(4, 3, generator=generator).to(device)
        for _ in range(15):
            optimizer.zero_grad()
            model(x).pow(2).mean().backward()
            optimizer.step()
            lt.sync()
        return [bits(p) for p in model.parameters()]

    expected = [train("cpu", s) for s in range(3)]
    assert in_threads([lambda s=s: train("ltc", s) for s in range(3)]) == expected


def test_a_tensor_made_in_one_thread_is_used_in_another():
    x = torch.arange(4.0, device="ltc") * 2

    def add() -> float:
        total = 0.0
        for _ in range(50):
            total = (x + total).sum().item()
        return total

    expected = 0.0
    for _ in range(50):
        expected = (torch.arange(4.0) * 2 + expected).sum().item()
    assert in_threads([add, add, add]) == [expected] * 3


def test_one_thread_pays_for_no_lock():
    done = subprocess_run("""
        import threading, torch, lazytensor as lt
        from lazytensor.device import threads
        x = torch.ones(2, device="ltc") + 1
        x.sum().item()
        print(threads.locked)
        t = threading.Thread(target=print, args=("in a thread",))
        t.start(); t.join()
        print(threads.locked, (x * 2).tolist())
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["False", "in a thread", "True [4.0, 4.0]"]
    assert done.stderr == ""


# --- the end --------------------------------------------------------------------------------------------------------

TRAINING = """
import sys, threading, torch, lazytensor as lt
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1)).to("ltc")
optimizer = torch.optim.Adam(model.parameters())
for i in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8, device="ltc")).pow(2).mean()
    loss.backward()
    optimizer.step()
pending = [p * 2 for p in model.parameters()]
graph = (model(torch.randn(8, 8, device="ltc")) ** 2).sum()
print(loss.item())
"""


def test_processes_that_ran_backward_exit_cleanly_under_load():
    """Several at once on few cores.  `python -m lazytensor.bench.endurance exits` does 100."""
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(3) as pool:
        done = list(pool.map(lambda _: subprocess_run(TRAINING), range(4)))
    assert [(d.returncode, d.stderr) for d in done] == [(0, "")] * 4


def test_a_process_that_ends_with_an_error_says_only_that():
    done = subprocess_run(TRAINING + "\nraise SystemExit(5)")
    assert (done.returncode, done.stderr) == (5, "")
    assert os.name == "posix"
