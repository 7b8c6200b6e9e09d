"""lazytensor: a Lazy Tensor Core for PyTorch, in Python.  Importing it registers the device ``ltc``."""

from __future__ import annotations

from lazytensor import errors, settings
from lazytensor._version import __version__
from lazytensor.device.registration import register as _register

_register()

from lazytensor.api import *  # noqa: E402, F403  (the API needs the device)
from lazytensor.api import __all__ as _api  # noqa: E402

__all__ = ["__version__", "errors", "settings", *_api]
