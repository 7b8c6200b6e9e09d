"""Places in the user's program: from a code object and an instruction to file, line, the expression's text, and back.

Noting a code object and the number of an instruction costs nothing.  Python keeps the exact columns of each
instruction, so the expression that read a value (``loss.item()``) can be shown later.
"""

from __future__ import annotations

import dis
import functools
import itertools
import linecache
import os
import re
from types import CodeType, FrameType
from typing import Any, NamedTuple

from lazytensor.trace.source import Line


class Place(NamedTuple):
    """A line of the user's program."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{short(self.file)}:{self.line}"


NOWHERE = Place("<unknown>", 0, "<unknown>")


def where(frame: FrameType | None) -> tuple[CodeType | None, int]:
    """What to note of a frame, so that it need not be kept."""
    return (None, 0) if frame is None else (frame.f_code, frame.f_lasti)


@functools.lru_cache(maxsize=4096)
def place(code: CodeType | None, instruction: int) -> Place:
    """The place of an instruction, with the text of its expression."""
    if code is None:
        return NOWHERE
    line, end, start_column, end_column = next(
        itertools.islice(code.co_positions(), instruction // 2, None), (None, None, None, None)
    )
    if line is None:
        return Place(code.co_filename, code.co_firstlineno, code.co_name)
    text = linecache.getline(code.co_filename, line)
    if line == end and start_column is not None and end_column is not None:
        text = text.encode()[start_column:end_column].decode(errors="replace")  # columns count bytes
    return Place(code.co_filename, line, code.co_name, text.strip())


@functools.lru_cache(maxsize=4096)
def reason(cause: str, code: CodeType | None, instruction: int) -> str:
    """What a cut's cause looks like from the user's side."""
    if cause in ("sync", "synchronize"):
        return f"lt.{cause}()"
    if code is None:
        return cause
    text = place(code, instruction).text
    called = re.match(r"(print|float|int|bool|complex|repr|str|len|min|max|format)\(", text)
    if called and cause.startswith(("item", "copy", "print", "equal")):
        return f"{called[1]}()"
    method = re.search(r"\.(item|tolist|cpu|numpy|to|all|any|equal|allclose)\([^()]*\)$", text)
    if method and cause.startswith(("item", "copy", "equal")):
        return f".{method[1]}()"
    if cause == "item" and _opcode(code, instruction).startswith(("POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")):
        return "bool"
    return cause


@functools.lru_cache(maxsize=256)
def _opcodes(code: CodeType) -> dict[int, str]:
    return {i.offset: i.opname for i in dis.get_instructions(code)}


def _opcode(code: CodeType, instruction: int) -> str:
    return _opcodes(code).get(instruction, "")


def of(line: Line | None) -> Place:
    """The place of a node's line; for backward, the forward line it belongs to."""
    if line is None:
        return NOWHERE
    file, number, function = line.place
    return Place(file, number, function, linecache.getline(file, number).strip())


_cwd = os.getcwd() + os.sep


def short(file: str) -> str:
    """A file's path as a reader likes it: relative to where the program was started, if it is under it."""
    return file.removeprefix(_cwd)


def data(place: Place) -> dict[str, Any]:
    """A place as plain data."""
    return {"file": place.file, "line": place.line, "function": place.function, "text": place.text}
