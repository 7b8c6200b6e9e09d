"""Shared by the tests of functions that are recorded as a whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from lazytensor.device import recorder
from lazytensor.execute import cut
from lazytensor.functions import watch, whole


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The compiled recorder in use, and no function of another test looked at."""
    before = recorder.module.enable(True)
    kept = list(whole.wholes)
    monkeypatch.setattr(cut, "look_at", 0)
    monkeypatch.setattr(cut, "missed", lambda: None)
    watch.end()
    try:
        yield
    finally:
        watch.end()
        for each in whole.wholes[len(kept) :]:
            each.refuse("the test is over")
        whole.wholes[:] = kept
        recorder.module.enable(before)
