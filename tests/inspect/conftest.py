"""Shared by the tests of diagnostics: each starts with empty ledgers and caches."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

import lazytensor as lt
from lazytensor.execute import cut
from lazytensor.inspect import blame, events, observers


@pytest.fixture(autouse=True)
def empty_ledgers(nothing_pending: None) -> Iterator[None]:
    gc.collect()
    lt.sync()
    cut.clear()
    events.reset()
    blame.reset()
    observers.reset()
    lt.metrics.reset()
    yield
