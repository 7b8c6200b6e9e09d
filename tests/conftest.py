"""Shared by every test: this folder is on the path (``import support``), and no test sees what another left pending.

Tests compare with eager bit by bit, so they run on the backend that defines what a graph means, not on the default one.
"""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("LAZYTENSOR_BACKEND", "reference")

import lazytensor as lt


@pytest.fixture(autouse=True)
def nothing_pending() -> None:
    """Start each test with nothing pending, so that a failure belongs to the test that shows it."""
    try:
        lt.sync()
    except Exception:  # a failure another test left behind; it is raised once
        lt.sync()
