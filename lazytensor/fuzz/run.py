"""Runs a program on a device and notes everything that it can see there.

Noted are: of each line, the error it raised; at the end, of each live tensor its value bit by bit, shape, stride,
offset, dtype, ``requires_grad``, version and gradient; and every value that was read on the way.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch


def namespace(device: str, second: str, sync: Callable[[], None]) -> dict[str, Any]:
    """The names that a program starts with."""
    return {"torch": torch, "D": torch.device(device), "E": torch.device(second), "sync": sync}


class Seen:
    """What one run of a program showed."""

    def __init__(self) -> None:
        self.errors: dict[int, str] = {}  # line number -> error
        self.tensors: dict[str, dict[str, Any]] = {}
        self.values: dict[str, Any] = {}


def run(lines: list[str], seed: int, device: str, second: str, sync: Callable[[], None]) -> Seen:
    """Run a program and look."""
    scope = namespace(device, second, sync)
    seen = Seen()
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, line in enumerate(lines):
            try:
                exec(line, scope)
            except Exception as error:
                seen.errors[number] = f"{type(error).__name__}: {_plain(str(error))}"
        for name, value in list(scope.items()):
            if isinstance(value, torch.Tensor) and name[0] in "tu" and name[1:].isdigit():
                seen.tensors[name] = look(value)
            elif name[0] == "r" and "_" in name:
                seen.values[name] = _plain(value) if isinstance(value, str) else value
    return seen


def _plain(text: str) -> str:
    """A text without what a device other than the CPU says otherwise, CUDA too: its name, and how a setitem is done."""
    if "Exception raised from" in text:
        text = text.split("\n")[0]
    text = " ".join(text.split())  # where a line is broken depends on the name's length
    for word in ("ltc:0", "ltc:1", "ltc", "cpu"):
        text = text.replace(f", device='{word}'", "").replace(word, "device")
    # Tensor.type() has the device in it, and `t[...] = number` fills on the CPU and copies on a device of one's own.
    text = re.sub(r"\[(?:torch\.\w*Tensor|\w+Type)(?= \[)", "[Tensor", text)
    return re.sub(r"\b(?:Fill|Copy)(?:Backward\d*|Backwards)\b", "Write", text)


def look(tensor: torch.Tensor) -> dict[str, Any]:
    """Everything that can be seen of a tensor.  A fact that raises is the error it raises."""
    facts: dict[str, Callable[[], Any]] = {
        "shape": lambda: tuple(tensor.shape),
        "stride": lambda: tensor.stride(),
        "offset": lambda: tensor.storage_offset(),
        "dtype": lambda: tensor.dtype,
        "requires_grad": lambda: tensor.requires_grad,
        "is_leaf": lambda: tensor.is_leaf,
        "version": lambda: None if tensor.is_inference() else tensor._version,
        "value": lambda: tensor.detach().cpu(),
        "grad": lambda: tensor.grad.detach().cpu() if tensor.is_leaf and tensor.grad is not None else None,
    }
    found = {}
    for name, fact in facts.items():
        try:
            found[name] = fact()
        except Exception as error:
            found[name] = f"{type(error).__name__}: {_plain(str(error))}"
    return found
