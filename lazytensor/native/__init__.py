"""The two paths that every step takes, in C++: used where they have been built, and never needed.

``recorder.cpp`` is the hit path of the recording kernels (:mod:`lazytensor.device.recorder`), the headers its parts,
``runner.cpp`` the thread that runs compiled steps (:mod:`lazytensor.execute.queues`).  Both do what Python does
otherwise, on the same objects.
``interpreter.cpp`` runs graphs op by op (:mod:`lazytensor.backend.instructions`), until there is compiled code.
``arena.cpp`` gives the steps that both run memory for what they make and drop again.

They are one extension, built once for each torch and Python, by the process that compiles graphs
(:mod:`lazytensor.backend.inductor`), by ``lazytensor cache build``, or by :mod:`lazytensor.native.build`, and kept with
the compiled graphs on disk.  The setting ``compiled_recorder`` turns it off.
"""

from __future__ import annotations

import functools
import logging
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import compiler, diskcache

log = logging.getLogger("lazytensor")
SOURCES = tuple(
    Path(__file__).with_name(name) for name in ("recorder.cpp", "runner.cpp", "interpreter.cpp", "arena.cpp")
)
_PARTS = (
    "objects.h",
    "cells.h",
    "nodes.h",
    "states.h",
    "arguments.h",
    "lines.h",
    "births.h",
    "kernel.h",
    "entries.h",
    "cuts.h",
    "guard.h",
    "wholes.h",
    "jobs.h",
    "arena.h",
)
_HEADERS = tuple(Path(__file__).with_name(name) for name in _PARTS)
LIBRARY = "native.so"


@functools.cache
def key() -> str:
    """The name of its entry in the cache: the sources, and what they are compiled for."""
    versions = (torch.__version__, sys.version, platform.machine())
    return diskcache.key_of("native", *[file.read_text(encoding="utf-8") for file in (*SOURCES, *_HEADERS)], *versions)


@functools.cache
def _found() -> Any:
    entry = diskcache.find(key())
    if entry is None:
        return None
    try:
        return compiler.load("native", entry.path / LIBRARY)
    except ImportError as problem:
        log.warning("lazytensor: the compiled recorder cannot be used: %s", problem)
        return None


def extension() -> Any:
    """The extension, or None if it has not been built or is not wanted."""
    return _found() if settings.compiled_recorder else None
