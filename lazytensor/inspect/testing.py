"""Assertions about how a program runs, for tests: context managers that fail with the diagnosis.

The pytest plugin ``pytest_lazytensor`` offers each as a fixture of the same name.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lazytensor.inspect import events
from lazytensor.inspect.events import Cut


@contextmanager
def _scope(found: list[Cut]) -> Iterator[None]:
    """Collect the cuts of a scope, those that failed included."""
    total = _total()
    try:
        yield
    finally:
        cuts = events.all_cuts()
        found.extend(cuts[len(cuts) - min(_total() - total, len(cuts)) :])


def _total() -> int:
    counters = events.folded.counters
    return len(events.cuts) + counters["CachedCompile"] + counters["UncachedCompile"]


def _listed(lines: list[str]) -> str:
    return "\n".join(f"  {line}" for line in lines[:20]) + (
        f"\n  … and {len(lines) - 20} more" if len(lines) > 20 else ""
    )


@contextmanager
def assert_no_recompile() -> Iterator[None]:
    """Fail if any cut in the scope compiles; the message says why it did."""
    cuts: list[Cut] = []
    with _scope(cuts):
        yield
    missed = [c for c in cuts if not c.hit]
    if missed:
        why = [str(c.known.blame) if c.known.blame is not None else f"{c.known.name} at {c.place}" for c in missed]
        raise AssertionError(f"{len(missed)} of {len(cuts)} cuts compiled a graph:\n{_listed(why)}")


@contextmanager
def assert_one_graph_per_step() -> Iterator[None]:
    """Fail if a step (what lies between two ``lt.sync()``) in the scope runs more than one graph."""
    cuts: list[Cut] = []
    with _scope(cuts):
        yield
    steps: dict[int, list[Cut]] = {}
    for cut in cuts:
        steps.setdefault(cut.step, []).append(cut)
    split = {step: row for step, row in steps.items() if len(row) > 1}
    if split:
        lines = [
            f"step {step}: " + ", ".join(f"{c.reason} at {c.place}" for c in row[:8]) for step, row in split.items()
        ]
        raise AssertionError(f"{len(split)} of {len(steps)} steps ran more than one graph:\n{_listed(lines)}")


@contextmanager
def assert_no_fallback() -> Iterator[None]:
    """Fail if an op in the scope runs eagerly on the CPU."""
    before = set(map(id, events.fallbacks))
    yield
    new = [f for f in events.fallbacks if id(f) not in before]
    if new:
        lines = [f"{f.name} at {f.place}: {f.reason}" for f in new]
        raise AssertionError(f"{len(new)} operations ran eagerly on the CPU:\n{_listed(lines)}")


@contextmanager
def assert_max_syncs(count: int) -> Iterator[None]:
    """Fail if there are more cuts in the scope than this, whatever their cause."""
    cuts: list[Cut] = []
    with _scope(cuts):
        yield
    if len(cuts) > count:
        lines = [f"{c.reason} at {c.place}" for c in cuts]
        raise AssertionError(f"{len(cuts)} cuts, where {count} were allowed:\n{_listed(lines)}")
