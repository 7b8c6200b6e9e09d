"""A cut that compiled code has run where it was made is made again in C++: same results, errors and notes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import compiler
from lazytensor.execute import cut
from lazytensor.inspect import events
from lazytensor.trace.future import Future
from lazytensor.trace.storage import state_of

pytestmark = pytest.mark.skipif(
    compiler.find() is None or not lt.settings.compiled_recorder,
    reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
)


class Counted:
    """The function of C++, and how many cuts it made."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.made = 0

    def __call__(self, *args: Any) -> Any:
        done = self.function(*args)
        self.made += done is not None
        return done


@pytest.fixture
def again(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counted]:
    """Every graph is compiled at its first cut; counts the cuts that are made again."""
    if cut._again is None:
        pytest.skip("the compiled recorder has not been built")
    lt.clear_cache()  # graphs of other tests: among many the order matters, which Python keeps
    counted = Counted(cut._again)
    monkeypatch.setattr(cut, "_again", counted)
    monkeypatch.setattr(cut.memory, "in_use", False)  # another test's backend may have had memory of its own
    monkeypatch.setattr(cut, "_habit", cut._Habit())
    with lt.backend("inductor", wait=True):
        yield counted
        lt.wait()


class Settling(torch.nn.Module):
    """Reads a value after each of its layers, and looks rows up: an index out of range fails when that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(5, 4)
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, list[float]]:
        state = self.table(rows)
        read = [state.sum().item()]
        for scale in (0.5, 0.25, 0.125, 2.0):
            state = torch.tanh(self.layer(state)) * scale
            read.append(state.sum().item())
        return (state * state).sum(), read


def trained(device: str, steps: int) -> tuple[Settling, torch.optim.Optimizer, list[float]]:
    torch.manual_seed(0)
    model = Settling().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    read = []
    for number in range(steps):
        read += step(model, optimizer, [number % 5, 1, 4])
    return model, optimizer, read


def step(model: Settling, optimizer: torch.optim.Optimizer, rows: list[int]) -> list[float]:
    optimizer.zero_grad()
    loss, read = model(torch.tensor(rows).to(model.layer.weight.device))
    loss.backward()
    optimizer.step()
    lt.sync()
    return read


def parameters(model: Settling) -> list[torch.Tensor]:
    return [p.detach().cpu() for p in model.parameters()]


STEPS = 12
CUTS = 6  # of a step


def test_what_is_read_and_what_is_trained_are_eager_s(again: Counted) -> None:
    model, _, read = trained("ltc", STEPS)
    assert again.made >= 4 * CUTS
    expected, _, read_by_eager = trained("cpu", STEPS)
    torch.testing.assert_close(torch.tensor(read), torch.tensor(read_by_eager))
    torch.testing.assert_close(parameters(model), parameters(expected))


def test_the_ledgers_know_every_cut_with_its_line(again: Counted) -> None:
    start = len(events.cuts)
    model, optimizer, _ = trained("ltc", STEPS)
    before, made, hits = len(events.cuts), again.made, cut.hits
    step(model, optimizer, [1, 2, 3])
    noted = events.all_cuts()[before:]
    assert again.made - made == len(noted) == cut.hits - hits == CUTS
    assert [c.cause for c in noted] == ["item"] * (CUTS - 1) + ["sync"]
    assert all(c.hit and not c.background and c.timing.execute > 0 and c.place.file == __file__ for c in noted)
    by_python = events.all_cuts()[start : start + CUTS]
    assert [(c.reason, c.place) for c in noted[:-1]] == [(c.reason, c.place) for c in by_python[:-1]]
    assert cut.last is noted[-1].timing and noted[0].timing.outputs > 0


def test_a_failure_is_eager_s_error_with_its_line_and_leaves_everything_as_it_was(again: Counted) -> None:
    model, optimizer, _ = trained("ltc", STEPS)
    before = parameters(model)
    made = again.made
    with pytest.raises(IndexError) as raised:
        step(model, optimizer, [1, 7, 3])
    assert any("state = self.table(rows)" in line or __file__ in line for line in raised.value.__notes__)
    assert again.made == made
    torch.testing.assert_close(parameters(model), before, rtol=0, atol=0)
    for _ in range(4):
        step(model, optimizer, [1, 2, 3])
    assert again.made > made, "it is made again afterwards"


def test_a_scope_that_forbids_cuts_is_asked(again: Counted) -> None:
    model, _, _ = trained("ltc", STEPS)
    made = again.made
    with pytest.raises(lt.errors.LazyTensorError), lt.no_sync():
        model(torch.tensor([1, 2, 3]).to("ltc"))
    assert again.made == made


def test_data_that_a_cut_in_the_background_made_does_not_stay_in_the_way(again: Counted) -> None:
    frozen = torch.arange(3.0, device="ltc") + 1
    lt.sync()
    assert state_of(frozen).data.__class__ is Future
    for _ in range(STEPS):
        read = [(frozen * factor).sum().item() for factor in (1.0, 2.0, 3.0, 4.0)]
        kept = frozen + read[-1]
        lt.sync()
    assert read == [6.0, 12.0, 18.0, 24.0]
    assert kept.tolist() == [25.0, 26.0, 27.0]
    assert state_of(frozen).data.__class__ is torch.Tensor and again.made >= 4 * 5


def test_nothing_is_made_again_by_a_computation_that_was_dropped(again: Counted) -> None:
    model, optimizer, _ = trained("ltc", STEPS)
    lt.clear_cache()
    made = again.made
    step(model, optimizer, [1, 2, 3])
    assert again.made - made < CUTS


def test_a_program_that_only_reads_is_made_again_too(again: Counted) -> None:
    if not cut.pipeline.resting:
        cut.pipeline.rest()
    x = torch.ones(4, device="ltc")
    read = [(x * number).sum().item() for number in range(STEPS)]
    assert read == [4.0 * number for number in range(STEPS)]
    assert again.made >= STEPS - 4, "there is no sync() by which a step could be told"


def test_numbers_are_those_of_this_step(again: Counted) -> None:
    x = torch.ones(4, device="ltc")
    read = []
    for number in range(STEPS):
        read += [(x * (number + part / 8) + number).sum().item() for part in range(4)]
        kept = x + number
        lt.sync()
    assert again.made > 4 and kept.tolist() == [STEPS] * 4
    assert read == [4 * (number + part / 8) + 4 * number for number in range(STEPS) for part in range(4)]


@pytest.mark.parametrize(("reads", "operations", "resting", "here"), [
    (4, 10, True, True),
    (3, 10, True, False),
    (4, 100, True, False),
    (4, 10, False, False),
])  # fmt: skip
def test_a_step_that_reads_much_does_not_start_the_other_thread(
    reads: int, operations: int, resting: bool, here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut.pipeline, "resting", resting)
    habit, backend = cut._Habit(), lt.current_backend()
    for _ in range(reads):
        habit.at_once(backend, True, operations)
    assert habit.at_once(backend, False, operations) is here
