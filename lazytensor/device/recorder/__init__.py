"""The compiled recorder: the hit path of the kernels in C++, used where it has been built, and never needed.

A generated Python kernel takes about 4 µs, of which PyTorch's way into Python and back is 1.5 and the making of the
tensor's Python objects another 1.2.  ``recorder.cpp`` does what such a kernel does on a hit without leaving C++, on the
same tables and states, and hands every other call to the Python kernel.  It is one file over all schemas: what an op
means, its shapes, its nodes and its errors stay in Python.

It is built once for each torch and Python, by the process that compiles graphs (:mod:`lazytensor.backend.inductor`), by
``lazytensor cache build``, or by :func:`build`, and kept with the compiled graphs on disk.  Where it is found,
``import lazytensor`` puts it before the Python kernels.  The setting ``compiled_recorder`` turns it off.
"""

from __future__ import annotations

import functools
import logging
import platform
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import compiler, diskcache
from lazytensor.codegen.runtime import replacing
from lazytensor.trace import ir, storage

log = logging.getLogger("lazytensor")
SOURCE = Path(__file__).parent / "recorder.cpp"
LIBRARY = "recorder.so"

module: Any = None  # the extension, once it is installed


@functools.cache
def key() -> str:
    """The name of its entry in the cache: the source, and what it is compiled for."""
    versions = (torch.__version__, sys.version, platform.machine())
    return diskcache.key_of("recorder", SOURCE.read_text(), *versions)


def in_use() -> bool:
    """Whether kernels take the compiled path."""
    return module is not None and module.enabled()


def install(kernels: ModuleType) -> bool:
    """Put the compiled hit path before these Python kernels, if it has been built; whether it has."""
    global module
    if module is not None or not settings.compiled_recorder:
        return module is not None
    entry = diskcache.find(key())
    if entry is None:
        return False
    try:
        found: Any = compiler.load("recorder", entry.path / LIBRARY)
    except ImportError as problem:
        log.warning("lazytensor: the compiled recorder cannot be used: %s", problem)
        return False
    found.begin(_parts())
    with replacing():
        for name, (kind, table) in kernels.hits.items():
            stem, _, overload = name.partition(".")
            found.install("aten::" + stem, overload, kind, table)
    found.enable(True)
    module = found
    return True


def _parts() -> dict[str, Any]:
    """What the compiled path works on: the very objects that the Python kernels do."""
    names = ("State", "ViewedState", "ViewState", "FRESH", "fresh", "numbers", "leaf_data", "leaf_states")
    functions = ("sweep", "make", "make_view", "write", "value_of_state")
    parts = {name: getattr(storage, name) for name in (*names, *functions)}
    return parts | {
        "Value": ir.Value,
        "Spec": ir.Spec,
        "rows": ir._number_leaves,
        "data_leaves": ir._data_leaves,
        "specs": ir._specs,
        "aliased": storage._aliased,
    }


def disable() -> None:
    """Let the Python kernels do everything from now on: they can take a lock."""
    if module is not None:
        module.enable(False)
