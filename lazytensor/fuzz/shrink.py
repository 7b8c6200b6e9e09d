"""Makes a failing program small, and writes it as a script that runs by itself."""

from __future__ import annotations

from collections.abc import Callable


def shrink(lines: list[str], fails: Callable[[list[str]], bool]) -> list[str]:
    """The program without every line that it fails without: halves first, then smaller pieces, then single lines."""
    piece = max(1, len(lines) // 2)
    while piece:
        position = 0
        removed = False
        while position < len(lines):
            shorter = lines[:position] + lines[position + piece :]
            if shorter and fails(shorter):
                lines = shorter
                removed = True
            else:
                position += piece
        if piece == 1 and not removed:
            break
        piece = piece // 2 if piece > 1 else (1 if removed else 0)
    return lines


def script(lines: list[str], seed: int, what: str, backend: str) -> str:
    """A file that shows the difference when it is run."""
    body = "\n".join(f"    {line!r}," for line in lines)
    return f'''"""{what}"""

import torch

import lazytensor as lt
from lazytensor.fuzz.compare import difference
from lazytensor.fuzz.run import run

lt.set_backend({backend!r})
LINES = [
{body}
]
eager = run(LINES, {seed}, "cpu", "cpu", lambda: None)
lazy = run(LINES, {seed}, "ltc:0", "ltc:1", lt.sync)
print(difference(eager, lazy, LINES) or "no difference")
'''
