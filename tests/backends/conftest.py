"""Every test here starts and ends on the reference backend, and leaves no backend of its own behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lazytensor as lt
from lazytensor.backend import registry

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(Path(__file__).parent)]


@pytest.fixture(autouse=True)
def reference_backend() -> Iterator[None]:
    lt.sync()
    lt.set_backend("reference")
    known = dict(registry._registered)
    yield
    lt.set_backend("reference")
    lt.sync()
    registry._registered.clear()
    registry._registered.update(known)
    for key in [k for k in registry._instances if k[0] not in known and k[0] not in registry._BUILT_IN]:
        del registry._instances[key]
