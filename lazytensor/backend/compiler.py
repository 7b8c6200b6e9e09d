"""The C++ compiler of this machine, which compiled graphs and the compiled recorder need."""

from __future__ import annotations

import os
import shutil

MISSING = "no C++ compiler was found (g++, clang++ or $CXX)"


def find() -> str | None:
    """Where it is: ``$CXX``, or the first of the usual names; None if there is none."""
    names = (os.environ.get("CXX", ""), "g++", "clang++", "c++")
    return next((found for name in names if name and (found := shutil.which(name))), None)
