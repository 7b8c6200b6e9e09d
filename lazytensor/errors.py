"""Every error a user can meet, one class each: what happened, where, and what to do about it."""

from __future__ import annotations

from typing import Any

import torch


class LazyTensorError(RuntimeError):
    """The base of the errors that lazytensor itself raises.  Errors that eager would raise keep their own type."""


class ValueLost(LazyTensorError):
    """Raised when a tensor is read whose value was to be made by a run that failed."""

    def __init__(self, cause: Any) -> None:
        super().__init__(
            f"this tensor has no value: the operation that should have made it failed earlier ({cause}). "
            "Make the tensor again; tensors that do not depend on the failed operation are unharmed."
        )


class DeviceInUse(LazyTensorError):
    """Raised at import when another package already owns PyTorch's PrivateUse1 device in this process."""

    def __init__(self, owner: str) -> None:
        super().__init__(
            f"PyTorch has room for one out-of-tree device in a process, and {owner!r} already took it. "
            "Import lazytensor in a process that does not load that package."
        )


class NoSuchDevice(LazyTensorError):
    """Raised for a device number that does not exist."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(
            f"there is no device ltc:{index}: the process has {count} (ltc:0 to ltc:{count - 1}). "
            "Raise lazytensor.settings.devices, or LAZYTENSOR_DEVICES, before the first use."
        )


class UnknownBackend(LazyTensorError):
    """Raised when a backend's name is not registered."""

    def __init__(self, name: str, known: list[str]) -> None:
        super().__init__(
            f"there is no backend {name!r}; known are {', '.join(sorted(known))}. See lazytensor.backends()."
        )


class BackendFailed(LazyTensorError):
    """Raised when a backend broke its contract: it raised, or returned something other than the results."""

    def __init__(self, backend: str, phase: str, graph: str, place: str, what: str) -> None:
        self.backend = backend
        self.phase = phase  # "compile", "execute" or "results"
        super().__init__(
            f"the backend {backend!r} failed ({phase}) on {graph}, {place}: {what}. "
            "Nothing is lost: what was pending is still pending. Choose another backend "
            "(lazytensor.set_backend('reference')) and sync again, or let that happen by itself "
            "(lazytensor.settings.on_backend_failure = 'reference')."
        )


class ResultsDiffer(LazyTensorError):
    """Raised in strict mode when a backend's results are not those of the reference interpreter."""

    def __init__(self, what: str) -> None:
        super().__init__(f"strict mode: {what}")


class BackendNotLoaded(LazyTensorError):
    """Raised when a backend cannot be loaded or cannot get ready; the one that was in force stays in force."""

    def __init__(self, name: str, cause: Exception) -> None:
        super().__init__(
            f"the backend {name!r} could not be loaded: {type(cause).__name__}: {cause}. "
            "The backend in force has not changed."
        )


class SyncForbidden(LazyTensorError):
    """Raised inside ``with lazytensor.no_sync():`` at the line that would have read a value."""


def mixed_devices(other: torch.device, mine: str = "ltc:0") -> RuntimeError:
    """What PyTorch says when tensors of two devices meet in one operation."""
    return RuntimeError(
        f"Expected all tensors to be on the same device, but found at least two devices, {mine} and {other}!"
    )


class BadStepFile(LazyTensorError):
    """Raised when a file is not a step that ``lazytensor.save_step`` wrote, or is damaged."""

    def __init__(self, path: str, problem: Exception) -> None:
        super().__init__(
            f"{path} is not a step that can be loaded: {problem}. Save it again with lazytensor.save_step."
        )


class NotANumber(LazyTensorError):
    """Raised inside ``with lazytensor.detect_nan():`` for the first operation that made a NaN."""

    op: str = ""  # the operation
    line: Any = None  # the line that recorded it, with its module and forward line
    place: Any = None
