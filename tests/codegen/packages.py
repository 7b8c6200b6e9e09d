"""Makes packages from YAML text, and imports them."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from textwrap import dedent
from types import ModuleType

from lazytensor.codegen.package import Result, run


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(dedent(text).lstrip("\n"))
    return path


def generate(folder: Path, yaml: str, *, name: str = "made", kernels: str = "", shapes: str = "", **options) -> Result:
    """Generate the package `name` in this folder, with files of hand-written code beside it."""
    source = write(folder, f"{name}.yaml", yaml)
    if kernels:
        options["impl_path"] = write(folder, f"{name}_kernels.py", kernels)
    if shapes:
        options["shape_inference"] = write(folder, f"{name}_shapes.py", shapes)
    return run(source, folder / name, **options)


def load(folder: Path, name: str = "made") -> ModuleType:
    """Import a generated package; a name must not be used for two packages of one test process."""
    sys.path.insert(0, str(folder))
    try:
        importlib.invalidate_caches()
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(folder))
