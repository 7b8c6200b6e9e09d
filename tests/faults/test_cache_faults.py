"""The cache on disk may be full, read-only, cut short or half-written: programs go on without it."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazytensor as lt
from lazytensor import settings
from lazytensor.backend import diskcache
from lazytensor.backend.inductor.tiers import Tiered


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path) -> Iterator[None]:
    with lt.settings.scope(cache_dir=str(tmp_path / "cache")):
        yield
    lt.set_backend("reference")


def folder(tmp_path: Path, name: str, content: bytes = b"x" * 50) -> Path:
    made = tmp_path / name
    made.mkdir()
    (made / "graph.cpp").write_bytes(content)
    (made / "graph.so").write_bytes(content[::-1])
    return made


def test_an_entry_cut_at_any_byte_is_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key = diskcache.key_of("some graph")
    entry = diskcache.store(key, folder(tmp_path, "made"), {"line": "a.py:1"})
    assert diskcache.find(key) is not None
    for name in ("manifest.json", "graph.cpp", "graph.so"):
        path = entry / name
        whole = path.read_bytes()
        for length in range(len(whole)):
            path.write_bytes(whole[:length])
            assert diskcache.find(key) is None, f"{name} cut at {length}"
            assert name != "manifest.json" or list(diskcache.entries()) == []
        path.write_bytes(whole)
        assert diskcache.find(key) is not None
    diskcache._said.discard(key)
    caplog.clear()
    (entry / "graph.cpp").write_bytes(b"")
    with caplog.at_level(logging.WARNING, "lazytensor"):
        diskcache.find(key)
        diskcache.find(key)
    assert len([r for r in caplog.records if "is ignored" in r.message]) == 1


def test_a_changed_byte_anywhere_is_noticed(tmp_path: Path) -> None:
    key = diskcache.key_of("another graph")
    entry = diskcache.store(key, folder(tmp_path, "made"), {})
    for path in entry.iterdir():
        whole = path.read_bytes()
        for at in range(0, len(whole), 7):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x20]) + whole[at + 1 :])
            assert diskcache.find(key) is None, f"{path.name} at {at}"
        path.write_bytes(whole)
    assert diskcache.find(key) is not None


def test_a_key_that_was_cut_makes_entries_foreign_and_a_new_one_works(tmp_path: Path) -> None:
    key = diskcache.key_of("graph")
    diskcache.store(key, folder(tmp_path, "one"), {})
    secret = diskcache.root() / "key"
    secret.write_bytes(secret.read_bytes()[:10])
    assert diskcache.find(key) is None
    diskcache.store(key, folder(tmp_path, "two"), {})
    assert diskcache.find(key) is not None


@pytest.mark.parametrize("broken", ["write_text", "rename", "chmod"])
def test_an_interrupted_write_leaves_no_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    key = diskcache.key_of("graph", broken)

    def interrupted(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os if broken == "rename" else Path, broken, interrupted)
        with pytest.raises(OSError, match="No space left"):
            diskcache.store(key, folder(tmp_path, "first"), {})
    assert diskcache.find(key) is None
    assert list(diskcache.entries()) == []
    diskcache.store(key, folder(tmp_path, "second"), {})
    assert diskcache.find(key) is not None


def test_what_a_killed_process_left_half_written_is_swept_away() -> None:
    old, new = diskcache.root() / "tmpold", diskcache.root() / "tmpnew"
    for half in (old, new):
        half.mkdir()
        (half / "graph.cpp").write_text("half")
    graph = diskcache.root() / "x.graph"
    graph.write_text("{}")
    then = time.time() - 2 * diskcache._LEFT_SECONDS
    for path in (old, graph):
        os.utime(path, (then, then))
    diskcache.prune(1 << 30)
    assert not old.exists() and not graph.exists()
    assert new.exists(), "somebody may be writing it"


@pytest.mark.parametrize("text", ["", "-", "x", "2 ", "--2", "-2.5"])
def test_a_note_that_is_no_number_says_nothing(text: str) -> None:
    tiered = Tiered(None, lambda graph: graph, False, 1)  # type: ignore[arg-type, return-value]
    assert tiered.threads_of_before() is None
    tiered.key = "a" * 40
    assert tiered.threads_of_before() is None
    diskcache.note(tiered.key, text)
    assert tiered.threads_of_before() is None
    tiered.keep_threads(-2)
    assert tiered.threads_of_before() == -2


def test_notes_are_the_owners_and_go_with_their_entry(tmp_path: Path) -> None:
    key = "b" * 40
    diskcache.store(key, folder(tmp_path, "made"), {})
    diskcache.note(key, "2")
    (note,) = (settings.cache_directory() / "notes").iterdir()
    assert not note.stat().st_mode & 0o077
    assert not note.parent.stat().st_mode & 0o077
    diskcache.prune(0)
    assert diskcache.noted(key) == ""


def step() -> float:
    x = torch.arange(4.0, device="ltc")
    return float(((x * 2 + 1).tanh().sum() * 3).item())


def no_folder(tmp_path: Path) -> Path:
    """A place where no folder can be made, for root neither."""
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "cache"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 KiB that is full."""
    place = tmp_path / "small"
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(place)], capture_output=True)
    if made.returncode:
        pytest.skip("only root can mount a disk that is full")
    try:
        (place / "graphs").mkdir()
        with pytest.raises(OSError, match="No space left"):
            (place / "graphs" / "filler").write_bytes(b"x" * (1 << 20))
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def runs_without(folder: Path, wait: bool, caplog: pytest.LogCaptureFixture, said: str) -> None:
    """With a cache folder that cannot be used, a program has its results all the same, and is told."""
    right = step()
    lt.settings.cache_dir = str(folder)
    lt.clear_cache()
    lt.set_backend("inductor", wait=wait)
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert [step() for _ in range(3)] == pytest.approx([right] * 3, rel=1e-6)
        late = time.monotonic() + 10  # it is another thread that asks for compiled code
        while said not in caplog.text and time.monotonic() < late:
            time.sleep(0.01)
    assert said in caplog.text


@pytest.mark.parametrize("wait", [False, True])
def test_a_cache_folder_that_cannot_be_made(tmp_path: Path, wait: bool, caplog: pytest.LogCaptureFixture) -> None:
    runs_without(no_folder(tmp_path), wait, caplog, "the cache of compiled graphs cannot be used")


def test_a_full_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    runs_without(small_disk, True, caplog, "stays on the first tier")


def test_a_read_only_disk(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    runs_without(small_disk, True, caplog, "Read-only file system")
