"""The compiling process may be killed at any time: the program goes on, and the next graph gets another process."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.service import Service
from lazytensor.trace.ir import Value
from lazytensor.trace.storage import value_of

PATIENCE = 60.0  # seconds after which a test says that something hangs


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    with lt.settings.scope(cache_dir=str(tmp_path)):
        made = Service()
        yield made
        made.close()


def a_graph() -> Graph:
    y = (torch.ones(3, device="ltc") * 2).tanh()
    value: Value = value_of(y)
    return Graph([value])


class Answer:
    def __init__(self) -> None:
        self.come = threading.Event()
        self.error: str | None = None

    def __call__(self, error: str | None) -> None:
        self.error = error
        self.come.set()


def test_what_a_killed_process_was_working_on_is_answered(service: Service) -> None:
    graph, answers = a_graph(), [Answer(), Answer()]
    for number, answer in enumerate(answers):
        service.submit(f"key{number}", graph, [2.0], {}, answer)
    process = service._process
    assert process is not None and service.busy == 2
    os.killpg(process.pid, signal.SIGKILL)
    for answer in answers:
        assert answer.come.wait(PATIENCE), "the answer never came"
        assert answer.error is not None and "the compiling process ended (exit code -9)" in answer.error
    assert service.busy == 0
    assert not list((Path(lt.settings.cache_dir) / "graphs").glob("*.graph"))


def test_a_process_that_died_unnoticed_is_replaced_and_its_work_is_answered(service: Service) -> None:
    """A new process was started before the end of the old one was noticed, and the old one's graphs waited for ever."""
    graph, first, second = a_graph(), Answer(), Answer()
    service.submit("first", graph, [2.0], {}, first)
    old = service._process
    assert old is not None
    os.killpg(old.pid, signal.SIGKILL)
    old.wait()
    service.submit("second", graph, [2.0], {}, second)
    assert first.come.wait(PATIENCE) and first.error is not None
    new = service._process
    assert new is not None
    if new is not old:
        os.killpg(new.pid, signal.SIGKILL)
    assert second.come.wait(PATIENCE) and second.error is not None


def test_a_process_that_cannot_be_started(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    answer = Answer()
    service.submit("key", a_graph(), [2.0], {}, answer)
    assert answer.come.is_set() and answer.error is not None and "could not be reached" in answer.error
    assert service.busy == 0


@pytest.mark.parametrize("wait", [True, False])
def test_a_program_whose_compiling_process_is_killed_goes_on(
    wait: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from lazytensor.backend.inductor import tiers

    def step() -> list[float]:
        return (torch.arange(3.0, device="ltc") * 1.5).exp().tolist()  # type: ignore[no-any-return]

    right = step()
    with lt.settings.scope(cache_dir=str(tmp_path)):
        killed = Service()
        submit = killed.submit

        def and_kill(*arguments: object) -> None:
            submit(*arguments)  # type: ignore[arg-type]
            assert killed._process is not None
            os.killpg(killed._process.pid, signal.SIGKILL)

        monkeypatch.setattr(killed, "submit", and_kill)
        monkeypatch.setattr(tiers, "service", killed)
        lt.set_backend("inductor", wait=wait)
        lt.clear_cache()
        try:
            with caplog.at_level(logging.WARNING, "lazytensor"):
                for _ in range(3):
                    assert step() == pytest.approx(right, rel=1e-6)
        finally:
            lt.set_backend("reference")
            killed.close()


def test_a_library_that_an_ended_process_left_in_part_is_made_again(service: Service) -> None:
    graph = a_graph()
    for number in range(2):
        answer = Answer()
        service.submit(f"key{number}", graph, [2.0], {}, answer)
        assert answer.come.wait(2 * PATIENCE) and answer.error is None, answer.error
        made = list((Path(lt.settings.cache_dir) / "inductor").rglob("*.main.so"))
        assert made
        for library in made:  # as a linker leaves them that is ended at once
            library.unlink()
            library.touch()
        service.close()
