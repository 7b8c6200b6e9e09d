"""Eight programs, each with one planted problem: the diagnostics name the cause and the exact line.

Each program is a script in its own file; the line to be found is marked in it.
"""

from __future__ import annotations

import logging
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from marked import marked

import lazytensor as lt

Script = Callable[[str], "Ran"]


class Ran:
    """A script that was run: its file, its variables, and the line of its problem."""

    def __init__(self, file: str, space: dict[str, Any]) -> None:
        self.file = file
        self.space = space
        self.line = marked(file, "problem")

    def is_at(self, found: dict[str, Any]) -> bool:
        return (found["file"], found["line"]) == (self.file, self.line)


@pytest.fixture
def script(tmp_path: Path) -> Script:
    def run(text: str) -> Ran:
        file = tmp_path / "script.py"
        file.write_text("import torch\nimport lazytensor as lt\n" + text)
        return Ran(str(file), runpy.run_path(str(file), run_name="script"))

    return run


TRAINING = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1)).to("ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


def test_a_shape_that_changes(script: Script, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lazytensor.recompile")
    ran = script(
        TRAINING
        + """
for size in (32, 32, 32, 32, 31):
    batch = torch.randn(size, 4).to("ltc")
    optimizer.zero_grad()
    loss = model(batch).square().mean()  # <problem>
    loss.backward()
    optimizer.step()
    lt.sync()
"""
    )
    last = lt.blame()[-1]
    assert last.first is not None
    assert last.first.kind == "shape"
    assert last.first.what == "dim 0 of `batch`:"
    assert (last.first.old, last.first.new) == (32, 31)
    assert ran.is_at(last.first.data["place"])
    assert last.first.module == "model.0"
    assert "took 2 values {32, 31}: pad or drop the last batch" in last.advice
    (loud,) = [r for r in caplog.records if r.levelno == logging.WARNING]  # the two compilations of warm-up are quiet
    assert f"script.py:{ran.line}" in loud.getMessage()
    assert len(caplog.records) == 3


def test_a_scalar_that_changes_structure(script: Script) -> None:
    ran = script(
        """
x = torch.randn(8, 16).to("ltc")
for step in range(5):
    y = x.exp()
    z = y[:, : 4 + step].sum()  # <problem>
    lt.sync()
"""
    )
    blames = list(lt.blame())[1:]
    assert len(blames) == 4
    for number, blame in enumerate(blames):
        assert blame.first is not None
        assert (blame.first.kind, blame.first.what) == ("attribute", "`end`")
        assert (blame.first.old, blame.first.new) == (str(4 + number), str(5 + number))
        assert blame.first.op == "aten::slice.Tensor"
        assert ran.is_at(blame.first.data["place"])
        assert "part of the structure" in blame.advice


def test_item_in_the_loop(script: Script) -> None:
    ran = script(
        TRAINING
        + """
total = 0.0
for _ in range(6):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4, device="ltc")).square().mean()
    loss.backward()
    total += loss.item()  # <problem>
    optimizer.step()
    lt.sync()
"""
    )
    by_reason = {line["reason"]: line for line in lt.syncs().data["lines"]}
    item = by_reason[".item()"]
    assert ran.is_at(item)
    assert item["text"] == "loss.item()"
    assert (item["count"], item["splits"]) == (6, 6)
    assert by_reason["lt.sync()"]["splits"] == 0


def test_a_forgotten_sync(script: Script) -> None:
    ran = script(
        TRAINING
        + """
for _ in range(12):
    optimizer.zero_grad()
    loss = model(torch.ones(8, 4, device="ltc")).square().mean()
    loss.backward()
    optimizer.step()  # <problem>
report = lt.explain()
"""
    )
    (repeated,) = ran.space["report"].data["repeated"]
    assert ran.is_at(repeated)
    assert repeated["times"] >= 10
    assert f"call lt.sync() at the end of each step, after {ran.file}:{ran.line}" in str(ran.space["report"])


def test_an_op_without_a_kernel(script: Script) -> None:
    ran = script(
        """
x = torch.arange(10.0).to("ltc")
for _ in range(3):
    y = x * 2
    z = torch.masked_select(y, y > 9)  # <problem>
    lt.sync()
"""
    )
    (row,) = lt.fallbacks().data
    assert row["op"] == "aten::masked_select"
    assert ran.is_at(row)
    assert row["count"] == 3
    assert row["bytes_in"] == 3 * (10 * 4 + 10)  # the values and the mask
    assert row["bytes_out"] == 3 * 5 * 4
    assert any(ran.is_at(line) and line["reason"] == "aten::masked_select" for line in lt.syncs().data["lines"])


def test_a_nan(script: Script) -> None:
    ran = script(
        """
x = torch.tensor([4.0, 1.0, -1.0]).to("ltc")
raised = None
try:
    with lt.detect_nan():
        y = x * 2
        z = y.log()  # <problem>
        loss = (z + 1).sum()
except lt.errors.NotANumber as error:
    raised = error
"""
    )
    error = ran.space["raised"]
    assert error.op == "aten::log"
    assert (error.place.file, error.place.line) == (ran.file, ran.line)
    assert "1 of 3 values" in str(error)
    assert "min -2, max 8" in str(error)


def test_a_list_that_grows(script: Script) -> None:
    ran = script(
        """
x = torch.ones(3, device="ltc")
losses = []
for _ in range(5):
    losses.append((x * 2).sum())
    mean = torch.stack(losses).mean()  # <problem>
    lt.sync()
"""
    )
    blames = list(lt.blame())[1:]
    assert len(blames) == 4
    for number, blame in enumerate(blames, 1):
        assert blame.first is not None
        assert blame.first.kind == "inputs"
        assert (blame.first.old, blame.first.new) == (number, number + 1)
        assert ran.is_at(blame.first.data["place"])
        assert "a list of tensors changed its length" in blame.advice


def test_a_model_moved_twice(script: Script) -> None:
    ran = script(
        TRAINING
        + """
for _ in range(4):
    optimizer.zero_grad()
    model(torch.ones(8, 4, device="ltc")).square().mean().backward()
    optimizer.step()
    model.cpu()  # <problem>
    model.to("ltc")
    lt.sync()
"""
    )
    moved = [line for line in lt.syncs().data["lines"] if line["reason"] == ".cpu()"]
    assert len(moved) == 1
    assert ran.is_at(moved[0])
    assert moved[0]["count"] == 4
    parameters = sum(p.numel() * 4 for p in ran.space["model"].parameters())
    assert lt.metrics.counter_value("OutboundBytes") >= 4 * parameters
