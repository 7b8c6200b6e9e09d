"""A step in a file runs anywhere and proves a backend; a damaged file is an error and nothing else."""

from __future__ import annotations

import contextlib
import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import lazytensor as lt


def record_a_step() -> tuple[torch.Tensor, torch.nn.Module]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh()).to("ltc")
    optimizer = torch.optim.Adam(model.parameters())
    loss = model(torch.randn(5, 4).to("ltc")).square().mean()
    loss.backward()
    optimizer.step()
    return loss, model


@pytest.fixture
def step_file(tmp_path: Path) -> Path:
    alive = record_a_step()
    path = lt.save_step(tmp_path / "adam")
    del alive
    return path


def test_a_saved_step_gives_its_results_again_on_every_backend(step_file: Path) -> None:
    step = lt.load_step(step_file)
    step.check("reference")
    step.check("ts", rtol=1e-6, atol=1e-7)


def test_saving_leaves_the_program_as_it_was(tmp_path: Path) -> None:
    loss, _ = record_a_step()
    lt.save_step(tmp_path / "step")
    torch.manual_seed(0)
    again, _ = record_a_step()
    assert loss.item() == again.item()


def test_a_changed_result_is_noticed(step_file: Path) -> None:
    step = lt.load_step(step_file)
    step.outputs[0] = step.outputs[0] + 1
    with pytest.raises(AssertionError):
        step.check("reference")


def test_there_must_be_something_to_save(tmp_path: Path) -> None:
    lt.sync()
    with pytest.raises(lt.errors.LazyTensorError, match="nothing pending"):
        lt.save_step(tmp_path / "nothing")


def test_a_file_cut_at_any_length_is_refused(step_file: Path, tmp_path: Path) -> None:
    whole = step_file.read_bytes()
    short = tmp_path / "short.step"
    for length in [*range(0, 64), *range(64, len(whole), 997)]:
        short.write_bytes(whole[:length])
        with pytest.raises(lt.errors.BadStepFile):
            lt.load_step(short)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_changed_bytes_loads_or_is_refused(step_file: Path, tmp_path: Path, data: st.DataObject) -> None:
    whole = bytearray(step_file.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    changed = tmp_path / "changed.step"
    changed.write_bytes(whole)
    with contextlib.suppress(lt.errors.BadStepFile):
        lt.load_step(changed)


def test_a_graph_that_does_more_than_compute_is_refused(step_file: Path, tmp_path: Path) -> None:
    raw = step_file.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    graph = json.loads(header["__metadata__"]["graph"])
    for name in ("aten::from_file", "aten::add_.Tensor", "aten::no_such_op"):
        graph["nodes"][0]["op"] = name
        header["__metadata__"]["graph"] = json.dumps(graph)
        text = json.dumps(header).encode()
        evil = tmp_path / "evil.step"
        evil.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])
        with pytest.raises(lt.errors.BadStepFile):
            lt.load_step(evil)
