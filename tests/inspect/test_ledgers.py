"""Every cut and fallback is in the ledger, with its cause, line and price."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator

import pytest
import torch
from marked import here

import lazytensor as lt
from lazytensor.backend import registry
from lazytensor.backend.reference import ReferenceBackend
from lazytensor.inspect import events


def pending() -> torch.Tensor:
    return torch.ones(4).to("ltc").exp()


def only_line() -> dict[str, object]:
    (line,) = lt.syncs().data["lines"]
    return line  # type: ignore[no-any-return]


def test_item_is_named() -> None:
    x = pending().sum()
    x.item()  # <item>
    line = only_line()
    assert (line["reason"], line["line"], line["text"]) == (".item()", here("item"), "x.item()")


def test_float_is_named() -> None:
    x = pending().sum()
    print(float(x))  # <float>
    line = only_line()
    assert (line["reason"], line["line"], line["text"]) == ("float()", here("float"), "float(x)")


def test_a_condition_is_named() -> None:
    x = pending().sum()
    if x > 0:  # <condition>
        pass
    line = only_line()
    assert (line["reason"], line["line"]) == ("bool", here("condition"))


def test_print_is_named() -> None:
    x = pending()
    with contextlib.redirect_stdout(io.StringIO()):
        print(x)  # <print>
    line = only_line()
    assert (line["reason"], line["line"]) == ("print()", here("print"))


def test_cpu_and_tolist_are_named() -> None:
    x, y = pending(), pending().sin()
    x.cpu()  # <cpu>
    y = y + 1
    y.tolist()  # <tolist>
    lines = {line["line"]: line["reason"] for line in lt.syncs().data["lines"]}
    assert lines == {here("cpu"): ".cpu()", here("tolist"): ".tolist()"}


def test_sync_is_named_and_splits_nothing() -> None:
    x = pending()
    lt.sync()  # <sync>
    line = only_line()
    assert (line["reason"], line["line"], line["splits"]) == ("lt.sync()", here("sync"), 0)
    assert (line["count"], line["misses"], line["bytes"]) == (1, 1, 16)
    del x


def test_a_read_that_ends_the_step_splits_nothing() -> None:
    for _ in range(3):
        pending().sum().item()
        lt.sync()
    assert only_line()["splits"] == 0


def test_prices_add_up() -> None:
    x = pending()
    lt.sync(wait=True)
    (cut,) = lt.syncs().data["cuts"]
    assert cut["seconds"] == pytest.approx(cut["collect"] + cut["compile"] + cut["execute"] + cut["install"])
    assert cut["execute"] > 0
    assert cut["compile"] > 0
    assert (cut["outputs"], cut["ops"], cut["hit"], cut["failed"]) == (1, 1, False, None)
    del x


def test_a_cut_that_fails_is_in_the_ledger() -> None:
    weight = torch.ones(3, 2).to("ltc")
    x = torch.nn.functional.embedding(torch.tensor([5]).to("ltc"), weight)
    with pytest.raises(IndexError):
        x.cpu()
    (cut,) = lt.syncs().data["cuts"]
    assert cut["failed"].startswith("IndexError: index out of range")


def test_the_ledger_is_bounded_and_totals_stay_true() -> None:
    with lt.settings.scope(ledger_size=10):
        for _ in range(45):
            x = pending()
            lt.sync()
            del x
    assert len(events.cuts) < 20
    assert lt.metrics.counter_value("CachedCompile") == 44
    assert lt.metrics.counter_value("UncachedCompile") == 1
    metric = lt.metrics.metric_data("ExecuteTime")
    assert metric is not None
    assert metric.total_samples == 45


def test_diagnostics_can_be_switched_off() -> None:
    with lt.settings.scope(diagnostics=False):
        torch.nonzero(pending())
        lt.sync()
        x = pending()
        lt.sync()
    assert events.cuts == []
    assert events.fallbacks == []
    assert len(lt.blame()) == 0
    y = pending()  # compiled while it was off, run again with it on
    lt.sync()
    assert lt.history().data["graphs"][0]["hits"] == 1
    del x, y


def test_a_cut_by_the_budget_is_named() -> None:
    x = torch.ones(2).to("ltc")
    with lt.settings.scope(max_pending=20):
        for _ in range(30):
            x = x + 1  # <grows>
    line = only_line()
    assert (line["reason"], line["line"]) == ("budget", here("grows"))
    assert lt.metrics.counter_value("TrimIrGraph") == 1
    with lt.settings.scope(max_pending=20), lt.no_sync():
        for _ in range(30):
            x = x * 2  # a cut that keeps memory bounded is not forbidden


class Background(ReferenceBackend):
    """The reference backend, whose cuts may run while the program goes on."""

    asynchronous = True


@pytest.fixture
def in_background() -> Iterator[None]:
    with lt.settings.scope(run_in_background=True), registry.scope(Background()):
        yield
        lt.wait()


def test_a_cut_in_the_background_is_waited_for_by_the_read(in_background: None) -> None:
    long = torch.ones(1500, 1500).to("ltc")
    x = pending() + (long @ long @ long).sum() * 0  # long enough for the read to come too early
    lt.sync()
    total = x.cpu()  # <read>
    rows = {line["reason"]: line for line in lt.syncs().data["lines"]}
    assert rows["lt.sync()"]["count"] == 1
    waited = rows["waits for .cpu()"]
    assert (waited["line"], waited["waits"], waited["count"]) == (here("read"), 1, 0)
    (cut,) = lt.syncs().data["cuts"]
    assert cut["background"]
    assert cut["seconds"] == pytest.approx(cut["collect"] + cut["compile"] + cut["install"])
    assert total.tolist() == pytest.approx([torch.e] * 4)


def test_what_is_observed_in_the_background_comes_later(in_background: None) -> None:
    for step in range(3):
        lt.observe("x", torch.full((1,), float(step)).to("ltc") * 2)
        lt.sync()
    assert [v.item() for _, v in lt.observed("x")] == [0.0, 2.0, 4.0]


# --- no_sync --------------------------------------------------------------------------------------------------------


def test_no_sync_raises_at_the_line_and_leaves_everything_pending() -> None:
    x = pending().sum()
    with pytest.raises(lt.errors.SyncForbidden) as raised:
        with lt.no_sync():
            x.item()  # <forbidden>
    assert f"test_ledgers.py:{here('forbidden')}" in str(raised.value)
    assert "x.item()" in str(raised.value)
    assert events.cuts == []
    assert x.item() == pytest.approx(4 * torch.e)


def test_no_sync_forbids_fallbacks() -> None:
    x = pending()
    with pytest.raises(lt.errors.SyncForbidden, match="aten::nonzero"), lt.no_sync():
        torch.nonzero(x)


def test_no_sync_allows_sync_and_what_has_a_value() -> None:
    x = pending()
    with lt.no_sync():
        lt.sync()
        assert x.sum().device.type == "ltc"
    y = pending()
    lt.sync(wait=True)
    with lt.no_sync():
        y.cpu()


# --- fallbacks ------------------------------------------------------------------------------------------------------


def test_a_fallback_is_in_the_ledger_with_its_price() -> None:
    x = torch.tensor([1.0, 0.0, 2.0]).to("ltc")
    for _ in range(2):
        torch.nonzero(x)  # <nonzero>
    (row,) = lt.fallbacks().data
    assert (row["op"], row["line"], row["count"]) == ("aten::nonzero", here("nonzero"), 2)
    assert (row["bytes_in"], row["bytes_out"]) == (2 * 12, 2 * 16)
    assert row["seconds"] > 0
    assert "data-dependent" in row["reason"] or "data" in row["reason"]
    assert lt.metrics.counter_value("aten::nonzero") == 2
    assert lt.metrics.executed_fallback_ops() == ["aten::nonzero"]


def test_the_nearest_decomposition_is_named() -> None:
    from lazytensor.inspect.ledgers import decomposition

    assert decomposition("aten::addcmul") == "torch._refs.addcmul" or "addcmul" in str(decomposition("aten::addcmul"))
    assert decomposition("aten::nonzero") is None


# --- history --------------------------------------------------------------------------------------------------------


def test_history_tells_steps_from_graphs() -> None:
    for size in (4, 4, 4, 3, 4):
        x = torch.ones(size).to("ltc").exp()
        lt.sync()
        del x
    data = lt.history().data
    assert [(s["graphs"], s["hits"], s["misses"]) for s in data["steps"]] == [
        ([data["graphs"][0]["graph"]], 0, 1),
        ([data["graphs"][0]["graph"]], 1, 0),
        ([data["graphs"][0]["graph"]], 1, 0),
        ([data["graphs"][1]["graph"]], 0, 1),
        ([data["graphs"][0]["graph"]], 1, 0),
    ]
    assert [(g["runs"], g["hits"], g["ops"]) for g in data["graphs"]] == [(4, 3, 1), (1, 0, 1)]
    first = data["steps"][0]["step"]
    assert f"{first + 1}–{first + 2}" in str(lt.history())
    json.dumps(data)
