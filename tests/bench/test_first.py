"""`lazytensor bench first`: first steps of new processes, and what becomes of them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from lazytensor.bench import first
from lazytensor.bench.runner import AUTO, EAGER


def test_the_ratio_is_that_of_neighbours() -> None:
    found = {EAGER.name: [1.0, 4.0, 2.0], AUTO.name: [2.0, 4.0, 3.0]}
    assert first.ratio(found) == 1.5
    assert first.ratio({EAGER.name: [1.0, 2.0], AUTO.name: [2.0]}) is None
    assert first.ratio({EAGER.name: [], AUTO.name: []}) is None


def test_each_system_takes_a_first_step_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first, "QUICK_TURNS", 1)
    result = first.run(quick=True, workloads=("chain_10",))
    (lane,) = result["lanes"]
    assert (
        lane["ratio"] == lane["seconds"][AUTO.name][0] / lane["seconds"][EAGER.name][0] == result["goals"][0]["value"]
    )
    page = io.StringIO()
    first.render(result, Console(file=page, width=120))
    assert "chain_10" in page.getvalue()
