"""How generated code is laid out: lines of at most 120 characters, broken where a reader (and `ruff format`) would."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

INDENT = "    "
WIDTH = 120
_PAIRS = {"(": ")", "[": "]", "{": "}"}


def indented(lines: Iterable[str], depth: int = 1) -> list[str]:
    """The lines moved to the right; empty ones stay empty."""
    return [INDENT * depth + line if line else line for line in lines]


def docstring(text: str, depth: int = 1) -> list[str]:
    """A docstring that stands at this depth, in one line or in several."""
    text = text.replace("\\", "\\\\")
    if len(text) + 6 + 4 * depth <= WIDTH:
        return [f'"""{text}"""']
    width = WIDTH - 4 * depth
    first, *rest = textwrap.wrap(f'"""{text}', width, break_long_words=False, break_on_hyphens=False)
    return [first, *rest, '"""']


def wrapped(statement: str, depth: int = 0) -> list[str]:
    """One statement that will stand at this depth, in as many lines as it needs.

    What is too long is broken at its first bracket that closes late enough: the inside gets a line of its own, or, if
    that is too long as well, one line for each item, with a comma after the last.
    """
    if len(statement) + 4 * depth <= WIDTH:
        return [statement]
    start, end = _outermost(statement)
    if start < 0:
        return [statement]
    head, inside, tail = statement[: start + 1], statement[start + 1 : end], statement[end:]
    items = _items(inside)
    lines = [head]
    one_line = inside.rstrip(", ") if len(items) > 1 or not inside.endswith(",") else inside
    if len(one_line) + 4 * (depth + 1) <= WIDTH and not (head.endswith("= (") and len(items) > 1):
        lines += indented([one_line])
    else:
        for item in items:
            broken = wrapped(item + ("" if item == "*" or item.startswith("**") else ","), depth + 1)
            if item == "*":
                broken = ["*,"]
            lines += indented(broken)
    return [*lines, tail]


def _outermost(statement: str) -> tuple[int, int]:
    """The bracket to break at: the last one that closes at the outermost level, which a call's arguments do."""
    best = (-1, -1)
    stack: list[int] = []
    quote = ""
    for i, c in enumerate(statement):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in _PAIRS:
            stack.append(i)
        elif c in ")]}":
            start = stack.pop()
            if not stack and i - start > best[1] - best[0]:
                best = (start, i)
    return best


def _items(inside: str) -> list[str]:
    """What stands between the commas of the outermost level."""
    found, depth, quote, begin = [], 0, "", 0
    for i, c in enumerate(inside):
        if quote:
            quote = "" if c == quote else quote
        elif c in "\"'":
            quote = c
        elif c in _PAIRS:
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == "," and depth == 0:
            found.append(inside[begin:i].strip())
            begin = i + 1
    found.append(inside[begin:].strip())
    return [item for item in found if item]
