"""``torch.Generator(device="ltc")``: a generator of the host that says it belongs to ltc.

Random ops on ltc draw on the CPU when they are recorded (policy ``host``), so their generator is a CPU generator: the
same seed gives the same numbers as a CPU generator in CPU eager.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.device.runtime import this_device
from lazytensor.trace.tensors import DEVICE

_Host: Any = torch._C.Generator


class _Type(type(_Host)):  # type: ignore[misc]
    """Lets ``isinstance(g, torch.Generator)`` hold for the generators that PyTorch made itself."""

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _Host)


class Generator(_Host, metaclass=_Type):  # type: ignore[misc]
    """``torch.Generator``, which ltc is known to."""

    __doc__ = _Host.__doc__
    _home: torch.device | None = None

    def __new__(cls, device: Any = "cpu") -> Any:
        """A generator for this device."""
        wanted = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        if wanted.type != DEVICE:
            return _Host(device=wanted)
        made = _Host.__new__(cls, device="cpu")
        made._home = this_device(wanted)
        return made

    def __init__(self, device: Any = "cpu") -> None:
        pass

    @property
    def device(self) -> torch.device:
        """The device whose numbers it draws."""
        return _Host.device.__get__(self) if self._home is None else self._home  # type: ignore[no-any-return]
