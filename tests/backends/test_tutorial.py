"""Every Python block of docs/backends.md runs, in order."""

from __future__ import annotations

import re
from pathlib import Path

TUTORIAL = Path(__file__).resolve().parents[2] / "docs" / "backends.md"


def test_every_block_of_the_tutorial_runs() -> None:
    text = TUTORIAL.read_text()
    scope: dict[str, object] = {"__name__": "tutorial"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S))
    assert len(blocks) >= 9
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        exec(compile("\n" * line + block[1], str(TUTORIAL), "exec"), scope)
