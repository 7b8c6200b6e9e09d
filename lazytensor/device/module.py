"""``torch.ltc``: the device module, with the functions that people call on ``torch.cuda``."""

from __future__ import annotations

import os
import threading
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from lazytensor import errors, settings
from lazytensor.device import memory
from lazytensor.trace.tensors import DEVICE

_local = threading.local()


class _CurrentDevice(TorchFunctionMode):
    """While the current device is not ``ltc:0``: gives each ``ltc`` without a number the current number.

    PyTorch resolves a missing number in C++, by a device guard that a Python device cannot give it, and always to 0.
    """

    index = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = [self._numbered(a) for a in args]
        return func(*args, **{k: self._numbered(a) for k, a in (kwargs or {}).items()})

    def _numbered(self, argument: Any) -> Any:
        if argument.__class__ is torch.device and argument.type == DEVICE and argument.index is None:
            return torch.device(DEVICE, self.index)
        return f"{DEVICE}:{self.index}" if argument.__class__ is str and argument == DEVICE else argument


class Properties(NamedTuple):
    """What ``torch.ltc.get_device_properties()`` tells."""

    name: str
    total_memory: int
    multi_processor_count: int


def _index(device: Any) -> int:
    """The number of a device given as a number, a name, a ``torch.device`` or None for the current one."""
    if device is None:
        return DeviceModule.current_device()
    if not isinstance(device, int):
        device = torch.device(device)
        if device.type != DEVICE:
            raise ValueError(f"Expected a {DEVICE} device, but got: {device}")
        return DeviceModule.current_device() if device.index is None else int(device.index)
    if device >= settings.devices:
        raise errors.NoSuchDevice(device, settings.devices)
    return device


class device:
    """``with torch.ltc.device(1):`` — the device that ``ltc`` without a number means in the block."""

    def __init__(self, device: Any) -> None:
        self.index = -1 if device is None else _index(device)

    def __enter__(self) -> None:
        self.before = DeviceModule.current_device()
        DeviceModule.set_device(self.index)

    def __exit__(self, *exc: object) -> None:
        DeviceModule.set_device(self.before)


class device_of(device):
    """``with torch.ltc.device_of(tensor):`` — the same for the device of a tensor; nothing if it is of another kind."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == DEVICE else None)


class DeviceModule:
    """What ``torch.ltc`` and ``torch.get_device_module("ltc")`` are."""

    device = device
    device_of = device_of

    # --- devices ------------------------------------------------------------------------------------------------------

    @staticmethod
    def is_available() -> bool:
        """Always: it is made of Python."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """Nothing has to be initialised."""
        return True

    @staticmethod
    def init() -> None:
        """Nothing has to be initialised."""

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def device_count() -> int:
        """How many virtual devices there are (a setting)."""
        return int(settings.devices)

    @staticmethod
    def current_device() -> int:
        """The device number that ``ltc`` without a number means in this thread."""
        return int(getattr(_local, "index", 0))

    @staticmethod
    def set_device(device: Any) -> None:
        """Choose the number that ``ltc`` without a number means in this thread; a negative one changes nothing."""
        index = _index(device)
        if index < 0:
            return
        if index >= settings.devices:
            raise errors.NoSuchDevice(index, settings.devices)
        _local.index = index
        mode = getattr(_local, "mode", None)
        if mode is None and index:
            mode = _local.mode = _CurrentDevice()
            mode.__enter__()  # type: ignore[no-untyped-call]
        if mode is not None:
            mode.index = index
            if index == 0 and torch.overrides._get_current_function_mode() is mode:
                mode.__exit__(None, None, None)
                _local.mode = None

    @staticmethod
    def get_device_name(device: Any = None) -> str:
        """What runs the graphs."""
        return f"lazytensor {settings.backend} ({DEVICE}:{_index(device)})"

    @staticmethod
    def get_device_capability(device: Any = None) -> dict[str, Any]:
        """The dtypes that a tensor may have: all of PyTorch's."""
        return {"supported_dtypes": memory.dtypes()}

    @staticmethod
    def get_device_properties(device: Any = None) -> Properties:
        """Name, bytes of memory and processors."""
        return Properties(
            DeviceModule.get_device_name(device), DeviceModule.mem_get_info(device)[1], os.cpu_count() or 1
        )

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Run what is pending and wait for it."""
        from lazytensor import api

        api.sync(wait=True)

    # --- memory -------------------------------------------------------------------------------------------------------

    @staticmethod
    def memory_allocated(device: Any = None) -> int:
        """The bytes of the data that tensors hold now.  What is pending holds none yet."""
        return memory.allocated(_index(device))

    @staticmethod
    def max_memory_allocated(device: Any = None) -> int:
        """The most bytes known to have been held at once since the peak was reset (see
        :mod:`lazytensor.device.memory`).
        """
        return memory.peak(_index(device))

    memory_reserved = memory_allocated  # nothing is kept in reserve
    max_memory_reserved = max_memory_allocated

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        """Begin a new peak."""
        memory.reset_peak(_index(device))

    @staticmethod
    def memory_stats(device: Any = None) -> dict[str, int]:
        """The figures under the names that ``torch.cuda`` gives them."""
        now, most = memory.allocated(_index(device)), memory.peak(_index(device))
        figures = {}
        for kind in ("allocated_bytes", "reserved_bytes"):
            figures[f"{kind}.all.current"] = now
            figures[f"{kind}.all.peak"] = most
        return figures

    @staticmethod
    def mem_get_info(device: Any = None) -> tuple[int, int]:
        """Free and total bytes of the memory that the data is in: the host's."""
        return memory.host()

    @staticmethod
    def empty_cache() -> None:
        """Give the system back the memory that compiled steps keep for the next ones."""
        from lazytensor.backend import heap

        heap.empty()

    # --- random numbers: drawn on the host, by the CPU's generator ----------------------------------------------------

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Seed the generator that random ops draw from, which is the CPU's."""
        torch.default_generator.manual_seed(int(seed))

    manual_seed_all = manual_seed

    @staticmethod
    def seed() -> None:
        """Seed it by chance."""
        torch.default_generator.seed()

    seed_all = seed

    @staticmethod
    def initial_seed() -> int:
        """The seed it was given."""
        return torch.initial_seed()

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """The state of the generator that random ops draw from."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(new_state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the generator that random ops draw from."""
        torch.set_rng_state(new_state)

    @staticmethod
    def get_rng_state_all() -> list[torch.Tensor]:
        """The same for every device."""
        return [torch.get_rng_state() for _ in range(DeviceModule.device_count())]

    @staticmethod
    def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
        """The same for every device: they share one generator."""
        for state in new_states:
            torch.set_rng_state(state)

    # --- mixed precision ----------------------------------------------------------------------------------------------

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """What ``torch.autocast("ltc")`` may use.  ``torch.autocast`` asks before its first use: the casts are
        registered then.
        """
        from lazytensor.device import autocast

        autocast.install()
        return [torch.bfloat16, torch.float16]

    @staticmethod
    def is_bf16_supported(including_emulation: bool = True) -> bool:
        """Always."""
        return True
