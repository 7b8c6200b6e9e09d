"""Compiled steps run without Python, with the results, errors and order that they have with it."""

from __future__ import annotations

import os
import signal
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor import native
from lazytensor.backend import compiler
from lazytensor.backend.inductor.load import Compiled
from lazytensor.execute.cores import Share
from lazytensor.execute.pipeline import pipeline
from lazytensor.execute.queues import PythonQueue
from lazytensor.trace.future import Run, settled
from lazytensor.trace.storage import state_of

pytestmark = pytest.mark.skipif(
    compiler.find() is None or not lt.settings.compiled_recorder,
    reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
)


@pytest.fixture
def compiled() -> Iterator[None]:
    """Every graph is compiled at its first cut."""
    with lt.backend("inductor", wait=True):
        yield
        lt.wait()


class Bag(torch.nn.Module):
    """Looks rows up and sums them: an index out of range fails when the step runs, not before."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 3)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.table(rows) * 0.5).square().sum()


def trained(device: str, batches: list[list[int]]) -> torch.Tensor:
    """The table after a step of SGD for each batch; no step is waited for."""
    torch.manual_seed(0)
    model = Bag().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        step(model, optimizer, batch)
    return model.table.weight.detach().cpu()


def step(model: Bag, optimizer: torch.optim.Optimizer, batch: list[int]) -> None:
    """One step and its cut."""
    rows = torch.tensor(batch).to(model.table.weight.device)
    optimizer.zero_grad()
    model(rows).backward()
    optimizer.step()
    lt.sync()


BATCHES = [[i % 5, (2 * i) % 5, 4] for i in range(12)]


def test_steps_run_without_python_and_their_results_are_eager_s(compiled: None) -> None:
    before = pipeline.jobs
    ours = trained("ltc", BATCHES)
    assert pipeline.jobs - before >= 6, "all but the first ones, whose results are looked at"
    torch.testing.assert_close(ours, trained("cpu", BATCHES))


def test_a_brief_step_runs_where_it_is_recorded(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, threads = trained("cpu", BATCHES), torch.get_num_threads()
    before = pipeline.jobs
    monkeypatch.setattr(Share, "brief", True)
    ours = trained("ltc", BATCHES)
    assert pipeline.jobs == before
    assert torch.get_num_threads() == threads
    torch.testing.assert_close(ours, wanted)


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread")
def test_a_step_that_gives_way_has_the_same_results(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr(Share, "begin", lambda share, now: -share.cores)
    monkeypatch.setattr(Share, "end", lambda share, seconds, kernels=0: seen.append(kernels))
    ours = trained("ltc", BATCHES)
    lt.wait()
    torch.testing.assert_close(ours, trained("cpu", BATCHES))
    assert max(seen) >= 1, "compiled code looks before each kernel"


def test_the_python_queue_gives_the_same_bits(compiled: None, monkeypatch: pytest.MonkeyPatch) -> None:
    with_jobs = trained("ltc", BATCHES)
    pipeline.drain()
    kept = (pipeline.queue, pipeline.thread)
    monkeypatch.setattr("lazytensor.execute.queues.make", PythonQueue)
    pipeline.queue = pipeline.thread = None
    before = pipeline.jobs
    x = torch.ones(3, device="ltc")
    try:
        assert torch.equal(trained("ltc", BATCHES), with_jobs)
        assert pipeline.jobs == before
        x += 1
        lt.sync()
    finally:
        pipeline.drain()
        pipeline.queue, pipeline.thread = kept
    for _ in range(6):
        x += 1  # at first on what the Python queue has made
        lt.sync()
    assert x.tolist() == [8, 8, 8]


def test_a_failure_names_its_line_and_leaves_the_parameters_alone(compiled: None) -> None:
    torch.manual_seed(0)
    model = Bag().to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in BATCHES[:8]:
        step(model, optimizer, batch)
    kept = model.table.weight.detach().cpu()
    step(model, optimizer, [0, 9, 1])
    with pytest.raises(IndexError) as caught:
        step(model, optimizer, [0, 2, 1])  # recorded while the other runs, or refused since it has failed
        lt.wait()
    assert "test_compiled_runner.py" in caught.value.__notes__[0]
    assert torch.equal(model.table.weight.detach().cpu(), kept), "what builds on a failed step is not done either"
    before = pipeline.jobs
    for batch in BATCHES[:4]:
        step(model, optimizer, batch)
    lt.wait()
    assert pipeline.jobs > before, "the steps after it run without Python again"
    reference = kept.clone().requires_grad_()
    for batch in BATCHES[:4]:
        loss = (torch.nn.functional.embedding(torch.tensor(batch), reference) * 0.5).square().sum()
        (grad,) = torch.autograd.grad(loss, reference)
        reference.data -= 0.1 * grad
    torch.testing.assert_close(model.table.weight.detach().cpu(), reference.detach())


def test_a_loss_that_is_kept_does_not_keep_its_step(compiled: None) -> None:
    model = Bag().to("ltc")
    losses, grads = [], []
    for batch in BATCHES[:8]:
        model.zero_grad()
        loss = model(torch.tensor(batch).to("ltc"))
        loss.backward()
        lt.sync()
        losses.append(loss.detach())
        grad = model.table.weight.grad
        assert grad is not None
        grads.append(weakref.ref(settled(state_of(grad))))
    del loss, grad
    model.zero_grad()
    lt.sync(wait=True)
    assert [grad() is None for grad in grads] == [True] * 8
    assert all(loss.item() > 0 for loss in losses)


@pytest.mark.parametrize("already", [False, True], ids=["before it has run", "afterwards"])
def test_a_result_that_nobody_can_see_is_dropped_when_its_step_ends(compiled: None, already: bool) -> None:
    lt.wait()
    queue = native.extension().Queue()
    run = Run([None, None], job=queue.job())
    job, seen = run.job, run.futures[0]  # type: ignore[index]
    made = [torch.ones(3), torch.zeros(3)]
    queue.put("a step that Python runs", job)
    if not already:
        run.forget_unseen()
    assert queue.take() == "a step that Python runs"
    queue.drop(made)
    if already:
        run.forget_unseen()
    left, dropped = job.results()
    assert left is made[0] and dropped is None
    assert seen.now() is made[0]


def test_what_a_program_lets_go_of_while_it_is_made_does_not_outlive_its_step(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost: list[int] = []
    deliver = Run.deliver

    def watched(run: Run) -> None:
        if run.job is not None and run.futures is not None and run.has_run():
            lost.append(sum(result is None for result in run.job.results()))
        deliver(run)

    monkeypatch.setattr(Run, "deliver", watched)
    x = torch.randn(700, 700, device="ltc") / 700
    for _ in range(8):
        gradient = x
        for _ in range(6):
            gradient = gradient @ x
        x = x + gradient
        lt.sync()  # takes longer than what is recorded next
        del gradient
    lt.wait()
    assert max(lost) == 1, "the gradient; what the next step takes stays"
    assert torch.isfinite(x).all()


def test_results_that_share_memory_are_copied(compiled: None) -> None:
    """oneDNN gives both biases of an LSTM one gradient: an in-place update of one must not be seen in the other."""

    def grads(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        lstm = torch.nn.LSTM(4, 8).to(device)
        x = torch.randn(3, 2, 4).to(device)
        for _ in range(8):
            lstm.zero_grad()
            lstm(x)[0].sum().backward()
            lt.sync()
        first, second = lstm.bias_ih_l0.grad, lstm.bias_hh_l0.grad
        assert first is not None
        assert second is not None
        first.mul_(2)
        return [first.cpu(), second.cpu()]

    before = pipeline.jobs
    ours = grads("ltc")
    assert pipeline.jobs > before
    for mine, eager in zip(ours, grads("cpu"), strict=True):
        torch.testing.assert_close(mine, eager)


def test_a_forked_child_goes_on_by_itself(compiled: None) -> None:
    """Without autograd, which PyTorch refuses in a child of a process that has used it."""
    x = torch.ones(3, device="ltc")

    def counted(first: int, last: int) -> bool:
        for _ in range(first, last):
            x.mul_(0.5).mul_(2).add_(1)
            lt.sync()
        return x.tolist() == [last] * 3

    assert counted(1, 10)
    child = os.fork()
    if child == 0:
        before = pipeline.jobs
        os._exit(0 if counted(10, 20) and pipeline.jobs > before else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert counted(10, 15)


def test_waiting_can_be_interrupted() -> None:
    queue: Any = native.extension().Queue()
    queue.put("never run", queue.job())

    def interrupt(number: int, frame: Any) -> None:
        raise TimeoutError("enough")

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(TimeoutError, match="enough"):
            queue.wait_below(1)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert len(queue) == 1
    assert queue.take() == "never run"
    queue.drop()
    assert len(queue) == 0


def test_code_that_is_no_compiled_graph_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="has no entry"):
        native.extension().Code(str(tmp_path / "graph.so"), [0], [], [])


def test_a_cut_that_runs_where_it_is_made_needs_no_python_either(
    compiled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.arange(4.0, device="ltc")

    def doubled(step: int) -> list[float]:
        y = (x * 2 + step).relu()
        lt.sync()
        return y.tolist()

    def refused(self: Compiled, *inputs: Any) -> list[Any]:
        raise AssertionError("called from Python")

    with lt.settings.scope(run_in_background=False):
        for step in range(2):
            assert doubled(step) == [2.0 * i + step for i in range(4)]
        monkeypatch.setattr(Compiled, "__call__", refused)
        for step in range(2, 5):
            assert doubled(step) == [2.0 * i + step for i in range(4)]
