"""How generated code is laid out: lines of at most 120 characters, broken where a reader (and `ruff format`) would."""

from __future__ import annotations

import json
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
    lines = textwrap.wrap(f'"""{text}', width, break_long_words=False, break_on_hyphens=False)
    if len(lines) == 1:  # only the closing quotes are too long: let the last words go with them
        lines = textwrap.wrap(lines[0], width - 3, break_long_words=False, break_on_hyphens=False)
    return [*lines, '"""']


def literal(value: object) -> str:
    """A constant as Python writes it, with double quotes; a list becomes a tuple."""
    if isinstance(value, list | tuple):
        return tuple_of(map(literal, value))
    return json.dumps(value) if isinstance(value, str) else repr(value)


def tuple_of(items: Iterable[str]) -> str:
    """A tuple of these expressions."""
    inside = list(items)
    return f"({inside[0]},)" if len(inside) == 1 else f"({', '.join(inside)})"


def wrapped(statement: str, depth: int = 0) -> list[str]:
    """One statement that will stand at this depth, in as many lines as it needs.

    What is too long is broken at its longest bracket.  The arguments of a call or of a function get one line together
    if that is enough; else, and in a tuple, list or dict always, each item gets a line, with a comma after the last.
    """
    if len(statement) + 4 * depth <= WIDTH:
        return [statement]
    start, end = _outermost(statement)
    if start < 0:
        return [statement]
    head, inside, tail = statement[: start + 1], statement[start + 1 : end], statement[end:]
    called = head[-2:-1].isidentifier() or head[-2:-1] == "]"
    if called and len(inside) + 4 * (depth + 1) <= WIDTH:
        return [head, *indented([inside]), tail]
    broken = [line for item in _items(inside) for line in wrapped(f"{item},", depth + 1)]
    return [head, *indented(broken), tail]


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
