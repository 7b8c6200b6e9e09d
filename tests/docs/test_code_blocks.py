"""Every code block of the README and the documentation runs.

The Python blocks of a page run in order, in one namespace, each at its own line of the page.  A block that cannot run
carries a comment before it, ``<!-- not run: the reason -->``.  A shell block that calls ``lazytensor`` names a command
that exists.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import lazytensor as lt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Block(NamedTuple):
    """A fenced block: its language, the line of its first line, its text, and the reason why it is not run."""

    language: str
    line: int
    text: str
    reason: str | None


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page."""
    lines = page.read_text(encoding="utf-8").splitlines()
    start = None
    for number, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if start is None:
            start = number
            continue
        before = [text for text in lines[max(start - 2, 0) : start] if text.strip()]
        reason = re.fullmatch(r"<!-- not run:(.*)-->", before[-1].strip()) if before else None
        text = "\n".join(lines[start + 1 : number])
        yield Block(lines[start].removeprefix("```").strip(), start + 1, text, reason[1].strip() if reason else None)
        start = None


def relative(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture
def untouched() -> Iterator[None]:
    """Settings, backend, generators and PyTorch's defaults as they were, whatever a page does to them."""
    backend = lt.current_backend()
    kept = {setting.name: setting.value for setting in lt.settings.all_settings()}
    random_state = random.getstate()
    with lt.settings.scope(**kept), torch.random.fork_rng(devices=[]):
        lt.metrics.reset()
        lt.clear_cache()
        yield
    lt.set_backend(backend)
    random.setstate(random_state)
    torch.set_default_device(None)


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize("page", [p for p in PAGES if any(b.language == "python" for b in blocks(p))], ids=relative)
def test_python_blocks_run(page: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks(page):
        if block.language == "python" and block.reason is None:
            # Empty lines before the block, so that errors and diagnostics name the page's own lines.
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_blocks_that_are_not_run_say_why(page: Path) -> None:
    for block in blocks(page):
        assert block.reason is None or len(block.reason) > 10, f"{page.name}:{block.line}"


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_shell_blocks_name_commands_that_exist(page: Path) -> None:
    from typer.main import get_command

    from lazytensor.cli.app import app

    known = set(get_command(app).commands)  # type: ignore[attr-defined]
    for block in blocks(page):
        if block.language in ("sh", "bash", "console"):
            for command in re.findall(r"(?:^|[$&;|]\s*)lazytensor (\w+)", block.text, re.MULTILINE):
                assert command in known, f"{page.name}:{block.line}: there is no lazytensor {command}"
