"""A failure when a graph runs: eager's error, once, with the op and its line; everything else stays usable."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F
from support import bits
from torch import nn

import lazytensor as lt
from lazytensor.execute import cut

BAD = {
    "embedding": lambda d: F.embedding(torch.tensor([1, 9], device=d), torch.ones(4, 3, device=d)),
    "gather": lambda d: torch.ones(3, device=d).gather(0, torch.tensor([7], device=d)),
    "index_select": lambda d: torch.ones(3, device=d).index_select(0, torch.tensor([7], device=d)),
    "index": lambda d: torch.ones(3, device=d)[torch.tensor([5], device=d)],
    "take": lambda d: torch.ones(3, device=d).take(torch.tensor([5], device=d)),
    "scatter": lambda d: torch.zeros(3, device=d).scatter(0, torch.tensor([5], device=d), 1.0),
    "cholesky": lambda d: torch.linalg.cholesky(-torch.eye(2, device=d)),
    "nll_loss": lambda d: F.nll_loss(torch.zeros(2, 3, device=d), torch.tensor([0, 8], device=d)),
    "integer_division": lambda d: (
        torch.ones(2, device=d, dtype=torch.long) // torch.zeros(2, device=d, dtype=torch.long)
    ),
    "negative_power": lambda d: torch.tensor([2, 3], device=d) ** -1,
}


@pytest.mark.parametrize("name", BAD)
def test_the_error_is_eagers_with_a_note_and_raised_once(name):
    call = BAD[name]
    with pytest.raises(Exception) as eager:  # noqa: PT011
        call("cpu")
    kept = torch.arange(3.0, device="ltc") + 1
    broken = []
    with pytest.raises(type(eager.value)) as lazy:
        broken.append(call("ltc"))
        lt.sync(wait=True)
    assert str(lazy.value) == str(eager.value)
    lt.sync()
    lt.sync()
    assert kept.tolist() == [1, 2, 3]


def test_the_note_names_the_op_and_the_line_that_recorded_it():
    table, where = torch.ones(5, 7, device="ltc"), torch.tensor([[1, 9, 0]], device="ltc")
    line = sys._getframe().f_lineno + 1
    y = F.embedding(where, table)
    z = y.sum() * 2
    with pytest.raises(IndexError) as raised:
        z.item()
    (note,) = raised.value.__notes__
    assert "aten::embedding" in note and f"{__file__}:{line}" in note


def test_what_does_not_depend_on_the_failure_is_unharmed_and_the_rest_says_so():
    table = torch.ones(4, 3, device="ltc")
    before = table * 2
    broken = F.embedding(torch.tensor([9], device="ltc"), table)
    child = broken + 1
    after = table + before
    with pytest.raises(IndexError):
        lt.sync(wait=True)
    assert before.tolist() == [[2] * 3] * 4 and after.tolist() == [[3] * 3] * 4
    for lost in (broken, child):
        for _ in range(2):
            with pytest.raises(lt.errors.ValueLost, match="aten::embedding") as raised:
                lost.tolist()
            assert __file__ in str(raised.value) and "unharmed" in str(raised.value)
        with pytest.raises(lt.errors.ValueLost):
            lost + 1
    assert torch.full_like(before, 3).tolist() == [[3] * 3] * 4


def test_parameters_keep_their_value_when_a_step_fails():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 1)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    def step(index: int) -> None:
        optimizer.zero_grad()
        model(torch.tensor([index], device="ltc")).sum().backward()
        optimizer.step()
        lt.sync(wait=True)

    step(1)
    before = [bits(p) for p in model.parameters()]
    with pytest.raises(IndexError):
        step(17)
    assert [bits(p) for p in model.parameters()] == before
    optimizer.zero_grad()
    step(2)
    assert [bits(p) for p in model.parameters()] != before


def test_views_of_a_failed_tensor():
    broken = F.embedding(torch.tensor([9], device="ltc"), torch.ones(4, 3, device="ltc"))
    view = broken[0]
    with pytest.raises(IndexError):
        view.tolist()
    with pytest.raises(lt.errors.ValueLost):
        view.tolist()
    with pytest.raises(lt.errors.ValueLost):
        broken[0, 1].item()


def test_an_in_place_failure_keeps_the_old_value():
    x = torch.arange(3.0, device="ltc")
    lt.sync(wait=True)
    x.scatter_(0, torch.tensor([8], device="ltc"), 1.0)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="out of bounds"):
        x.tolist()
    assert x.tolist() == [0, 1, 2]


def test_the_same_failing_step_fails_again_when_it_is_known():
    for _ in range(3):
        y = F.embedding(torch.tensor([9], device="ltc"), torch.ones(4, 3, device="ltc"))
        with pytest.raises(IndexError):
            y.tolist()
    good = F.embedding(torch.tensor([1], device="ltc"), torch.ones(4, 3, device="ltc"))
    assert good.tolist() == [[1, 1, 1]]


def test_two_failures_raise_the_first_recorded():
    a = torch.ones(3, device="ltc").take(torch.tensor([5], device="ltc"))
    b = F.embedding(torch.tensor([9], device="ltc"), torch.ones(4, 3, device="ltc"))
    with pytest.raises(IndexError, match="take"):
        lt.sync(wait=True)
    for lost in (a, b):
        with pytest.raises(lt.errors.ValueLost):
            lost.tolist()


class Interrupts:
    """A backend in which running a graph is interrupted, as by Ctrl-C, until it is told not to."""

    def __init__(self) -> None:
        self.calls = 0
        self.broken = True


def test_an_interrupted_cut_loses_nothing(monkeypatch):
    from lazytensor.backend import reference

    whole = reference.Program.__call__
    state = Interrupts()

    def interrupted(self, *inputs):
        state.calls += 1
        if state.broken:
            raise KeyboardInterrupt
        return whole(self, *inputs)

    x = torch.arange(3.0, device="ltc")
    p = nn.Parameter(torch.ones(3, device="ltc"))
    lt.sync(wait=True)
    torch.manual_seed(1)
    y = (x * 2 + torch.rand(3, device="ltc")).tanh()
    v = y[1:]
    v.add_(1)
    with torch.no_grad():
        p.add_(y)
    monkeypatch.setattr(reference.Program, "__call__", interrupted)
    for read in (lt.sync, y.tolist, p.tolist):
        with pytest.raises(KeyboardInterrupt):
            read()
    assert state.calls == 3
    z = y * 3  # what is pending can be built upon
    state.broken = False
    torch.manual_seed(1)
    expected = (torch.arange(3.0) * 2 + torch.rand(3)).tanh()
    expected[1:].add_(1)
    assert bits(y) == bits(expected) and bits(z) == bits(expected * 3)
    assert bits(p) == bits(torch.ones(3) + expected)
    assert v.tolist() == expected[1:].tolist()
    calls = state.calls
    y.tolist()
    assert state.calls == calls, "what has run does not run again"


def test_an_interrupt_in_the_middle_of_an_op_of_the_first_run():
    """The interrupt comes out of an op in the middle of a graph, when half of it has run."""
    broken = [True]

    @torch.library.custom_op("ltctests::interrupting", mutates_args=())
    def interrupting(x: torch.Tensor) -> torch.Tensor:
        if broken[0]:
            raise KeyboardInterrupt
        return x + 1

    @interrupting.register_fake
    def _(x):
        return torch.empty_like(x)

    lt.register_op(interrupting)
    counter = torch.zeros((), device="ltc")
    counter += 1
    y = interrupting(counter * 2)
    counter += 1
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            counter.item()
    broken[0] = False
    assert (counter.item(), y.item()) == (2, 3)


def test_a_backend_that_fails_to_compile_leaves_everything_pending():
    class Refuses(lt.Backend):
        def compile(self, graph):
            raise ValueError("no")

    lt.register_backend("refuses", Refuses)
    x = torch.ones(2, device="ltc") + 1
    before = lt.current_backend().name if hasattr(lt.current_backend(), "name") else "reference"
    lt.set_backend("refuses")
    try:
        with pytest.raises(lt.errors.BackendFailed):
            x.tolist()
    finally:
        lt.set_backend(before)
    assert x.tolist() == [2, 2]
    assert cut.pending() == []
