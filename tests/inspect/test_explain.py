"""``explain`` tells before paying, ``analyze`` measures, ``why`` shows the slice: all against known facts."""

from __future__ import annotations

import json

import pytest
import torch
from marked import here
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import lazytensor as lt
from lazytensor.inspect import events


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.second = nn.Conv1d(1, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).relu()  # <hidden>
        return self.second(hidden.unsqueeze(1)).mean()


def test_explain_runs_nothing_and_counts_what_is_pending() -> None:
    x = torch.ones(4, 8).to("ltc")
    y = x.exp()  # <exp>
    z = y @ y.t()  # <matmul>
    report = lt.explain()
    assert events.cuts == []
    data = report.data
    assert data["ops"] == 3
    assert data["bytes_in"] == 4 * 8 * 4
    assert data["bytes_out"] == 4 * 8 * 4 + 4 * 4 * 4
    assert data["flops"] == 2 * 4 * 8 * 4
    lines = {row["line"]: row for row in data["lines"]}
    assert lines[here("exp")]["ops"] == 1
    assert lines[here("exp")]["bytes"] == 4 * 8 * 4
    assert lines[here("matmul")]["ops"] == 2
    assert lines[here("matmul")]["flops"] == data["flops"]
    del z


def test_flops_are_those_of_pytorchs_counter() -> None:
    model = Small()
    data = torch.randn(5, 8)
    with FlopCounterMode(display=False) as counter:
        model(data).backward()
    ltc = Small().to("ltc")
    loss = ltc(data.to("ltc"))
    loss.backward()
    assert lt.explain().data["flops"] == counter.get_total_flops()


def test_flops_and_operations_are_grouped_by_module() -> None:
    model = Small().to("ltc")
    loss = model(torch.randn(5, 8).to("ltc"))
    modules = {row["module"]: row for row in lt.explain().data["modules"]}
    assert modules["Small.first"]["flops"] == 2 * 5 * 8 * 16
    assert modules["Small"]["flops"] == modules["Small.first"]["flops"] + modules["Small.second"]["flops"]
    assert modules["Small"]["ops"] == lt.explain().data["ops"]
    del loss


def test_peak_memory_of_a_chain() -> None:
    x = torch.ones(256).to("ltc")
    y = x.exp().sin().cos()  # two of the chain are alive at a time, beside the input
    data = lt.explain().data
    assert data["peak_bytes"] == 3 * 1024
    assert data["memory"] == [2048, 2048, 2048]
    del y


def test_views_take_no_memory() -> None:
    x = torch.ones(256).to("ltc")
    y = x.exp().view(16, 16).t()[0]
    z = y + 1
    del y
    assert lt.explain().data["peak_bytes"] == 2 * 1024 + 16 * 4
    del z


def test_whether_the_cut_would_hit_and_why_not() -> None:
    def step(size: int) -> torch.Tensor:
        batch = torch.ones(size, 4).to("ltc")
        return batch.exp()  # <step>

    new = step(3)
    assert "nothing like it is known" in str(lt.explain())
    lt.sync()
    known = step(3)
    assert lt.explain().data["hit"]
    assert "the cut hits the cache" in str(lt.explain())
    lt.sync()
    other = step(2)
    why = lt.explain().data["why_not"]
    assert (why["differences"][0]["old"], why["differences"][0]["new"]) == ("3", "2")
    assert why["differences"][0]["place"]["line"] == here("step")
    before = len(lt.blame())
    lt.sync()
    assert len(lt.blame()) == before + 1
    del new, known, other


def test_analyze_runs_once_and_measures_each_line() -> None:
    x = torch.full((512, 512), 0.01).to("ltc")
    y = x @ x  # <product>
    z = y + 1  # <sum>
    report = lt.analyze()
    (cut,) = events.all_cuts()
    assert cut.cause == "analyze"
    lines = {row["line"]: row["seconds"] for row in report.data["lines"]}
    assert set(lines) == {here("product"), here("sum")}
    assert min(lines.values()) > 0
    assert report.data["seconds"] > sum(lines.values())
    torch.testing.assert_close(z.cpu(), torch.full((512, 512), 0.01) @ torch.full((512, 512), 0.01) + 1)
    assert len(events.cuts) == 1  # reading it ran nothing again


def test_analyze_with_nothing_pending() -> None:
    assert lt.analyze().data["ops"] == 0
    assert "nothing is pending" in str(lt.explain())


def test_reports_print_anywhere() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    x = torch.ones(4).to("ltc").exp()  # <printed>
    report = lt.explain()
    where = f"test_explain.py:{here('printed')}"
    assert where in str(report)
    assert repr(report) == str(report)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(report)
    assert where in console.export_text()
    assert where in report._repr_html_()
    json.dumps(report.data)
    del x


def test_text_from_the_program_is_escaped_in_a_notebook() -> None:
    x = torch.ones(4).to("ltc")
    y = x.exp() if "<b>" else x
    page = lt.explain()._repr_html_()
    assert "&lt;b&gt;" in page
    assert '"<b>"' not in page
    del y


def test_why_shows_the_slice_that_makes_a_tensor() -> None:
    x = torch.ones(4).to("ltc")
    other = x.tan()
    y = x.exp()  # <one>
    z = y + 1  # <two>
    report = lt.why(z)
    assert [(row["op"], row["line"]) for row in report.data["lines"]] == [
        ("aten::exp", here("one")),
        ("aten::add.Tensor", here("two")),
    ]
    assert report.data["inputs"] == ["`x`"]
    assert report.data["reading_runs"] == 3  # the other one runs with it
    assert events.cuts == []
    del other


def test_why_of_a_tensor_that_has_its_value() -> None:
    x = torch.ones(4).to("ltc")
    assert lt.why(x).data == {"pending": False, "ops": 0, "lines": [], "reading_runs": 0}
    with pytest.raises(TypeError, match="this one is on cpu"):
        lt.why(torch.ones(1))
