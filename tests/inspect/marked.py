"""Line numbers by marker: a test says which line it means by a comment on it."""

from __future__ import annotations

import inspect
from pathlib import Path


def marked(file: str, marker: str) -> int:
    """The number of the one line of a file that ends in ``# <marker>``."""
    found = [n for n, text in enumerate(Path(file).read_text().splitlines(), 1) if text.endswith(f"# <{marker}>")]
    assert len(found) == 1, f"{len(found)} lines of {file} are marked <{marker}>"
    return found[0]


def here(marker: str) -> int:
    """The number of the marked line in the calling test's file."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return marked(frame.f_back.f_code.co_filename, marker)
