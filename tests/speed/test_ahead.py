"""A step that was never seen runs as it is recorded; nobody can tell but by the clock."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import lazytensor as lt
from lazytensor.backend import diskcache
from lazytensor.backend.reference import ReferenceBackend
from lazytensor.device import recorder
from lazytensor.execute import ahead, cut
from lazytensor.inspect import events
from lazytensor.trace import record, shapes


class Counting(ReferenceBackend):
    """The reference backend, whose first runs are run ahead; counts its own."""

    name = "counting"
    runs_ahead = True

    def __init__(self) -> None:
        super().__init__()
        self.runs = 0
        self.told = 0
        self.compiled = 0

    def compile(self, graph):  # type: ignore[no-untyped-def]
        self.compiled += 1
        program = super().compile(graph)

        def run(*inputs):  # type: ignore[no-untyped-def]
            self.runs += 1
            return program(*inputs)

        return run

    def ran_ahead(self, computation: Any) -> None:
        self.told += 1


@pytest.fixture
def backend(tmp_path: Path) -> Iterator[Counting]:
    """The counting backend in force, in a process that has recorded and compiled nothing."""
    with lt.settings.scope(cache_dir=str(tmp_path)):
        lt.register_backend("counting", Counting)
        lt.set_backend("counting")
        lt.clear_cache()
        yield lt.current_backend()  # type: ignore[misc]
        lt.set_backend("reference")
    lt.clear_cache()


def train(device: str, steps: int) -> list[torch.Tensor]:
    """A small model with batch statistics, in-place updates and views; everything that it leaves."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Dropout(0.1), nn.Linear(8, 3)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x, y = torch.randn(5, 6).to(device), torch.tensor([0, 1, 2, 1, 0]).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        if device == "ltc":
            lt.sync()
    return [t.cpu() for t in (*losses, *model.state_dict().values(), *(p.grad for p in model.parameters()))]


def test_a_new_step_is_run_by_nothing_else_and_gives_what_eager_gives(backend: Counting) -> None:
    found = train("ltc", 1)
    assert backend.runs == backend.compiled == 0
    assert cut.misses > 0
    assert all(map(torch.equal, found, train("cpu", 1)))


def test_a_new_step_becomes_a_graph_when_it_comes_again_or_somebody_asks(backend: Counting) -> None:
    x = torch.randn(4).to("ltc")
    for step in range(3):
        y = (x * 2).sin()
        lt.sync()
        assert (backend.compiled, backend.told, backend.runs) == (min(step, 1), min(step, 1), step)
        known = list(events.graphs.values())[-1]
        assert (known.runs, known.hits) == (step + 1, step)
    assert (known.nodes, known.outputs) == (2, 1)
    assert known.ops == known.fresh == {"aten::mul.Tensor": 1, "aten::sin": 1}
    assert known.compile_seconds > 0
    assert torch.equal(y.cpu(), (x.cpu() * 2).sin())


def test_a_backend_that_refuses_the_graph_says_so_when_it_is_asked(backend: Counting) -> None:
    def refuse(graph: Any) -> Any:
        raise NotImplementedError("not this one")

    backend.compile = refuse  # type: ignore[method-assign]
    x = torch.randn(4).to("ltc")
    y = (x * 2).sin()
    lt.sync()
    assert torch.equal(y.cpu(), (x.cpu() * 2).sin())
    for _ in range(2):
        z = (x * 2).sin()
        with pytest.raises(lt.errors.BackendFailed, match="not this one"):
            lt.sync()
    del backend.compile  # type: ignore[method-assign]
    assert torch.equal(z.cpu(), (x.cpu() * 2).sin())
    assert backend.runs == 1


def test_later_steps_are_the_backends_and_give_what_eager_gives(backend: Counting) -> None:
    assert all(map(torch.equal, train("ltc", 4), train("cpu", 4)))
    assert backend.runs >= 2


