"""One object per device string for the whole process (``torch._lazy.device_context``)."""

from __future__ import annotations

import threading

from lazytensor.backend import registry

_lock = threading.Lock()
_contexts: dict[str, DeviceContext] = {}


class DeviceContext:
    """A place to keep things by device."""

    def __init__(self, device: str) -> None:
        self.device = device


def get_device_context(device: str | None = None) -> DeviceContext:
    """The context of a device string; without one, of the hardware behind the default device."""
    name = str(registry.current().devices()[0].type.upper()) if device is None else device
    with _lock:
        if name not in _contexts:
            _contexts[name] = DeviceContext(name)
        return _contexts[name]
