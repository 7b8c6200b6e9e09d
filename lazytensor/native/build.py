"""Builds the extension: one call of the C++ compiler, a minute, into the cache on disk."""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path

import torch

from lazytensor import native
from lazytensor.backend import compiler, diskcache


def command(output: Path) -> list[str]:
    """How it is compiled: against the headers and libraries of the installed torch."""
    chosen = compiler.find()
    if chosen is None:
        raise RuntimeError(compiler.MISSING)
    home = Path(torch.__file__).parent
    include = home / "include"
    headers = (include, include / "torch" / "csrc" / "api" / "include", sysconfig.get_paths()["include"])
    return [
        *(chosen, "-O2", "-std=c++20", "-shared", "-fPIC", "-fvisibility=hidden"),
        *(f"-I{path}" for path in headers),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(str(source) for source in native.SOURCES),
        *("-o", str(output)),
        *(f"-L{home / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10"),
    ]


def build() -> Path:
    """Compile it into the cache, if it is not there; where it is."""
    entry = diskcache.find(native.key())
    if entry is not None:
        return entry.path
    folder = Path(tempfile.mkdtemp(dir=diskcache.root()))
    try:
        done = subprocess.run(command(folder / native.LIBRARY), capture_output=True, text=True, check=False)
        if done.returncode:
            first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
            raise RuntimeError(f"the recorder was not compiled: {first}")
        about = {"operations": None, "line": "the compiled recorder", "torch": torch.__version__}
        return diskcache.store(native.key(), folder, about)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
