"""Every test here starts as a script for torch._lazy does, and leaves PyTorch and the backend as they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import lazytensor as lt
import lazytensor.compat as lazy
from lazytensor.compat import device_names


@pytest.fixture(autouse=True)
def ts_backend() -> Iterator[None]:
    lt.sync()
    lazy.ts_backend.init()
    lazy.metrics.reset()
    yield
    lazy.config.set_force_fallback("")
    device_names.uninstall()
    lt.set_backend("reference")
    lt.sync()
