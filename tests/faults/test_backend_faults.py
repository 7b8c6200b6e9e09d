"""A backend that fails at any point of a training loop: nothing is lost, and there is one clear error."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import contract
from lazytensor.backend.graph import Graph
from lazytensor.backend.reference import Program
from lazytensor.execute import cut


class Faulty(lt.Backend):
    """Fails at the k-th compilation or execution, counted over all graphs."""

    phase = "compile"
    fail_at = -1
    error: BaseException = OSError("the device is gone")
    count = 0

    def _step(self, phase: str) -> None:
        if phase == self.phase:
            Faulty.count += 1
            if Faulty.count == self.fail_at:
                raise self.error

    def compile(self, graph: Graph) -> Any:
        self._step("compile")
        program = Program(graph)

        def run(*inputs: Any) -> list[Any]:
            self._step("execute")
            return program(*inputs)

        return run


class Background(Faulty):
    asynchronous = True


@pytest.fixture(autouse=True)
def backends(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    logging.getLogger("lazytensor").setLevel(logging.CRITICAL)
    lt.register_backend("faulty", Faulty)
    lt.register_backend("background", Background)
    monkeypatch.setattr(Faulty, "count", 0)
    yield
    lt.set_backend("reference")
    lt.clear_cache()
    logging.getLogger("lazytensor").setLevel(logging.NOTSET)


def train(steps: int = 3) -> tuple[list[float], list[Any], list[Exception]]:
    """A loop that goes on after an error by asking again."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 1)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    x = torch.randn(5, 3).to("ltc")
    losses, raised = [], []

    def again(what: Any) -> Any:
        while True:
            try:
                return what()
            except (lt.errors.BackendFailed, MemoryError, RuntimeError) as error:
                raised.append(error)
                assert len(raised) < 5

    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        again(lt.sync)
        losses.append(again(loss.item))
    return losses, again(lambda: [p.tolist() for p in model.parameters()]), raised


FAULTS = [
    OSError("the device is gone"),
    MemoryError("no room"),
    RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"),
]


@pytest.mark.parametrize("error", FAULTS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("phase", ["compile", "execute"])
def test_a_failure_at_any_point_is_one_error_and_the_loop_goes_on(
    phase: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = train()[:2]
    monkeypatch.setattr(Faulty, "phase", phase)
    monkeypatch.setattr(Faulty, "error", error)
    lt.set_backend("faulty")
    assert train()[:2] == right
    total = Faulty.count
    assert total >= 2
    for k in range(1, total + 1):
        lt.clear_cache()
        monkeypatch.setattr(Faulty, "count", 0)
        monkeypatch.setattr(Faulty, "fail_at", k)
        losses, weights, raised = train()
        assert (losses, weights) == right, f"{phase} {k}"
        (one,) = raised
        assert isinstance(one, lt.errors.BackendFailed) and str(error) in str(one) and one.phase == phase


@pytest.mark.parametrize("phase", ["compile", "execute"])
def test_the_setting_lets_the_loop_go_on_without_an_error(phase: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = train()[:2]
    monkeypatch.setattr(Faulty, "phase", phase)
    lt.set_backend("faulty")
    for k in (1, 2):
        lt.clear_cache()
        monkeypatch.setattr(Faulty, "count", 0)
        monkeypatch.setattr(Faulty, "fail_at", k)
        with lt.settings.scope(on_backend_failure="reference"):
            assert train() == (*right, [])


@pytest.mark.parametrize("k", [1, 2, 3])
def test_a_failure_in_the_background_is_done_by_the_interpreter(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    right = train()[:2]
    monkeypatch.setattr(Faulty, "phase", "execute")
    monkeypatch.setattr(Faulty, "fail_at", k)
    lt.set_backend("background")
    assert train() == (*right, [])


def test_what_even_the_interpreter_cannot_run_in_the_background_fails_as_a_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that runs cuts died of such an error, and the next cut waited for ever."""
    p = torch.zeros(3, device="ltc")
    lt.sync(wait=True)
    lt.set_backend("background")
    whole = Program.__call__
    broken = [True]

    def call(self: Program, *inputs: Any) -> list[Any]:
        if broken[0]:
            raise MemoryError("no room")
        return whole(self, *inputs)

    monkeypatch.setattr(Program, "__call__", call)
    p.add_(1)
    q = p * 2
    lt.sync()
    with pytest.raises(MemoryError, match="no room"):
        lt.wait()
    broken[0] = False
    assert p.tolist() == [0, 0, 0]
    with pytest.raises(lt.errors.ValueLost):
        q.tolist()
    p.add_(1)
    lt.sync()
    assert p.tolist() == [1, 1, 1]


def test_out_of_memory_in_the_interpreter_leaves_everything_pending() -> None:
    counter = torch.zeros(3, device="ltc")
    lt.sync()
    with lt.settings.scope(max_pending_bytes=1 << 60):
        counter.add_(1)
        large = torch.ones(1, device="ltc").expand(1 << 50).contiguous()
        with pytest.raises(RuntimeError, match="allocate memory") as raised:
            counter.tolist()
    assert any("free memory and sync again" in note for note in raised.value.__notes__)
    del raised  # a traceback holds what its frames hold
    gc.collect()
    assert len(cut.pending()) == 2
    del large
    assert counter.tolist() == [1, 1, 1]
    assert cut.pending() == []


@pytest.mark.parametrize("backend", ["reference", "ts"])
def test_a_tensor_too_large_for_the_machine_does_not_stop_the_rest(backend: str) -> None:
    lt.set_backend(backend)
    small = torch.ones(3, device="ltc") * 2
    with lt.settings.scope(max_pending_bytes=1 << 60):
        large = torch.ones(1, device="ltc").expand(1 << 50).contiguous()
        with pytest.raises(RuntimeError, match="allocate memory"):
            lt.sync(wait=True)
        if backend == "reference":  # the other runs in the background, where the interpreter has tried already
            with pytest.raises(RuntimeError, match="allocate memory"):
                lt.sync(wait=True)
    assert small.tolist() == [2, 2, 2]
    with pytest.raises(lt.errors.ValueLost):
        large.tolist()


def test_what_out_of_memory_looks_like() -> None:
    with pytest.raises(RuntimeError) as raised:
        torch.ones(1).expand(1 << 50).contiguous()
    assert contract.out_of_memory(raised.value)
    assert contract.out_of_memory(MemoryError())
    assert not contract.out_of_memory(RuntimeError("index out of range"))
