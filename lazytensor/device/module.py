"""``torch.ltc``: the device module, with the functions that people call on ``torch.cuda``."""

from __future__ import annotations

import threading
from typing import Any

import torch

from lazytensor import errors, settings

_local = threading.local()


class DeviceModule:
    """What ``torch.ltc`` and ``torch.get_device_module("ltc")`` are."""

    @staticmethod
    def is_available() -> bool:
        """Always: it is made of Python."""
        return True

    @staticmethod
    def is_initialized() -> bool:
        """Nothing has to be initialised."""
        return True

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
        """Choose the device number that ``ltc`` without a number means in this thread."""
        index = device if isinstance(device, int) else torch.device(device).index or 0
        if index >= settings.devices:
            raise errors.NoSuchDevice(index, settings.devices)
        _local.index = index

    @staticmethod
    def synchronize(device: Any = None) -> None:
        """Run what is pending and wait for it."""
        from lazytensor.execute.cut import cut

        cut("synchronize")

    @staticmethod
    def manual_seed(seed: int) -> None:
        """Random ops draw from the CPU's generator, which ``torch.manual_seed`` seeds too."""

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """The same, for every device."""

    @staticmethod
    def get_rng_state(device: Any = None) -> torch.Tensor:
        """The state of the generator that random ops draw from."""
        return torch.get_rng_state()

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """Set the state of the generator that random ops draw from."""
        torch.set_rng_state(state)

    @staticmethod
    def get_amp_supported_dtype() -> list[torch.dtype]:
        """What ``torch.autocast("ltc")`` may use."""
        return [torch.bfloat16, torch.float16]
