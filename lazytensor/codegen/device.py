"""The device's own kernels: generated once per torch version into a cache directory, and loaded from there.

The cache holds readable Python files, so that a kernel shows in tracebacks.  Its folder is named after everything the
content depends on (torch's version, lazytensor's, and the generator's own sources), so that a stale one is never read; a
checksum inside tells a damaged or foreign file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
import tempfile
from pathlib import Path
from types import ModuleType

import torch

from lazytensor import settings
from lazytensor.trace import source

log = logging.getLogger("lazytensor")
_HERE = Path(__file__).parent


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in (_HERE / "kernels.py", _HERE / "device.yaml", _HERE / "generate.py"):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def folder() -> Path:
    """Where the kernels of this torch and this lazytensor are kept."""
    return settings.cache_directory() / f"kernels-torch{torch.__version__}-{_fingerprint()}"


def load(locked: bool = False) -> ModuleType:
    """The module of generated kernels; generated first, if this torch has not been seen before."""
    name = "kernels_locked" if locked else "kernels"
    path = folder() / f"{name}.py"
    if not _intact(path):
        _generate(path.parent)
    module = _import(name, path)
    source.skip(str(path))
    return module


def _intact(path: Path) -> bool:
    """Whether the file is one that this generator wrote, whole."""
    stamp = path.with_suffix(".sum")
    try:
        expected = stamp.read_text()
    except OSError:
        return False
    try:
        status = path.stat()
        found = f"{status.st_size} {status.st_uid}"
    except OSError:
        found = ""
    if expected.split(" ", 1)[1:] == [found] and status.st_uid == os.getuid():
        return True
    log.warning("lazytensor: the generated kernels in %s were damaged or not ours; generating them again", path.parent)
    return False


def _generate(where: Path) -> None:
    from lazytensor.codegen.generate import device_modules

    where.mkdir(parents=True, exist_ok=True, mode=0o700)
    for name, text in device_modules().items():
        path = where / f"{name}.py"
        _write(path, text)
        status = path.stat()
        _write(
            path.with_suffix(".sum"), f"{hashlib.sha256(text.encode()).hexdigest()} {status.st_size} {status.st_uid}"
        )


def _write(path: Path, text: str) -> None:
    """Replace a file in one step: another process may be reading it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write(text)
    os.replace(temporary, path)


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lazytensor._{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
