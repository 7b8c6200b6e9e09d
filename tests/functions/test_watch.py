"""The outermost pure function that records much is found, and found again by the next process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lazytensor as lt
from lazytensor.backend import compiler
from lazytensor.execute import cut
from lazytensor.functions import watch, whole

pytestmark = [
    pytest.mark.skipif(
        compiler.find() is None or not lt.settings.compiled_recorder,
        reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
    ),
    pytest.mark.usefixtures("alone"),
]

CALLED: list[Any] = []


def step(model: Any, x: Tensor) -> Tensor:
    CALLED.append(x)  # so that this one cannot be it
    CALLED.clear()
    return model(x).sum()


class Deep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(30):
            x = torch.tanh(x) * i
        return x


def test_the_outermost_pure_function_that_records_much_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOKS", (cut.hits + 3,))
    monkeypatch.setattr(cut, "look_at", cut.hits + 3)
    model, x = Deep(), torch.randn(4)
    for _ in range(20):
        ours = step(model, x.to("ltc"))
        lt.sync(wait=True)
    assert sys.getprofile() is None
    report = lt.whole_functions()
    rows = {row["function"]: row for row in report.data}
    assert rows["step"]["reason"] and rows["Deep.forward"]["reason"] is None
    assert rows["Deep.forward"]["calls"] >= 5 and "recorded as a whole" in str(report)
    assert torch.equal(ours.cpu(), step(model, x))


PROGRAM = """
import torch
import lazytensor as lt
from lazytensor.functions import whole

def rollout(state):
    for i in range(60):
        state = torch.tanh(state) * 0.5
    return state

x = torch.ones(4, device="ltc")
for step in range(STEPS):
    y = rollout(x)
    lt.sync(wait=True)
print([(each.name, each.hits, each.reason) for each in whole.wholes], y.sum().item())
"""


def test_a_restarted_program_tries_what_was_found_before(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    extension = str(lt.settings.cache_directory())
    said = []
    for steps in (40, 6):
        program.write_text(PROGRAM.replace("STEPS", str(steps)))
        done = subprocess.run(
            [sys.executable, str(program)],
            env=os.environ | {"LAZYTENSOR_CACHE_DIR": extension, "LAZYTENSOR_BACKEND": "reference"},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stdout)
    assert "('rollout', " in said[0] and said[1].startswith("[('rollout', 3, None)]"), said
    assert said[0].split("]")[1] == said[1].split("]")[1]


def test_nothing_is_looked_at_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "LOOKS", (cut.hits + 3,))
    monkeypatch.setattr(cut, "look_at", cut.hits + 3)
    with lt.settings.scope(whole_functions=False):
        for _ in range(12):
            step(Deep(), torch.randn(4, device="ltc"))
            lt.sync(wait=True)
    assert not any(each.name == "step" for each in whole.wholes)


@pytest.mark.parametrize("ending", ["counted anew", "another step"])
def test_a_watch_ends_where_the_steps_do(monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    """The profiling hook was left on for as many cuts as had been counted before ``lt.clear_cache()``."""
    monkeypatch.setattr(watch, "LOOKS", (cut.hits + 3,))
    monkeypatch.setattr(cut, "look_at", cut.hits + 3)
    monkeypatch.setattr(cut, "missed", watch._break_off)
    model = Deep()
    for _ in range(20):
        kept = step(model, torch.randn(4, device="ltc"))
        lt.sync(wait=True)
        if sys.getprofile() is not None:
            break
    assert sys.getprofile() is not None
    if ending == "counted anew":
        lt.clear_cache()
    else:
        kept = torch.ones(7, 5, 3, device="ltc").erf().sum(1)
        lt.sync(wait=True)
    assert sys.getprofile() is None and cut.look_at == watch.LOOKS[0]
