"""Many programs one after the other: what passed, what failed, and the small script of each failure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lazytensor.fuzz import compare, generate, shrink
from lazytensor.fuzz.run import run

TOLERANCE = {"reference": 0.0, "ts": 1e-5, "inductor": 2e-2, "auto": 2e-2}


@dataclass
class Failure:
    """A program on which ltc and eager differ."""

    seed: int
    difference: str
    lines: list[str]
    script: str


def check(lines: list[str], seed: int, tolerance: float) -> str | None:
    """The difference between CPU eager and ltc on one program, which runs three times: as new structure, as structure
    that the tables know, and as calls that the compiled recorder has found there.
    """
    import lazytensor as lt

    eager = run(lines, seed, "cpu", "cpu", lambda: None)
    for _ in range(3):
        lazy = run(lines, seed, "ltc:0", "ltc:1", lt.sync)
        found = compare.difference(eager, lazy, lines, tolerance)
        if found is not None:
            return found
    return None


def _kind(difference: str | None) -> str | None:
    """What sort of difference it is: a shrunk program must show the same sort."""
    if difference is None:
        return None
    if difference.startswith("line "):
        return "error"
    return difference.split(":")[0].rpartition(".")[2]


def run_programs(count: int, seed: int, backend: str, lines: int = 24, small: bool = True) -> Iterator[Failure | None]:
    """Run programs; yields None for each that passes, and the failure, shrunk, for each that does not."""
    import lazytensor as lt

    tolerance = TOLERANCE.get(backend, 1e-4)
    together = 1 if lt.current_backend().runs_ahead else 200  # steps that are to run ahead have to be new
    for number in range(count):
        program = generate.program(seed + number, lines)
        found = check(program, seed + number, tolerance)
        if number % together == together - 1:
            lt.clear_cache()
            gc.collect()
        if found is None:
            yield None
            continue
        yield _failure(program, seed + number, found, tolerance, backend, small)


def _failure(lines: list[str], seed: int, found: str, tolerance: float, backend: str, small: bool) -> Failure:
    kind = _kind(found)
    fails: Callable[[list[str]], bool] = lambda shorter: _kind(check(shorter, seed, tolerance)) == kind  # noqa: E731
    if small and fails(lines):
        lines = shrink.shrink(lines, fails)
        found = check(lines, seed, tolerance) or found
    return Failure(seed, found, lines, shrink.script(lines, seed, found, backend))


def plain(failure: Failure) -> dict[str, Any]:
    """A failure as plain data."""
    return {"seed": failure.seed, "difference": failure.difference, "lines": failure.lines}
