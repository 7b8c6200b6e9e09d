"""The cache of generated kernels: what is damaged or foreign is noticed, made again, and said once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lazytensor import settings
from lazytensor.codegen import device, generate

TINY = "kernels = {'answer': lambda: 42}\n"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """An empty cache; the list grows with each generation, which is made short."""
    made: list[int] = []

    def modules() -> dict[str, str]:
        made.append(len(made))
        return {"kernels": TINY, "kernels_locked": TINY}

    monkeypatch.setattr(generate, "device_modules", modules)
    with settings.scope(cache_dir=str(tmp_path / "cache")):
        yield made


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lazytensor"]


def test_a_warm_load_generates_nothing_and_says_nothing(cache: list[int], caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(3):
        assert device.load().kernels["answer"]() == 42
    assert device.load(locked=True).kernels["answer"]() == 42
    assert cache == [0]
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (lambda path: path.write_bytes(path.read_bytes().replace(b"42", b"43")), "is damaged"),
        (lambda path: path.write_bytes(path.read_bytes()[:20]), "is damaged"),
        (lambda path: path.write_bytes(b""), "is damaged"),
        (lambda path: path.write_text("kernels = {}\n"), "is damaged"),
        (lambda path: path.parent.chmod(0o777), "may have been written by another user"),
    ],
    ids=["one character", "cut short", "empty", "another file", "a folder open to all"],
)
def test_a_damaged_or_foreign_file_is_made_again_and_said_once(
    cache: list[int], caplog: pytest.LogCaptureFixture, harm, said: str
) -> None:
    device.load()
    harm(device.folder() / "kernels.py")
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert device.load().kernels["answer"]() == 42
        assert device.load().kernels["answer"]() == 42
    assert cache == [0, 1]
    (message,) = warnings(caplog)
    assert said in message
    assert str(device.folder()) in message


def test_damaged_compiled_code_is_compiled_again(cache: list[int], caplog: pytest.LogCaptureFixture) -> None:
    device.load()
    (compiled,) = device.folder().glob(f"kernels.{sys.implementation.cache_tag}")
    compiled.write_bytes(compiled.read_bytes()[:-3] + b"xyz")
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert device.load().kernels["answer"]() == 42
        assert device.load().kernels["answer"]() == 42
    assert cache == [0]
    (message,) = warnings(caplog)
    assert "is damaged; compiling it again" in message


def test_a_cache_that_cannot_be_written_is_said_and_done_without(
    tmp_path: Path, cache: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert device.load().kernels["answer"]() == 42
    assert "cannot hold the generated kernels" in warnings(caplog)[-1]


def test_the_folder_is_for_its_owner_alone(cache: list[int]) -> None:
    device.load()
    assert device.folder().stat().st_mode & 0o077 == 0
    assert device.folder().stat().st_uid == os.getuid()


def test_a_change_of_the_generator_is_another_folder(
    cache: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    before = device.folder()
    sources = tmp_path / "sources"
    sources.mkdir()
    for name in device._SOURCES:
        (sources / name).write_bytes((device._HERE / name).read_bytes() + b"#")
    monkeypatch.setattr(device, "_HERE", sources)
    assert device.folder() != before


def test_every_source_of_the_generator_is_in_the_fingerprint() -> None:
    """Whatever the generation imports from this package decides what comes out."""
    code = """
import sys
import lazytensor.codegen.generate as g
print(*sorted(n.rpartition(".")[2] for n in sys.modules if n.startswith("lazytensor.codegen.")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    runtime = {"custom", "generic", "device", "runtime"}
    named = {Path(name).stem for name in device._SOURCES if name.endswith(".py")}
    assert set(done.stdout.split()) - runtime == named


def test_a_warm_import_needs_neither_torchgen_nor_yaml() -> None:
    code = """
import sys, torch
before = set(sys.modules)
import lazytensor
print(*sorted(n for n in set(sys.modules) - before if n.partition(".")[0] in ("torchgen", "yaml", "typer", "rich")))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_kernels_of_versions_long_gone_are_removed(cache: list[int]) -> None:
    home = device.folder().parent
    for age in range(12):
        old = home / f"kernels-torch1.{age}-old"
        old.mkdir(parents=True)
        os.utime(old, (1_000_000 - age, 1_000_000 - age))
    (home / "graphs").mkdir()
    device.load()
    left = sorted(path.name for path in home.glob("kernels-torch*"))
    assert len(left) == device._KEPT
    assert device.folder().name in left
    assert "kernels-torch1.0-old" in left
    assert "kernels-torch1.11-old" not in left
    assert (home / "graphs").exists()


MOVED = """
import threading, torch, lazytensor as lt
x = torch.ones(3, device="ltc")
thread = threading.Thread(target=lambda: x * 2)  # two threads record: the kernels that take a lock are used
thread.start()
thread.join()
y = x + 1  # line 7
print(lt.why(y))
"""


def test_lines_are_the_program_s_where_the_cache_was_moved_after_it_was_compiled(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(MOVED)

    def run(cache: Path) -> str:
        environment = os.environ | {"LAZYTENSOR_CACHE_DIR": str(cache), "LAZYTENSOR_COMPILED_RECORDER": "0"}
        line = [sys.executable, str(program)]
        return subprocess.run(line, env=environment, capture_output=True, text=True, check=True).stdout

    before = run(tmp_path / "cache")
    assert f"{program}:7" in before
    (tmp_path / "cache").rename(tmp_path / "moved")
    assert f"{program}:7" in run(tmp_path / "moved")
