"""The device's own kernels: generated once per torch version into a cache directory, and loaded from there.

The cache holds readable Python files, so that a kernel shows in tracebacks.  Its folder is named after everything the
content depends on (torch's version and the generator's own sources), so that a stale one is never read; each file ends
with a checksum of itself and must belong to the user, which tells a damaged or foreign one.  Loading imports neither
torchgen nor yaml, and the compiled form is kept beside the source also where Python is told to write none
(``PYTHONDONTWRITEBYTECODE``, usual in containers): compiling takes a second.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import logging
import marshal
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import CodeType, ModuleType

import torch

from lazytensor import settings
from lazytensor.trace import source

log = logging.getLogger("lazytensor")
_HERE = Path(__file__).parent
_MARK = b"\n# checksum "
_SOURCES = (
    *("device.yaml", "generate.py", "kernels.py", "classify.py", "layout.py"),
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
    path = _found(name)
    module = ModuleType(f"lazytensor._{name}")
    module.__file__ = str(path)
    exec(_compiled(path), module.__dict__)
    return module


def locked_codes() -> dict[str, CodeType]:
    """The code of every locked kernel by its function's name.

    Their module is not run: the code is for the functions of the other module, which keep their tables.
    """
    return {c.co_name: c for c in _compiled(_found("kernels_locked")).co_consts if isinstance(c, CodeType)}


def _found(name: str) -> Path:
    """The file of a kernel module; generated first, if this torch has not been seen before."""
    path = folder() / f"{name}.py"
    fault = _fault(path)
    if fault is not None:
        if fault:
            log.warning("lazytensor: %s %s; generating it again", path, fault)
        path = generate(path.parent) / path.name
    return path


def _compiled(path: Path) -> CodeType:
    """The code of a whole kernel module, whose lines are nobody's."""
    code = _stored(path)
    source.skip(code.co_filename)  # where it was when it was compiled: a cache can be moved, or reached by a link
    return code


def _stored(path: Path) -> CodeType:
    """The code of a whole source file, from beside it if that was compiled from the same text by the same Python."""
    text = path.read_bytes()
    key = hashlib.sha256(importlib.util.MAGIC_NUMBER + text).digest()
    stored = path.with_suffix(f".{sys.implementation.cache_tag}")
    try:
        found = stored.read_bytes()
        seal, payload = found[:32], found[32:]
        if seal == hashlib.sha256(key + payload).digest():
            return marshal.loads(payload)  # type: ignore[no-any-return]
        log.warning("lazytensor: %s is damaged; compiling it again", stored)
    except FileNotFoundError:
        pass
    code = compile(text, str(path), "exec")
    payload = marshal.dumps(code)
    with contextlib.suppress(OSError):
        _replace(stored, hashlib.sha256(key + payload).digest() + payload)
    return code


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
        with contextlib.suppress(OSError):  # another process may do the same
            _forget_old(where)
    except OSError as error:
        elsewhere = Path(tempfile.mkdtemp(prefix="lazytensor-"))
        log.warning("lazytensor: %s cannot hold the generated kernels (%s); using %s", where, error, elsewhere)
        where = elsewhere
        _write(where, modules)
    return where


_KEPT = 8  # folders: of several environments with other versions, and of versions that may come back


def _forget_old(newest: Path) -> None:
    """Remove the kernels of versions that were generated long before others; one that is missed is generated again."""
    others = [path for path in newest.parent.glob("kernels-torch*") if path != newest]
    others.sort(key=lambda path: path.stat().st_mtime)
    for path in others[: max(len(others) - _KEPT + 1, 0)]:
        shutil.rmtree(path, ignore_errors=True)


def _write(where: Path, modules: dict[str, str]) -> None:
    for name, module in modules.items():
        text = module.encode()
        _replace(where / f"{name}.py", text + _MARK + hashlib.sha256(text).hexdigest().encode() + b"\n")
        (where / f"{name}.{sys.implementation.cache_tag}").unlink(missing_ok=True)


def _replace(path: Path, content: bytes) -> None:
    """Put a file there in one step: another process may be reading it."""
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    os.replace(temporary, path)
