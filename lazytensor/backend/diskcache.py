"""Compiled graphs on disk: a restarted program runs its first step compiled, with no compiler started.

An entry is a folder named by what it was made from: the graph's structure, the backend, the versions and flags.  It
holds plain files (text and shared objects, never a pickle) and a manifest with their sizes and digests, signed with a
key that only the owner can read.  An entry that is truncated, tampered with or foreign is ignored, with one line.
Folders and files are the owner's alone.  The cache is bounded in bytes; the least recently used entry goes first.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import json
import logging
import os
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lazytensor import settings

log = logging.getLogger("lazytensor")
_MANIFEST = "manifest.json"
_said: set[str] = set()


def root() -> Path:
    """The folder of all entries, made on first use for its owner alone."""
    path = settings.cache_directory() / "graphs"
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    return path


def _secret() -> bytes:
    """The key that signs manifests: made once, readable by its owner alone."""
    path = root() / "key"
    try:
        status = path.stat()
        if status.st_uid == os.getuid() and not status.st_mode & 0o077:
            key = path.read_bytes()
            if len(key) == 32:
                return key
    except OSError:
        pass
    key = secrets.token_bytes(32)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "wb") as file:
        file.write(key)
    os.replace(temporary, path)
    return key


@dataclass(frozen=True)
class Entry:
    """One compiled graph on disk."""

    key: str
    path: Path
    bytes: int
    used: float
    about: dict[str, Any]


def key_of(*parts: str) -> str:
    """The name of the entry made from these parts."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.hexdigest()[:40]


def store(key: str, folder: Path, about: dict[str, Any]) -> Path:
    """Take a folder of files into the cache as an entry, in one step."""
    files = {p.name: _fingerprint(p) for p in sorted(folder.iterdir()) if p.name != _MANIFEST}
    body = {"key": key, "about": about, "files": files, "stored": time.time()}
    text = json.dumps(body, sort_keys=True)
    (folder / _MANIFEST).write_text(json.dumps({"body": text, "signature": _sign(text)}))
    for path in folder.iterdir():
        path.chmod(0o600)
    folder.chmod(0o700)
    target = root() / key
    if target.exists():
        shutil.rmtree(target, ignore_errors=True)
    try:
        os.rename(folder, target)
    except OSError:
        if not target.exists():
            raise
    if about.get("file"):
        with contextlib.suppress(OSError):
            for mark in (_mark_of(about["file"]), _mark_of(about["file"], about.get("cut", _ANY))):
                Path(mark).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
                Path(mark).touch(0o600)
        _is_there.cache_clear()
    prune(settings.disk_cache_bytes)
    return target


_ANY = "any"


def _mark_of(file: str, cut: int | str | None = None) -> str:
    """An empty file that says: a graph that begins in this source file was stored, and as which cut it first came."""
    return f"{_begun()}/{key_of(file)}" + ("" if cut is None else f".{cut}")


def _begun() -> str:
    return f"{settings.cache_path()}/begun"


def compiled_before(file: str, cut: int | None = None) -> bool:
    """Whether graphs that begin in this source file were stored before this was first asked: the program runs again.

    With the number of a cut: whether one was, or may have been, that was first cut there.  A program cuts in the same
    order again, so if none was, that cut will find nothing.
    """
    folder = settings.cache_dir
    again = _was_there(folder, file, None)
    if cut is None or not again:
        return again
    return _was_there(folder, file, cut) or _was_there(folder, file, _ANY)


@functools.cache
def _was_there(folder: str, file: str, cut: int | str | None) -> bool:
    return _is_there(_begun()) and os.path.exists(_mark_of(file, cut))


@functools.cache
def _is_there(folder: str) -> bool:
    """Whether a folder was there when this was first asked, or since this process has written to one."""
    return os.path.isdir(folder)


def look() -> None:
    """Find out now what a first step would have to ask for."""
    _is_there(_begun())
    _is_there(_notes())


def note(key: str, text: str) -> None:
    """Keep what was learnt of an entry by running it: a hint, which may be lost."""
    path = _note_of(key)
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handle, temporary = tempfile.mkstemp(dir=path.parent)
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, path)
    _is_there.cache_clear()


def noted(key: str) -> str:
    """What was last learnt of an entry; nothing if nothing was."""
    try:
        return _note_of(key).read_text() if anything_noted() else ""
    except (OSError, ValueError):
        return ""


