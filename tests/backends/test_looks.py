"""What operations give is kept on disk and known again, and nothing else is believed."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import diskcache, looks
from lazytensor.trace import record, shapes

PROGRAM = "program.py"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of its own, in which a graph of the program has been stored."""
    monkeypatch.setattr(looks, "_asked", set())
    monkeypatch.setattr(looks, "_kept", {})
    with lt.settings.scope(cache_dir=str(tmp_path / "cache")):
        folder = tmp_path / "graph"
        folder.mkdir()
        diskcache.store("0" * 40, folder, {"file": PROGRAM})
        yield


def step() -> torch.Tensor:
    """Results of many kinds: lists, tuples, parts that are undefined, views, numbers, dtypes, memory formats."""
    torch.manual_seed(0)
    x = torch.arange(24.0).reshape(2, 3, 4).to("ltc")
    layer = torch.nn.Linear(4, 4).to("ltc")
    normal = torch.nn.functional.layer_norm(layer(x), (4,))
    first, *_ = torch.split(normal * 2 + 1.5, [1, 1, 2], dim=2)
    best = x.max(dim=1)
    torch._foreach_add_([x.clone(memory_format=torch.contiguous_format)], 1)
    result = (first.to(torch.float64).sum() + best.values.mean() + best.indices.sum() + x[:, None].std()).sum()
    result.backward()
    return layer.weight.grad  # type: ignore[return-value]


def test_a_step_is_recorded_from_what_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    with lt.settings.scope(run_ahead=False):
        lt.clear_cache()
        expected = step().cpu()
        known = record.known_looks()
        assert len(known) > 25
        looks.keep(PROGRAM)
        lt.clear_cache()
        assert looks.recall(PROGRAM) and not looks.recall(PROGRAM)
        again = record.known_looks()
        assert again == {question: known[question] for question in again}
        assert len(known) - len(again) <= 2, [q[0].name for q in known.keys() - again.keys()]
        asked: list[str] = []
        infer = shapes.infer
        monkeypatch.setattr(shapes, "infer", lambda op, args: asked.append(op.name) or infer(op, args))
        assert torch.equal(step().cpu(), expected)
    assert len(asked) <= 2, asked


def test_only_what_belongs_to_this_program_and_these_flags_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step()
    looks.keep(PROGRAM)
    assert not looks.recall("another.py")
    monkeypatch.setattr(torch, "get_default_dtype", lambda: torch.float64)
    assert not looks.recall(PROGRAM)


def test_an_entry_that_was_changed_is_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    step()
    looks.keep(PROGRAM)
    file = diskcache.root() / looks._key(PROGRAM) / looks._FILE
    file.write_text(file.read_text().replace("float32", "float64"))
    lt.clear_cache()
    with caplog.at_level(logging.WARNING, "lazytensor"):
        assert not looks.recall(PROGRAM)
    assert [r.getMessage() for r in caplog.records if "is ignored" in r.getMessage()]
    assert not record._inferred


def test_there_is_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looks, "MOST", 5)
    with lt.settings.scope(run_ahead=False):
        step()
        looks.keep(PROGRAM)
        lt.clear_cache()
        assert looks.recall(PROGRAM)
    assert 0 < len(record._inferred) <= 5
