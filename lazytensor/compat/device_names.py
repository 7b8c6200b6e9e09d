"""The device name ``lazy``: where PyTorch takes a device as an argument, it can be made to mean ``ltc``.

``lazy`` is a device type of PyTorch itself, which belongs to its C++ Lazy Tensor Core.  So that a script written for
that runs unchanged, :func:`install` wraps the functions that take a device: the factories, ``Tensor.to``,
``Tensor.new_*`` and ``torch.load``; through them ``nn.Module.to``.  A wrapper looks at its device argument and is
otherwise PyTorch's own function.  It cannot reach ``torch.device("lazy")`` itself: ``t.device`` says ``ltc``, and
``with torch.device("lazy"):`` and ``torch.set_default_device("lazy")`` do not work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._device import _device_constructors

_originals: list[tuple[Any, str, Any]] = []
_FACTORIES = (
    *(
        "arange",
        "bartlett_window",
        "blackman_window",
        "empty",
        "empty_strided",
        "eye",
        "full",
        "hann_window",
        "hamming_window",
    ),
    *(
        "kaiser_window",
        "linspace",
        "logspace",
        "ones",
        "scalar_tensor",
        "rand",
        "randint",
        "randn",
        "randperm",
        "zeros",
    ),
    *("tril_indices", "triu_indices", "tensor", "as_tensor", "zeros_like", "ones_like", "empty_like", "full_like"),
    *("rand_like", "randn_like", "randint_like"),
)
_METHODS = ("to", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "new_empty_strided")


def is_lazy(device: Any) -> bool:
    """Whether a device or its name is lazytensor's, under either name."""
    if isinstance(device, torch.device):
        return device.type in ("lazy", "ltc")
    return isinstance(device, str) and device.partition(":")[0] in ("lazy", "ltc")


def translated(device: Any) -> Any:
    """The device ``ltc`` for the device ``lazy``; anything else as it is."""
    if isinstance(device, str) and device.partition(":")[0] == "lazy":
        return "ltc" + device[4:]
    if isinstance(device, torch.device) and device.type == "lazy":
        return torch.device("ltc", device.index or 0)
    return device


def install() -> None:
    """Let ``lazy`` mean ``ltc`` from now on.  Doing so twice is doing so once."""
    if _originals:
        return
    # `with torch.device(...)` knows factories by identity, in a set that PyTorch fills when first asked: no wrappers.
    _device_constructors()
    for holder, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
        for name in names:
            _wrap(holder, name, _by_device)
    _wrap(torch, "load", _by_map_location)


def uninstall() -> None:
    """Give PyTorch its own functions back."""
    while _originals:
        holder, name, original = _originals.pop()
        setattr(holder, name, original)


def _wrap(holder: Any, name: str, rule: Callable[..., Any]) -> None:
    original = getattr(holder, name)
    _originals.append((holder, name, original))
    setattr(
        holder,
        name,
        functools.wraps(original)(functools.partial(rule, original)) if holder is torch else _method(original),
    )


def _by_device(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if "device" in kwargs:
        kwargs["device"] = translated(kwargs["device"])
    return original(*args, **kwargs)


def _by_map_location(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if len(args) > 1:
        args = (args[0], translated(args[1]), *args[2:])
    if "map_location" in kwargs:
        kwargs["map_location"] = translated(kwargs["map_location"])
    return original(*args, **kwargs)


def _method(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args and original.__name__ == "to":
            args = (translated(args[0]), *args[1:])
        return _by_device(original, self, *args, **kwargs)

    return method
