"""Deferred values, step closures, and the origin of a NaN."""

from __future__ import annotations

import pytest
import torch
from marked import here

import lazytensor as lt
from lazytensor.inspect import events, observers


def test_observing_makes_no_cut() -> None:
    x = torch.ones(4).to("ltc")
    with lt.testing.assert_max_syncs(3), lt.testing.assert_one_graph_per_step():
        for step in range(3):
            x = x * 2
            lt.observe("x", x)
            lt.observe("sum", x.sum())
            if step == 0:
                assert lt.observed("x") == []  # not yet
            lt.sync()
    assert [(step, value.tolist()) for step, value in lt.observed("x")] == [
        (0, [2.0] * 4),
        (1, [4.0] * 4),
        (2, [8.0] * 4),
    ]
    assert [value.item() for _, value in lt.observed()["sum"]] == [8.0, 16.0, 32.0]


def test_an_observed_value_does_not_change_with_its_tensor() -> None:
    x = torch.ones(2).to("ltc")
    y = x + 1
    lt.observe("y", y)
    y.add_(10)
    lt.observe("y", y)
    lt.sync()
    assert [v.tolist() for _, v in lt.observed("y")] == [[2.0, 2.0], [12.0, 12.0]]


def test_a_view_and_data_can_be_observed() -> None:
    x = torch.arange(4.0).to("ltc")
    lt.observe("data", x)
    lt.observe("view", (x + 1)[1:3])
    lt.observe("host", torch.ones(1))
    x.add_(5)
    lt.sync()
    assert lt.observed("data")[0][1].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert lt.observed("view")[0][1].tolist() == [2.0, 3.0]
    assert lt.observed("host")[0][1].tolist() == [1.0]


def test_closures_run_after_the_step_in_order() -> None:
    seen: list[object] = []
    x = torch.ones(2).to("ltc") * 3
    lt.add_step_closure(lambda t: seen.append(t.tolist()), (x,))
    lt.add_step_closure(seen.append, ("second",))
    assert seen == []
    lt.sync()
    assert seen == [[3.0, 3.0], "second"]
    lt.sync()
    assert len(seen) == 2


def test_an_asynchronous_closure_runs_and_its_failure_is_raised_by_the_next_step() -> None:
    seen: list[str] = []

    def broken() -> None:
        raise ValueError("on purpose")

    lt.add_step_closure(seen.append, ("ran",), run_async=True)
    lt.add_step_closure(broken, run_async=True)
    lt.sync()
    observers.wait_for_closures()
    assert seen == ["ran"]
    lt.add_step_closure(seen.append, ("again",), run_async=True)
    with pytest.raises(RuntimeError, match="previously raised exception") as raised:
        lt.sync()
    assert isinstance(raised.value.__cause__, ValueError)
    lt.add_step_closure(seen.append, ("again",), run_async=True)
    lt.sync()
    observers.wait_for_closures()
    assert seen == ["ran", "again"]


# --- NaN ------------------------------------------------------------------------------------------------------------


def test_the_first_nan_is_found_with_its_line_and_inputs() -> None:
    x = torch.tensor([1.0, 0.0]).to("ltc")
    with pytest.raises(lt.errors.NotANumber) as raised, lt.detect_nan():
        y = x / x  # <division>
        z = y * 2
        z.sum().item()
    error = raised.value
    assert (error.op, error.place.line) == ("aten::div.Tensor", here("division"))
    assert "`x`: float32[2] min 0, max 1" in str(error)


def test_a_nan_of_backward_is_found_at_its_forward_line() -> None:
    x = torch.zeros(3).to("ltc").requires_grad_()
    with pytest.raises(lt.errors.NotANumber) as raised, lt.detect_nan():
        y = x.abs().sqrt()  # <sqrt>
        (y * 0).sum().backward()  # 0 / 0 in the backward of sqrt
    assert raised.value.place.line == here("sqrt")
    assert "in the backward of this line" in str(raised.value)


def test_a_nan_that_came_in_is_told_from_one_that_was_made() -> None:
    bad = torch.tensor([float("nan")]).to("ltc")
    with pytest.raises(lt.errors.NotANumber, match=r"`bad` .* already had 1 NaN of 1 values"), lt.detect_nan():
        kept = bad + 1
    del kept


def test_the_scope_runs_what_it_recorded_and_no_more() -> None:
    x = torch.ones(3).to("ltc")
    with lt.detect_nan():
        y = x.exp()
    assert [c.cause for c in events.all_cuts()] == ["detect_nan"]
    assert torch.equal(y.cpu(), torch.ones(3).exp())
    z = x.log() - x.log() / 0  # nobody looks
    z.cpu()


def test_after_a_finding_everything_is_still_pending() -> None:
    x = torch.tensor([-1.0]).to("ltc")
    with pytest.raises(lt.errors.NotANumber), lt.detect_nan():
        y = x.sqrt()
        y.cpu()
    assert y.isnan().item()


def test_uninitialised_memory_is_not_taken_for_a_finding() -> None:
    with lt.detect_nan():
        x = torch.empty(1000, device="ltc").fill_(1.0)
    assert x.sum().item() == 1000


def test_an_error_of_the_program_stays_what_it_is() -> None:
    weight = torch.ones(3, 2).to("ltc")
    with pytest.raises(IndexError), lt.detect_nan():
        torch.nn.functional.embedding(torch.tensor([7]).to("ltc"), weight).cpu()
