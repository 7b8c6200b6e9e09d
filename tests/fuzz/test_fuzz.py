"""Random programs agree with eager; planted bugs are found; a failure shrinks to a script that shows it."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lazytensor as lt
from lazytensor.fuzz import generate
from lazytensor.fuzz.campaign import Failure, check, run_programs
from lazytensor.fuzz.planted import BUGS
from lazytensor.fuzz.shrink import shrink

PROGRAMS, SHARES = 300, 6


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Thousands of new graphs are nothing to report here."""
    log = logging.getLogger("lazytensor")
    before = log.level
    log.setLevel(logging.ERROR)
    yield
    log.setLevel(before)


@pytest.mark.parametrize("share", range(SHARES))
def test_random_programs_agree_with_eager(share: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if share % 2:  # run as they are recorded while they are new
        monkeypatch.setattr(lt.current_backend(), "runs_ahead", True)
    count = PROGRAMS // SHARES
    failures = [f for f in run_programs(count, 50_000 + share * count, "reference") if f is not None]
    assert not failures, "\n\n".join(f.script for f in failures)


def test_the_same_seed_gives_the_same_program() -> None:
    assert generate.program(7) == generate.program(7)
    assert generate.program(7) != generate.program(8)


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found(name: str) -> None:
    with lt.backend("reference"), BUGS[name]():
        found = next((f for f in run_programs(2000, 0, "reference", small=False) if f is not None), None)
    assert found is not None


def test_a_failure_shrinks_to_a_script_that_runs_by_itself(tmp_path: Path) -> None:
    lines = ["t1 = torch.ones(3, device=D)", "t2 = t1 * 2", "t3 = t2 + 1", "t4 = t1 - 1"]
    small = shrink(lines, lambda shorter: "t2 = t1 * 2" in shorter and "t1 = torch.ones(3, device=D)" in shorter)
    assert small == lines[:2]
    assert check(small, 0, 0.0) is None
    failure = Failure(0, "none", small, "")
    from lazytensor.fuzz.shrink import script

    path = tmp_path / "failure.py"
    path.write_text(script(failure.lines, 0, "an example", "reference"))
    result = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "no difference"
