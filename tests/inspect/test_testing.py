"""The assertions for tests: they pass when they should, and fail with the diagnosis."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from marked import here

import lazytensor as lt
from pytest_lazytensor import max_syncs, no_fallback, no_recompile, one_graph_per_step

__all__ = ["max_syncs", "no_fallback", "no_recompile", "one_graph_per_step"]  # fixtures of these tests


def step(size: int = 4) -> torch.Tensor:
    x = torch.ones(size).to("ltc").exp()  # <exp>
    lt.sync()
    return x


def test_no_recompile_passes_when_warm_and_names_the_difference_when_not() -> None:
    step()
    with lt.testing.assert_no_recompile():
        step()
        step()
    with pytest.raises(AssertionError) as raised, lt.testing.assert_no_recompile():
        step(5)
    assert "1 of 1 cuts compiled" in str(raised.value)
    assert f"4 → 5, aten::exp at {Path(__file__)}:{here('exp')}".split(" at ")[0] in str(raised.value)


def test_one_graph_per_step() -> None:
    with lt.testing.assert_one_graph_per_step():
        step()
        step()
    with pytest.raises(AssertionError, match=r"1 of 2 steps ran more than one graph") as raised:
        with lt.testing.assert_one_graph_per_step():
            step()
            (torch.ones(3).to("ltc") * 2).sum().item()  # <item>
            step()
    assert f"test_testing.py:{here('item')}" in str(raised.value)


def test_no_fallback() -> None:
    x = torch.ones(4).to("ltc")
    with lt.testing.assert_no_fallback():
        x.exp()
    with pytest.raises(AssertionError, match="aten::nonzero"), lt.testing.assert_no_fallback():
        torch.nonzero(x)


def test_max_syncs() -> None:
    with lt.testing.assert_max_syncs(2):
        step()
        step()
    with pytest.raises(AssertionError, match=r"2 cuts, where 1 were allowed"), lt.testing.assert_max_syncs(1):
        step()
        step()


def test_an_error_inside_of_the_scope_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError), lt.testing.assert_max_syncs(0):
        step()
        raise ZeroDivisionError


def test_the_fixtures_are_the_context_managers(
    assert_no_recompile: Any, assert_one_graph_per_step: Any, assert_no_fallback: Any, assert_max_syncs: Any
) -> None:
    step()
    with assert_no_recompile(), assert_one_graph_per_step(), assert_no_fallback(), assert_max_syncs(1):
        step()


def test_the_plugin_is_announced_to_pytest() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["pytest11"] == {"lazytensor": "pytest_lazytensor"}
    assert "pytest_lazytensor" in project["tool"]["setuptools"]["py-modules"]
