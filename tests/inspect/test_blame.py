"""A cut that misses is compared with the nearest known one, and the first difference is named."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from marked import here

import lazytensor as lt
from lazytensor.inspect import blame
from lazytensor.inspect.blame import Blame


def twice(step: Callable[[int], object]) -> Blame:
    """What is blamed for the second of two different steps."""
    for number in range(2):
        kept = step(number)
        lt.sync()
        del kept
    assert len(lt.blame()) == 2
    found = lt.blame()[-1]
    assert found.old == lt.blame()[0].graph
    return found


def test_another_operation() -> None:
    x = torch.ones(4).to("ltc")

    def step(number: int) -> torch.Tensor:
        y = x.exp()
        if number:
            return y.sin() + 1  # <sin>
        return y.cos() + 1

    first = twice(step).first
    assert first is not None
    assert (first.kind, first.old, first.new) == ("op", "aten::cos", "aten::sin")
    assert first.place.line == here("sin")


def test_another_dtype_of_the_data() -> None:
    kinds = [torch.float32, torch.float64]

    def step(number: int) -> torch.Tensor:
        data = torch.ones(4, dtype=kinds[number]).to("ltc")
        return data.exp()

    first = twice(step).first
    assert first is not None
    assert (first.kind, first.old, first.new) == ("dtype", torch.float32, torch.float64)


def test_a_number_of_another_type() -> None:
    x = torch.ones(4).to("ltc")
    first = twice(lambda number: x * (2.0 if number else 2)).first
    assert first is not None
    assert (first.kind, first.old, first.new) == ("number", "int", "float")


def test_a_number_of_another_value_is_no_difference() -> None:
    x = torch.ones(4).to("ltc")
    for number in range(3):
        kept = x * (0.5 + number)
        lt.sync()
        del kept
    assert len(lt.blame()) == 1


def test_another_result_alive() -> None:
    x = torch.ones(4).to("ltc")

    def step(number: int) -> list[torch.Tensor]:
        y = x.exp()  # <exp>
        z = y.sum()
        return [y, z] if number else [z]

    first = twice(step).first
    assert first is not None
    assert (first.kind, first.op) == ("results", "aten::exp")
    assert first.place.line == here("exp")


def test_the_cause_comes_before_what_follows_from_it() -> None:
    def step(number: int) -> torch.Tensor:
        batch = torch.ones(8 - number, 6).to("ltc")
        return (batch.view(-1, 3) * 2).view(-1, 2).sum(0)  # views pass sizes on

    blame = twice(step)
    assert blame.first is not None
    assert (blame.first.kind, blame.first.old, blame.first.new) == ("shape", 8, 7)


def test_a_size_that_grows_gets_its_own_advice() -> None:
    for length in range(3, 8):
        cache = torch.ones(1, length).to("ltc")
        kept = cache * 2
        lt.sync()
        del kept
    assert "took 5 values {3, 4, 5, 6, 7} and grows: preallocate it" in lt.blame()[-1].advice


def test_data_is_called_by_the_name_of_its_parameter() -> None:
    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight

    nets = [Net().to("ltc"), Net().to("ltc")]
    nets[1].weight = torch.nn.Parameter(torch.ones(1, device="ltc"))
    lt.sync()
    first = twice_with(nets)
    assert first.what == "dim 0 of `Net.weight`:"


def twice_with(nets: list[torch.nn.Module]) -> lt.inspect.blame.Difference:
    before = len(lt.blame())
    for net in nets:
        kept = net(torch.ones(4, device="ltc"))
        lt.sync()
        del kept
    assert len(lt.blame()) == before + 2
    first = lt.blame()[-1].first
    assert first is not None
    return first


def test_looking_for_names_passes_over_what_has_no_storage() -> None:
    sparse = torch.eye(3).to_sparse().to("ltc")
    x = torch.ones(37, device="ltc")
    before = len(lt.blame())
    for width in (31, 33):
        y = x[:width] * 2
        lt.sync()
    assert len(lt.blame()) == before + 2
    assert sparse.layout is torch.sparse_coo


def test_looking_for_names_keeps_no_variable_alive() -> None:
    def step(number: int) -> None:
        batch = torch.ones(8 + number).to("ltc")
        kept = batch * 2
        lt.sync()  # looks at the variables of this frame
        del kept
        other = batch + 1
        lt.sync()
        assert lt.history().data["graphs"][-1]["ops"] == 1
        del other

    step(0)
    step(1)


def test_the_log_is_quiet_during_warm_up_and_loud_after_it(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lazytensor.recompile")
    levels = []
    for size in (8, 8, 8, 7, 8, 6):
        kept = torch.ones(size).to("ltc") * 2
        lt.sync()
        del kept
        levels.append([r.levelno for r in caplog.records])
        caplog.clear()
    loud, quiet = [logging.WARNING], [logging.INFO]
    assert levels == [quiet, [], [], loud, [], loud]


def test_a_diff_is_printed_in_full() -> None:
    x = torch.ones(4).to("ltc")
    blame = twice(lambda number: (x.clamp(min=0.0), x.sum(0, keepdim=bool(number))))
    assert "`keepdim` False → True" in blame.full
    assert "part of the structure" in str(lt.blame())
    assert "keepdim" in lt.blame()._repr_html_()
    assert lt.blame().data[-1]["differences"][0]["what"] == "`keepdim`"


def test_a_deep_graph_is_compared_without_recursion() -> None:
    def step(number: int) -> torch.Tensor:
        x = torch.ones(2 + number).to("ltc")
        for _ in range(5000):
            x = x + 1
        return x

    first = twice(step).first
    assert first is not None
    assert (first.old, first.new) == (2, 3)


def test_another_backend() -> None:
    x = torch.ones(4).to("ltc")

    def step(number: int) -> torch.Tensor:
        with lt.backend(("reference", "ts")[number]):
            y = x.exp().cosh()
            lt.sync()
        return y

    blame = twice(step)
    assert str(blame).endswith(f"it is {blame.old}, which was known to the backend 'reference' only")


def test_first_steps_are_compared_when_somebody_asks_and_the_names_are_those_of_their_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[str] = []
    compare = blame._compare
    monkeypatch.setattr(blame, "_compare", lambda known: compared.append(known.name) or compare(known))

    def step(batch: torch.Tensor) -> torch.Tensor:
        return batch.exp()

    for length in (4, 5):
        batch = torch.ones(length).to("ltc")
        kept = step(batch)
        lt.sync()
        del kept
    assert not compared
    batch = torch.zeros(1)
    asked = lt.blame()
    assert len(compared) == len(asked) == 2 and len(lt.blame()) == 2 == len(compared)
    assert asked[1].first is not None and "`batch`" in str(asked[1].first)


def test_a_third_miss_of_one_cut_is_compared_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "lazytensor.recompile"):
        for length in (4, 5, 6):
            kept = torch.ones(length).to("ltc").exp()
            lt.sync()
            del kept
    assert len(caplog.records) == 1
