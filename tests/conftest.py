"""Shared by every test: this folder is on the path (``import support``), and no test sees what another left pending.

Tests compare with eager bit by bit, so they run on the backend that defines what a graph means, not on the default one.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

os.environ.setdefault("LAZYTENSOR_BACKEND", "reference")


def pytest_configure(config: pytest.Config) -> None:
    """Build the compiled recorder before any process imports lazytensor, so that the tests run on it.

    What differs between it and the Python kernels is in tests/recorder.
    """
    if not hasattr(config, "workerinput") and os.environ.get("LAZYTENSOR_COMPILED_RECORDER") != "0":
        command = "from lazytensor.native import build; build.build()"
        subprocess.run([sys.executable, "-c", command], check=False)


@pytest.fixture(autouse=True)
def nothing_pending() -> None:
    """Start each test with nothing pending, so that a failure belongs to the test that shows it."""
    import lazytensor as lt

    try:
        lt.sync()
    except Exception:  # a failure another test left behind; it is raised once
        lt.sync()