def anything_noted() -> bool:
    """Whether anything was ever learnt of an entry."""
    return _is_there(_notes())


def _note_of(key: str) -> Path:
    return Path(_notes()) / key


def _notes() -> str:
    return f"{settings.cache_path()}/notes"


def _fingerprint(path: Path) -> list[Any]:
    return [path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()]


def _sign(text: str) -> str:
    return hmac.new(_secret(), text.encode(), hashlib.sha256).hexdigest()


def find(key: str) -> Entry | None:
    """The entry of this name, if it is there, whole and ours."""
    path = settings.cache_directory() / "graphs" / key
    try:
        if not path.is_dir():
            return None
        body = _read(path)
        if body["key"] != key:
            raise ValueError("it belongs to another graph")
        for name, expected in body["files"].items():
            if _fingerprint(path / name) != expected:
                raise ValueError(f"{name} was changed")
    except (OSError, ValueError, KeyError, TypeError) as problem:
        if key not in _said:
            _said.add(key)
            log.warning("lazytensor: the cache entry %s is ignored: %s", path.name, problem)
        return None
    now = time.time()
    with contextlib.suppress(OSError):
        os.utime(path, (now, now))
    return Entry(key, path, sum(size for size, _ in body["files"].values()), now, body["about"])


def _read(path: Path) -> dict[str, Any]:
    """The manifest of an entry, its owner and signature checked."""
    if path.stat().st_uid != os.getuid():
        raise ValueError("it belongs to another user")
    outer = json.loads((path / _MANIFEST).read_text())
    if not hmac.compare_digest(outer["signature"], _sign(outer["body"])):
        raise ValueError("its signature is not this user's")
    body: dict[str, Any] = json.loads(outer["body"])
    return body


def entries() -> Iterator[Entry]:
    """Every valid entry, least recently used first."""
    found = []
    for path in root().iterdir():
        if not path.is_dir():
            continue
        try:
            body = _read(path)
            size = sum(s for s, _ in body["files"].values())
            found.append(Entry(path.name, path, size, path.stat().st_mtime, body["about"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return iter(sorted(found, key=lambda e: e.used))


def prune(limit: int) -> list[Entry]:
    """Remove the least recently used entries until the rest fits into this many bytes."""
    _sweep_leftovers()
    known = list(entries())
    total = sum(e.bytes for e in known)
    removed = []
    for entry in known:
        if total <= limit:
            break
        shutil.rmtree(entry.path, ignore_errors=True)
        _note_of(entry.key).unlink(missing_ok=True)
        total -= entry.bytes
        removed.append(entry)
    return removed


_LEFT_SECONDS = 24 * 3600  # no compilation takes this long: what is older was left by a process that was killed


def _sweep_leftovers() -> None:
    """Remove half-written folders and graphs that were never answered."""
    oldest = time.time() - _LEFT_SECONDS
    for path in root().iterdir():
        if path.name == "key" or (path / _MANIFEST).exists():
            continue
        try:
            if path.stat().st_mtime < oldest:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        except OSError:
            continue


def export(target: Path, keys: list[str] | None = None) -> int:
    """Write entries into one archive, to be imported on another machine."""
    count = 0
    with tarfile.open(target, "w:gz") as archive:
        for entry in entries():
            if keys is None or entry.key in keys:
                archive.add(entry.path, arcname=entry.key)
                count += 1
    return count


def import_archive(source: Path) -> int:
    """Take the entries of an archive into the cache and sign them.  Whoever imports an archive trusts who made it."""
    count = 0
    with tarfile.open(source, "r:gz") as archive, tempfile.TemporaryDirectory(dir=root()) as temporary:
        archive.extractall(temporary, filter="data")
        for folder in sorted(Path(temporary).iterdir()):
            body = json.loads(json.loads((folder / _MANIFEST).read_text())["body"])
            if folder.name != body["key"]:
                raise ValueError(f"{source}: the entry {folder.name} names itself {body['key']}")
            for name, expected in body["files"].items():
                if _fingerprint(folder / name) != expected:
                    raise ValueError(f"{source}: {folder.name}/{name} is damaged")
            store(body["key"], folder, body["about"])
            count += 1
    return count
