"""Backends: the interface, the graph handed to it, the registry, and the backends that come with lazytensor.

The package can be called: ``with lt.backend("ts"):`` brings a backend into force for a block.
"""

from __future__ import annotations

import sys
import types
from contextlib import AbstractContextManager
from typing import Any


class _Package(types.ModuleType):
    """The package itself, which can be called."""

    def __call__(self, backend: Any, **options: Any) -> AbstractContextManager[Any]:
        """Another backend for a block."""
        from lazytensor.backend.registry import scope

        return scope(backend, **options)


sys.modules[__name__].__class__ = _Package