def test_a_new_step_asks_no_shape_rule(backend: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(shapes, "infer", lambda op, args: asked.append(op.name))
    x = torch.randn(5, 7).to("ltc")
    z = torch.softmax(x.t() @ x + 1.5, -1).view(7, 7, 1)[1:].sum(0)
    lt.sync()
    assert not asked
    assert z.shape == (7, 1)


def test_a_step_with_known_ops_is_only_recorded(backend: Counting) -> None:
    x = torch.randn(8).to("ltc")
    first = known(x)
    lt.sync()
    y = known(x).tanh()  # the only new op
    assert ahead.on is False
    assert not ahead._young
    lt.sync()
    assert backend.runs == 1
    assert torch.equal(y.cpu(), known(x.cpu()).tanh())


def known(x: torch.Tensor) -> torch.Tensor:
    """More ops than may come before the first new one."""
    y = x
    for _ in range(40):
        y = y * 1.5 - x
    return y


def test_an_error_in_the_data_is_raised_at_the_cut(backend: Counting) -> None:
    table, index = torch.randn(3, 2).to("ltc"), torch.tensor([0, 7]).to("ltc")
    good = table + 1
    bad = nn.functional.embedding(index, table)  # recorded as ever
    with pytest.raises(IndexError, match="out of range") as caught:
        lt.sync()
    assert "recorded at" in caught.value.__notes__[0]
    assert torch.equal(good.cpu(), table.cpu() + 1)
    del bad


def test_an_error_of_the_call_is_raised_where_it_is_made(backend: Counting) -> None:
    x = torch.randn(3).to("ltc") + 1
    with pytest.raises(RuntimeError, match="size"):
        x + torch.randn(2).to("ltc")
    assert ahead.on
    with pytest.raises(RuntimeError, match="cast"):
        x.add_(torch.randn(3, dtype=torch.complex64).to("ltc"))


def test_results_have_memory_of_their_own(backend: Counting) -> None:
    x = torch.randn(4, 4).to("ltc")
    one, two, part = x + 1, x + 1, (x * 2)[1:]  # the first two are one value
    same = torch.empty_like(x).copy_(x)
    lt.sync()
    one.zero_()
    same.fill_(3)
    part.mul_(0)
    lt.sync()
    assert two.cpu().equal(x.cpu() + 1)
    assert not x.cpu().eq(3).any()


def test_what_nobody_can_see_is_dropped(backend: Counting) -> None:
    x = torch.randn(1 << 19).to("ltc")  # 2 MB
    for i in range(60):
        y = x * float(i)
        y = y + y
    ahead._hand_over()
    held = sum(t.nbytes for t in (*ahead._young.values(), *ahead._old.values()))
    assert held <= 3 * ahead.YOUNG_BYTES < 60 * 2 * x.nbytes
    lt.sync()
    assert torch.equal(y.cpu(), 2 * (x.cpu() * 59.0))
    gc.collect()
    assert not ahead._young
    assert not ahead._old


def test_data_goes_with_the_last_tensor_that_sees_it(backend: Counting) -> None:
    if not recorder.in_use():
        pytest.skip("only the compiled recorder knows at once")
    big, small = torch.randn(1 << 13).to("ltc"), torch.ones(3).to("ltc")  # 32 kB
    small = small.neg()  # by the Python kernel, which asks whether to run ahead
    small = small.abs()
    one, two = big.cos(), big.cos()  # one value
    view = (big + 1).view(2, -1)[1:]  # sees all of its base's memory
    del one
    last = two.sin()
    written = big.clone()
    written.mul_(3)
    again = small + 1
    ahead._hand_over()
    assert ops(ahead._young) == ["abs", "add", "add", "cos", "mul", "neg", "sin", "slice", "view"]
    del two, view
    again = small + 2
    assert ops(ahead._young) == ["abs", "add", "mul", "neg", "sin"], "what is seen, and what is small"
    lt.sync()
    assert backend.runs == 0
    del last, written, again


def ops(made: dict[Any, torch.Tensor]) -> list[str]:
    """The names of the ops that made these values."""
    return sorted(value.node.op.name.partition("::")[2].partition(".")[0] for value in made)


def test_what_was_dropped_is_made_again_where_it_is_recorded_again(backend: Counting) -> None:
    x = torch.randn(1 << 13)

    def mask(x: torch.Tensor) -> torch.Tensor:
        return x.sin()

    def program(x: torch.Tensor) -> torch.Tensor:
        total = x
        for i in range(4):
            total = total + mask(x) * float(i)  # the mask is one value, whose data is dropped each time
        return total

    y = program(x.to("ltc"))
    assert ahead.on
    lt.sync()
    assert backend.runs == 0
    assert torch.equal(y.cpu(), program(x))


def test_views_of_views_are_made_again_when_their_data_has_been_dropped(
    backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ahead, "YOUNG_BYTES", 0)  # what nobody is known to see is dropped at once

    def program(device: str) -> torch.Tensor:
        x = torch.arange(24.0).reshape(2, 3, 4).to(device).requires_grad_()
        y = x.sin().transpose(0, 1).reshape(3, 8)[1:].t()  # views of a value, saved for backward
        z = (y @ y.t()).view(8, 2, 4).transpose(1, 2)[:, 1:]
        (z * z).sum().backward()
        assert x.grad is not None
        return x.grad

    grad = program("ltc")
    assert ahead.on
    lt.sync()
    assert backend.runs == 0 and backend.compiled == 0
    assert torch.equal(grad.cpu(), program("cpu"))


def test_a_step_compiled_before_is_not_run_ahead(backend: Counting, tmp_path: Path) -> None:
    def keep(key: str, about: dict[str, Any]) -> None:
        folder = tmp_path / key
        folder.mkdir()
        (folder / "file").write_text("compiled")
        diskcache.store(key, folder, about)

    assert not diskcache.compiled_before("elsewhere.py")
    keep("0" * 40, {"file": __file__, "cut": cut.cuts_made() + 1})
    assert not diskcache.compiled_before("elsewhere.py")
    ran = []
    for i in range(3):
        y = torch.randn(3 + i).to("ltc") * 2
        ran.append(ahead.on)
        lt.sync()
    assert ran == [True, False, True], "the second cut had been compiled, and only that"
    assert backend.runs == 1
    keep("1" * 40, {"file": "other.py"})  # by an earlier version, which did not say when
    assert diskcache.compiled_before("other.py") and diskcache.compiled_before("other.py", 7)
    del y


def test_it_can_be_switched_off(backend: Counting) -> None:
    with lt.settings.scope(run_ahead=False):
        y = torch.randn(3).to("ltc") * 2
        lt.sync()
    assert backend.runs == 1
    del y


def test_ops_that_are_forced_to_fall_back_do(backend: Counting) -> None:
    x = torch.randn(3).to("ltc")
    y = x * 2
    record.force_fallback(["aten::sub"])
    try:
        z = y - x
    finally:
        record.force_fallback([])
    assert z.is_ltc
    assert backend.runs == 1, "to fall back is to cut, and what is pending is not run ahead then"
    assert torch.equal(z.cpu(), x.cpu() * 2 - x.cpu())


def test_the_default_backend_counts_it_as_the_first_run(tmp_path: Path) -> None:
    with lt.settings.scope(cache_dir=str(tmp_path)):
        lt.set_backend("auto")
        try:
            lt.clear_cache()
            y = torch.randn(3, 3).to("ltc").sin().cos()
            lt.sync()
            assert not lt.current_backend().graphs, "it may never come again"  # type: ignore[attr-defined]
            next(iter(cut.computations.values())).build()
            tiered = lt.current_backend().graphs[-1]  # type: ignore[attr-defined]
            assert tiered.runs == 1
            assert tiered._first is None, "the first tier has compiled nothing"
            assert lt.current_backend().metrics()["compiling"] == 0
            del y
        finally:
            lt.set_backend("reference")


@pytest.fixture
def compiled() -> Iterator[None]:
    """The compiled recorder in use, whether or not an earlier test of this process started a second thread."""
    if recorder.module is None:
        pytest.skip("the compiled recorder has not been built, or LAZYTENSOR_COMPILED_RECORDER=0")
    before = recorder.module.enable(True)
    yield
    recorder.module.enable(before)


def refine(device: str, turns: int) -> list[float]:
    """Turns of a loop that read a value each, with views and writes; new in the first only."""
    x, weight = torch.linspace(-1, 1, 12).reshape(3, 4).to(device), torch.linspace(-2, 1, 16).reshape(4, 4).to(device)
    read = []
    for _ in range(turns):
        y = torch.tanh(x @ weight.t())
        y[:, 1:] += y.chunk(2, 1)[0].sum()
        y.mul_(0.5)
        torch._foreach_add_([y, weight], 0.01)
        read.append(y.abs().mean().item())
        x = y if read[-1] > 0.1 else y * 2
    return [*read, *x.flatten().tolist()]


@pytest.mark.usefixtures("compiled")
def test_the_first_step_of_a_program_that_reads_needs_no_graphs(backend: Counting) -> None:
    assert refine("ltc", 6) == refine("cpu", 6)
    assert cut.hits >= 3 and backend.runs == backend.compiled == 0
    lt.sync()  # nothing is pending: the first step is not over
    assert refine("ltc", 2) == refine("cpu", 2) and backend.compiled == 0
    kept = torch.ones(2, device="ltc") + 1
    lt.sync()
    for _ in range(2):
        assert refine("ltc", 6) == refine("cpu", 6)
    assert backend.compiled > 0 and kept.tolist() == [2, 2]


@pytest.mark.usefixtures("compiled")
def test_a_first_step_without_an_end_has_graphs_after_some_cuts(backend: Counting) -> None:
    for _ in range(4):
        assert refine("ltc", ahead._FIRST_CUTS // 2) == refine("cpu", ahead._FIRST_CUTS // 2)
    assert 0 < backend.compiled < 12 and backend.runs > ahead._FIRST_CUTS // 2


def test_what_is_added_to_the_same_value_in_other_memory_is_looked_into_when_it_comes_again(
    backend: Counting, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    infer = shapes.infer_mutation
    monkeypatch.setattr(shapes, "infer_mutation", lambda m, *rest: asked.append(m.name) or infer(m, *rest))
    for turn in range(3):
        x = torch.ones(3).to("ltc")
        first, second = x * 3, x * 3  # one value in two places
        first.add_(second)
        assert len(asked) == (turn > 0)
        shared = x * 3
        shared.add_(shared)
        assert first.tolist() == shared.tolist() == [6, 6, 6] and second.tolist() == [3, 3, 3]
        lt.sync()
        asked[1:] = []


@pytest.mark.usefixtures("compiled")
def test_numbers_of_calls_that_run_in_a_first_step_are_those_of_this_call(backend: Counting) -> None:
    """What is written through a view is made again by Python, with numbers that compiled code has lifted."""

    def turns(device: str) -> list[float]:
        x, read = torch.arange(12.0).reshape(3, 4).to(device), []
        for turn in range(5):
            y = (x * (1 + turn)).add(0.25 * turn, alpha=2)
            y[1:, 1:] *= 0.5 + turn
            y[0] += 3
            z = (y - turn) / (turn + 1)
            read.append(z.clamp(-1 - turn, 100 + turn).sum().item())
        return [*read, *z.flatten().tolist()]

    assert turns("ltc") == turns("cpu")
    assert backend.compiled == 0
