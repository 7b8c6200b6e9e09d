"""Every setting of lazytensor, in one place: its type, default, environment variable and one line of help.

Read a setting as ``lazytensor.settings.devices``; assign to change it; or change it for a block::

    with lazytensor.settings.scope(max_pending=1000):
        ...

Environment variables are read once, at import.  ``lazytensor doctor`` lists all settings with their values and origins.
"""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

T = TypeVar("T")


def _boolean(text: str) -> bool:
    return text.strip().lower() not in ("", "0", "false", "no", "off")


def _one_of(*words: str) -> Any:
    def choice(text: str) -> str:
        if text not in words:
            raise ValueError(text)
        return text

    choice.__name__ = " or ".join(words)
    return choice


class Setting(Generic[T]):
    """One setting.  ``origin`` says where its value came from: default, environment or program."""

    def __init__(self, default: T, env: str, help: str, kind: Any = None) -> None:
        self.default = default
        self.env = env
        self.help = help
        self.kind: Any = kind or (_boolean if isinstance(default, bool) else type(default))
        self.name = ""
        self.value = default
        self.origin = "default"

    def read_environment(self) -> None:
        """Take the value from the environment, if it is there."""
        text = os.environ.get(self.env)
        if text is None:
            return
        try:
            self.value = self.kind(text)
        except ValueError:
            raise ValueError(
                f"{self.env}={text!r} is not a valid {self.kind.__name__} for the setting {self.name}"
            ) from None
        self.origin = "environment"


_ALL: dict[str, Setting[Any]] = {
    "devices": Setting(2, "LAZYTENSOR_DEVICES", "How many virtual devices there are: ltc:0, ltc:1, …"),
    "backend": Setting("auto", "LAZYTENSOR_BACKEND", "The backend that compiles and runs graphs."),
    "on_backend_failure": Setting(
        "raise",
        "LAZYTENSOR_ON_BACKEND_FAILURE",
        "What happens to a graph that its backend cannot compile or run: raise, or run it on the backend reference.",
        kind=_one_of("raise", "reference"),
    ),
    "hardware": Setting(
        "cpu",
        "LAZYTENSOR_HARDWARE",
        "The kind of hardware on which the backends auto, inductor and ts compute: cpu or cuda.",
        kind=_one_of("cpu", "cuda"),
    ),
    "ts_cuda": Setting(False, "LTC_TS_CUDA", "Let the ts backend compute on CUDA, whatever hardware says."),
    "max_pending": Setting(250_000, "LAZYTENSOR_MAX_PENDING", "Cut by itself when this many operations are pending."),
    "max_pending_bytes": Setting(
        8 << 30, "LAZYTENSOR_MAX_PENDING_BYTES", "Cut by itself when the pending results need this many bytes."
    ),
    "cache_size": Setting(1024, "LAZYTENSOR_CACHE_SIZE", "How many compiled graphs are kept in memory."),
    "max_nodes": Setting(
        400_000, "LAZYTENSOR_MAX_NODES", "How many interned nodes are kept before unused ones are dropped."
    ),
    "diagnostics": Setting(
        True,
        "LAZYTENSOR_DIAGNOSTICS",
        "Keep the ledgers of cuts, recompilations and fallbacks, and blame recompilations.",
    ),
    "ledger_size": Setting(4096, "LAZYTENSOR_LEDGER_SIZE", "How many cuts and fallbacks the ledgers keep one by one."),
    "save_tensors_file": Setting("", "LTC_SAVE_TENSORS_FILE", "Append the graph of every cut to this file."),
    "save_tensors_format": Setting(
        "text", "LTC_SAVE_TENSORS_FMT", "The format of that file: text, dot, python or backend."
    ),
    "compiled_recorder": Setting(
        True,
        "LAZYTENSOR_COMPILED_RECORDER",
        "Record and run steps in compiled code, where it has been built, instead of in Python.",
    ),
    "check": Setting(False, "LAZYTENSOR_CHECK", "Check the invariants of the trace as it is recorded (slow)."),
    "strict": Setting(
        0,
        "LAZYTENSOR_STRICT",
        "Hold backends to their contract; one run in this many is compared with reference (0: off).",
    ),
    "without_passes": Setting(
        "", "LAZYTENSOR_WITHOUT_PASSES", "Clean-up passes to leave out, separated by commas: copies, casts, views."
    ),
    "run_in_background": Setting(
        True,
        "LAZYTENSOR_RUN_IN_BACKGROUND",
        "Let a cut run while the next step is recorded, where the backend allows it.",
    ),
    "run_ahead": Setting(
        True,
        "LAZYTENSOR_RUN_AHEAD",
        "Run the ops of a step that was never seen as they are recorded, where the backend allows it.",
    ),
    "whole_functions": Setting(
        True,
        "LAZYTENSOR_WHOLE_FUNCTIONS",
        "Record a function that is proven to be pure as a whole, where the compiled recorder is in use.",
    ),
    "max_in_flight": Setting(2, "LAZYTENSOR_MAX_IN_FLIGHT", "How many cuts may run or wait to run in the background."),
    "share_cores": Setting(
        True,
        "LAZYTENSOR_SHARE_CORES",
        "Let a cut in the background have fewer cores where steps come faster so; off, it has all of them.",
    ),
    "keep_bytes": Setting(
        1 << 30,
        "LAZYTENSOR_KEEP_BYTES",
        "How much memory compiled steps may keep for what each of them makes and drops again (0: none).",
    ),
    "compile_seconds": Setting(
        300, "LAZYTENSOR_COMPILE_SECONDS", "Seconds of processor time that one graph may take to compile."
    ),
    "max_compiled_operations": Setting(
        4000, "LAZYTENSOR_MAX_COMPILED_OPERATIONS", "Graphs with more operations are not given to TorchInductor."
    ),
    "disk_cache_bytes": Setting(
        2 << 30, "LAZYTENSOR_DISK_CACHE_BYTES", "How large the cache of compiled graphs on disk may be."
    ),
    "cache_dir": Setting("", "LAZYTENSOR_CACHE_DIR", "Where generated kernels and compiled graphs are kept on disk."),
}

for _name, _setting in _ALL.items():
    _setting.name = _name
    _setting.read_environment()


def all_settings() -> list[Setting[Any]]:
    """Every setting, for listing."""
    return list(_ALL.values())


@contextmanager
def scope(**changes: Any) -> Iterator[None]:
    """Change settings for a block."""
    module = sys.modules[__name__]
    before = {name: (_ALL[name].value, _ALL[name].origin) for name in changes}
    try:
        for name, value in changes.items():
            setattr(module, name, value)
        yield
    finally:
        for name, (value, origin) in before.items():
            _ALL[name].value, _ALL[name].origin = value, origin


def cache_directory() -> Path:
    """The folder for everything that is kept on disk, only for its owner."""
    return Path(cache_path())


_USUAL_PATH = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "lazytensor")


def cache_path() -> str:
    """The same as text, which takes a tenth of the time: the first step of a program asks for it."""
    chosen: str = _ALL["cache_dir"].value
    return chosen or _USUAL_PATH


class _Settings(types.ModuleType):
    """The module itself: settings read and assign as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name in _ALL:
            return _ALL[name].value
        raise AttributeError(f"there is no setting {name!r}; known are {', '.join(sorted(_ALL))}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _ALL:
            _ALL[name].value, _ALL[name].origin = value, "program"
        elif name.startswith("_"):
            super().__setattr__(name, value)
        else:
            raise AttributeError(f"there is no setting {name!r}; known are {', '.join(sorted(_ALL))}")


sys.modules[__name__].__class__ = _Settings

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
