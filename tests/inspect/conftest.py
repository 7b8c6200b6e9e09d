"""Shared by the tests of diagnostics: each starts with empty ledgers and caches."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import lazytensor as lt
from lazytensor.execute import cut
from lazytensor.inspect import blame, events, observers


@pytest.fixture(autouse=True)
def empty_ledgers(nothing_pending: None) -> None:
    gc.collect()
    lt.sync()
    cut.clear()
    events.reset()
    blame.reset()
    observers.reset()
    lt.metrics.reset()


@pytest.fixture(autouse=True)
def no_diagnosis_failed(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A mistake in a diagnosis is only logged in users' programs; here it is a failure."""
    yield
    failed = [r for when in ("setup", "call") for r in caplog.get_records(when) if r.name == "lazytensor.diagnostics"]
    assert [r for r in failed if r.exc_info] == []
