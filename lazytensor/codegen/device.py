"""The device's own kernels: generated once per torch version into a cache directory, and loaded from there.

The cache holds readable Python files, so that a kernel shows in tracebacks.  Its folder is named after everything the
content depends on (torch's version and the generator's own sources), so that a stale one is never read; each file ends
with a checksum of itself and must belong to the user, which tells a damaged or foreign one.  Loading imports neither
torchgen nor yaml.
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
_MARK = b"\n# checksum "
_SOURCES = (
    *("device.yaml", "generate.py", "kernels.py", "layout.py"),
    *("backend_yaml.py", "yaml_document.py", "schema.py", "natives.py"),
)


def _fingerprint() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        digest.update((_HERE / name).read_bytes())
    return digest.hexdigest()[:12]


def folder() -> Path:
    """Where the kernels of this torch and this lazytensor are kept."""
    return settings.cache_directory() / f"kernels-torch{torch.__version__}-{_fingerprint()}"


def load(locked: bool = False) -> ModuleType:
    """The module of generated kernels; generated first, if this torch has not been seen before."""
    name = "kernels_locked" if locked else "kernels"
    path = folder() / f"{name}.py"
    fault = _fault(path)
    module = None
    if fault is None:
        try:
            module = _import(name, path)
        except Exception as error:  # a compiled file beside it that is damaged
            fault = f"cannot be imported ({type(error).__name__}: {error})"
    if module is None:
        if fault:
            log.warning("lazytensor: %s %s; generating it again", path, fault)
        path = generate(path.parent) / path.name
        module = _import(name, path)
    source.skip(str(path))
    return module


def _fault(path: Path) -> str | None:
    """What is wrong with a cached file: None if it is whole and ours, empty if it is not there."""
    try:
        content = path.read_bytes()
        owners = {path.stat().st_uid, path.parent.stat().st_uid}
    except FileNotFoundError:
        return ""
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if owners != {os.getuid()} or path.parent.stat().st_mode & 0o022:
        return "may have been written by another user"
    text, mark, checksum = content.rpartition(_MARK)
    if not mark or hashlib.sha256(text).hexdigest().encode() != checksum.strip():
        return "is damaged"
    return None


def generate(where: Path) -> Path:
    """Write the kernel modules into this folder, or into a temporary one if that cannot be; return which."""
    from lazytensor.codegen.generate import device_modules

    modules = device_modules()
    try:
        where.mkdir(parents=True, exist_ok=True, mode=0o700)
        where.chmod(0o700)
        _write(where, modules)
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="lazytensor-"))
        log.warning("lazytensor: %s cannot hold the generated kernels (%s); using %s", where, error, elsewhere)
        where = elsewhere
        _write(where, modules)
    return where


def _write(where: Path, modules: dict[str, str]) -> None:
    """Replace each file in one step, since another process may be reading it, and forget what was compiled from it."""
    for name, module in modules.items():
        text = module.encode()
        handle, temporary = tempfile.mkstemp(dir=where)
        with os.fdopen(handle, "wb") as file:
            file.write(text + _MARK + hashlib.sha256(text).hexdigest().encode() + b"\n")
        os.replace(temporary, where / f"{name}.py")
        Path(importlib.util.cache_from_source(str(where / f"{name}.py"))).unlink(missing_ok=True)


def _import(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"lazytensor._{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
