"""A graph that takes the compiler too long is given up, by processor time: a busy machine ends nothing."""

from __future__ import annotations

import time

import pytest

from lazytensor.backend.inductor import worker


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.Limit, "TICK", 0.05)


def test_a_job_that_computes_too_long_is_ended() -> None:
    started = time.monotonic()
    with pytest.raises(worker._Late), worker.Limit(0.3):
        while time.monotonic() - started < 30:
            pass
    assert time.monotonic() - started < 30


def test_a_job_that_waits_for_the_processor_is_not() -> None:
    with worker.Limit(0.3):
        time.sleep(1)


def test_a_job_that_hangs_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.Limit, "HANGS", 2)
    with pytest.raises(worker._Late), worker.Limit(0.3):
        time.sleep(30)
