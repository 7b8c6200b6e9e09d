"""The functions that make tensors and take a device (``torch._lazy.tensor_factory_functions``)."""

from __future__ import annotations

import torch

from lazytensor.compat.device_names import _FACTORIES

tensor_factory_functions = tuple(getattr(torch, name) for name in _FACTORIES)
