"""Compiled code from disk, and the C++ compiler of this machine: for compiled graphs and for the compiled recorder."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from types import ModuleType

MISSING = "no C++ compiler was found: install g++ or clang++, or name one in $CXX"


def find() -> str | None:
    """Where it is: ``$CXX``, or the first of the usual names; None if there is none."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)


def load(name: str, path: Path) -> ModuleType:
    """The extension module of this name in a shared object."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
