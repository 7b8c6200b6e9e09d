"""The expected failures: one file, one line each with its reason, and a check that passes unexpectedly is a failure.

A line of ``expected.txt`` reads ``entry | dtypes | forms | samples | reason``; ``*`` stands for all.  Every check that
a line covers has to fail: if one does not, the line is out of date.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from lazytensor.conformance.opinfo import DIFFERENT, EQUAL, ERROR, EXPECTED, Outcome

FILE = Path(__file__).with_name("expected.txt")
UNEXPECTED = "unexpected pass"


@dataclass(frozen=True)
class Line:
    """One expected failure."""

    op: str
    dtypes: frozenset[str]
    forms: frozenset[str]
    samples: frozenset[str]
    reason: str

    def covers(self, outcome: Outcome) -> bool:
        """Whether this check is one that the line expects to fail."""
        return self.op == outcome.op and all(
            "*" in allowed or found in allowed
            for allowed, found in (
                (self.dtypes, outcome.dtype),
                (self.forms, outcome.form),
                (self.samples, str(outcome.sample)),
            )
        )


def parse(text: str) -> list[Line]:
    """The lines of an expected-failure file; comments begin with ``#``."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        parts = [part.strip() for part in line.split("|", 4)]
        if len(parts) != 5 or not all(parts):
            raise ValueError(f"{FILE.name}, line {number}: expected 'entry | dtypes | forms | samples | reason'")
        op, dtypes, forms, samples, reason = parts
        found.append(Line(op, _set(dtypes), _set(forms), _set(samples), reason))
    return found


def _set(text: str) -> frozenset[str]:
    return frozenset(part.strip() for part in text.split(","))


@functools.cache
def lines() -> dict[str, list[Line]]:
    """The file's lines by entry."""
    found: dict[str, list[Line]] = {}
    for line in parse(FILE.read_text(encoding="utf-8")):
        found.setdefault(line.op, []).append(line)
    return found


def judged(outcome: Outcome) -> Outcome:
    """The outcome in the light of what was expected: an expected failure, or an unexpected pass, is called so."""
    line = next((line for line in lines().get(outcome.op, ()) if line.covers(outcome)), None)
    if line is None:
        return outcome
    if outcome.status in (DIFFERENT, ERROR):
        return replace(outcome, status=EXPECTED, detail=f"{line.reason} ({outcome.detail})")
    if outcome.status == EQUAL:
        return replace(outcome, status=UNEXPECTED, detail=f"{FILE.name} expects a failure: {line.reason}")
    return outcome
