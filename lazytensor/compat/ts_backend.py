"""Choosing the TorchScript backend (``torch._lazy.ts_backend``)."""

from __future__ import annotations

from lazytensor.backend import registry
from lazytensor.compat import device_names


def init() -> None:
    """Bring the backend ``ts`` into force, and let the device name ``lazy`` mean ``ltc``.  May be called again."""
    registry.set_backend("ts")
    device_names.install()
