"""Registers ``ltc`` with PyTorch: the name, the device module, and a kernel for every op."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch.utils.backend_registration import (
    _setup_privateuseone_for_python_backend,
    generate_methods_for_privateuse1_backend,
)

from lazytensor import errors
from lazytensor.codegen import device as generated
from lazytensor.device.module import DeviceModule
from lazytensor.trace.tensors import DEVICE


class _Guard(torch._C._acc.DeviceGuard):  # type: ignore[misc,name-defined]
    """Tells PyTorch which device a guard is for, which the autograd engine asks a thousand times in a step.

    So the answer comes from a function without a Python frame.
    """

    type_ = staticmethod(itertools.repeat(torch._C._autograd.DeviceType.PrivateUse1).__next__)  # type: ignore


library: Any = None
generated_kernels: dict[str, Any] = {}  # the generated ones by op


def register() -> None:
    """Make ``ltc`` a device of this process; a second call does nothing."""
    global library
    if library is not None:
        return
    owner = torch._C._get_privateuse1_backend_name()
    if owner not in ("privateuseone", DEVICE) or (owner == DEVICE and hasattr(torch, DEVICE)):
        raise errors.DeviceInUse(owner)
    from lazytensor.device import patches

    patches.begin_the_engine_without_threads()
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=DeviceModule(), device_guard=_Guard())
    generate_methods_for_privateuse1_backend(
        for_tensor=False, for_module=False, for_storage=True, for_packed_sequence=False
    )
    from lazytensor.device import recorder, serialization, sparse, threads
    from lazytensor.device.composites import ANSWERS, COMPOSITES
    from lazytensor.device.kernels import KERNELS

    library = torch.library.Library("aten", "IMPL")
    module = generated.load()
    generated_kernels.update(module.kernels)
    tables = {
        "PrivateUse1": {**generated_kernels, **KERNELS, **ANSWERS},
        "AutogradPrivateUse1": COMPOSITES,
    }
    for key, kernels in tables.items():
        for name, kernel in kernels.items():
            library.m.impl("aten::" + name, key, kernel, False)
    recorder.install(module)
    threads.watch(library, generated_kernels, {**KERNELS, **ANSWERS})
    sparse.register(library)
    serialization.register()
    patches.apply()
