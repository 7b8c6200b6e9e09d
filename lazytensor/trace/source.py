"""Which line of the user's program made a node.

Asked for on a miss only.  Frames of PyTorch, of lazytensor and of the standard library are skipped by rule: the line is the
innermost frame that belongs to neither.  In backward the user's frame is the ``backward()`` call; the forward line that an
autograd node belongs to is found through its sequence number.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from types import FrameType
from typing import NamedTuple

import torch

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple({sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib")})
_generated: set[str] = set()


class Line(NamedTuple):
    """A place in the user's program."""

    file: str
    number: int
    function: str
    forward: tuple[str, int, str] | None = None  # for an op of backward: the forward line it belongs to
    module: str | None = None

    def __str__(self) -> str:
        where = f"{self.file}:{self.number} in {self.function}"
        if self.forward is not None:
            where = f"{self.forward[0]}:{self.forward[1]} in {self.forward[2]} (its backward, from {where})"
        return where


UNKNOWN = Line("<unknown>", 0, "<unknown>")


def skip(path: str) -> None:
    """Treat this file as the library's own: generated kernels."""
    _generated.add(path)


_ours: dict[str, bool] = {}


def _is_library(path: str) -> bool:
    known = _ours.get(path)
    if known is None:
        known = _ours[path] = (
            path.startswith((_PACKAGE, _TORCH))
            or path in _generated
            or path.startswith("<frozen ")
            or (path.startswith(_STDLIB) and not path.startswith(_SITE))
        )
    return known


def user_frame(frame: FrameType | None) -> FrameType | None:
    """The innermost frame from here outward that is the user's own."""
    while frame is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


# Forward lines by autograd sequence number, for the backward of the same step: written on a miss, bounded by the cut.
_forward: dict[int, Line] = {}
_next_sequence = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_current_node = torch._C._current_autograd_node  # type: ignore[attr-defined]


def here() -> Line:
    """The user's line that is running now."""
    frame = user_frame(sys._getframe(1))
    if frame is None:
        return UNKNOWN
    line = Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
    node = _current_node()
    if node is None:
        _forward[_next_sequence()] = line
        if len(_forward) > 100_000:
            _forward.clear()
        return line
    origin = _forward.get(node._sequence_nr())
    return line if origin is None else line._replace(forward=origin[:3])
