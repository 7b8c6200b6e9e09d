"""Counters and metrics under the names of ``torch._lazy``, and their formats, against counted facts."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from marked import here

import lazytensor as lt
from lazytensor.inspect import events


def steps(count: int, size: int = 4) -> None:
    for _ in range(count):
        x = torch.ones(size).to("ltc")
        y = (x + x).exp() + x
        lt.sync()  # <sync>
        del x, y


def test_compile_counters() -> None:
    steps(5)
    steps(2, size=3)
    assert lt.metrics.counter_value("UncachedCompile") == 2
    assert lt.metrics.counter_value("CachedCompile") == 5
    assert lt.metrics.counter_value("MarkStep") == 7
    assert lt.metrics.counter_value("SyncedTensorsWithIR") == 7
    assert lt.metrics.counter_value("TrieForked") == 1


def test_operations_are_counted_by_their_runs_and_while_pending() -> None:
    steps(5)
    assert lt.metrics.counter_value("lazy::add") == 10
    assert lt.metrics.counter_value("lazy::exp") == 5
    x = torch.ones(4).to("ltc").exp()
    assert lt.metrics.counter_value("lazy::exp") == 6
    lt.sync()
    assert lt.metrics.counter_value("lazy::exp") == 6
    del x


def test_nodes_that_were_recorded_again_are_counted_as_reused() -> None:
    steps(5)
    assert lt.metrics.counter_value("IrNodeReused_torch::lazy::AddTensor") == 8
    assert lt.metrics.counter_value("IrNodeReused_torch::lazy::Exp") == 4


def test_tensors_are_counted_when_made_and_when_gone() -> None:
    kept = torch.ones(2).to("ltc")
    steps(3)
    created = lt.metrics.counter_value("CreateLtcTensor")
    assert created == 1 + 3 * 4  # an upload and three results a step
    destroyed = lt.metrics.counter_value("DestroyLtcTensor")
    assert destroyed is not None
    assert created - destroyed >= 1  # the one that is kept
    del kept


def test_bytes_moved() -> None:
    x = torch.ones(100).to("ltc")
    assert lt.metrics.counter_value("InboundBytes") == 400
    x.cpu()
    (x + 1).sum().item()
    assert lt.metrics.counter_value("OutboundBytes") == 404


def test_time_metrics_have_a_sample_a_cut_and_one_for_each_backend() -> None:
    steps(4)
    for name in ("ExecuteTime", "ExecuteTime.reference", "TensorsGraphSize", "IrValueTensorToDataHandle"):
        metric = lt.metrics.metric_data(name)
        assert metric is not None, name
        assert metric.total_samples == 4
        assert len(metric.samples) == 4
    compiled = lt.metrics.metric_data("CompileTime.reference")
    assert compiled is not None
    assert compiled.total_samples == 1
    assert compiled.accumulator == pytest.approx(events.all_cuts()[0].timing.compile)
    size = lt.metrics.metric_data("TensorsGraphSize")
    assert size is not None
    assert (size.accumulator, set(size.percentiles().values())) == (12.0, {3.0})
    tracing = lt.metrics.metric_data("LazyTracing")
    assert tracing is not None
    assert tracing.total_samples == 3


def test_waiting_is_measured_for_reads_only() -> None:
    steps(2)
    assert lt.metrics.metric_data("DeviceLockWait") is None
    torch.ones(2).to("ltc").sum().item()
    metric = lt.metrics.metric_data("DeviceLockWait")
    assert metric is not None
    assert metric.total_samples == 1


def test_percentiles() -> None:
    for value in range(100):
        lt.metrics.sample("Sampled", float(value))
    metric = lt.metrics.metric_data("Sampled")
    assert metric is not None
    assert metric.percentiles() == {0.01: 1, 0.05: 5, 0.1: 10, 0.2: 20, 0.5: 50, 0.8: 80, 0.9: 90, 0.95: 95, 0.99: 99}
    assert (metric.total_samples, metric.accumulator) == (100, 4950)
    for value in range(2000):
        lt.metrics.sample("Sampled", float(value))
    metric = lt.metrics.metric_data("Sampled")
    assert metric is not None
    assert (metric.total_samples, len(metric.samples)) == (2100, 1024)


def test_reset_starts_from_zero_and_keeps_the_ledgers() -> None:
    steps(3)
    lt.metrics.count("Mine", 2)
    lt.metrics.reset()
    assert [n for n in lt.metrics.counter_names() if not n.startswith("DestroyLtc")] == []
    assert lt.metrics.counter_value("CachedCompile") is None
    assert lt.metrics.metric_names() == []
    assert len(lt.syncs().data["cuts"]) == 3
    steps(2)
    assert lt.metrics.counter_value("CachedCompile") == 2
    assert lt.metrics.counter_value("lazy::exp") == 2
    metric = lt.metrics.metric_data("ExecuteTime")
    assert metric is not None
    assert metric.total_samples == 2


def test_the_report_as_text_and_as_data() -> None:
    steps(3)
    text = lt.metrics.report()
    assert re.search(r"Metric: ExecuteTime\n  TotalSamples: 3\n  Accumulator: .+\n  ValueRate: .+ / second\n", text)
    assert "Counter: CachedCompile\n  Value: 2" in text
    assert "Cache: computations\n  Size: 1" in text
    data = lt.metrics.data()
    assert data["counters"]["UncachedCompile"] == 1
    assert data["metrics"]["TensorsGraphSize"]["percentiles"]["0.5"] == 3
    assert data["caches"]["computations"] == 1
    json.dumps(data)


def test_prometheus_text() -> None:
    steps(3)
    text = lt.metrics.prometheus()
    assert 'lazytensor_total{name="CachedCompile"} 2\n' in text
    assert 'lazytensor_metric_count{name="TensorsGraphSize"} 3\n' in text
    assert 'lazytensor_metric{name="TensorsGraphSize",quantile="0.5"} 3\n' in text
    sample = re.compile(r'[a-z_]+(\{[a-z]+="[^"]*"(,[a-z]+="[^"]*")*\})? [-+.e0-9]+')
    for line in text.splitlines():
        assert line.startswith("# TYPE ") or sample.fullmatch(line), line


def test_tensorboard_scalars() -> None:
    written: dict[str, tuple[float, int]] = {}

    class Writer:
        def add_scalar(self, name: str, value: float, step: int) -> None:
            written[name] = (value, step)

    steps(3)
    lt.metrics.write_tensorboard(Writer(), step=7)
    assert written["lazytensor/counter/CachedCompile"] == (2, 7)
    assert written["lazytensor/metric/TensorsGraphSize"] == (3, 7)


def test_tensorboard_folder_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    missing: dict[str, ModuleType | None] = {"torch.utils.tensorboard": None}
    for name, module in missing.items():
        monkeypatch.setitem(sys.modules, name, module)  # type: ignore[arg-type]
    with pytest.raises(ImportError):
        lt.metrics.write_tensorboard(tmp_path)


def test_the_profiler_shows_cuts() -> None:
    steps(1)
    with torch.profiler.profile() as profile:
        steps(2)
        steps(1, size=3)
    names = [event.name for event in profile.events()]
    assert names.count("lazytensor::execute") == 3
    assert names.count("lazytensor::compile") == 1
    assert names.count("lazytensor::cut") == 3


def test_the_chrome_trace(tmp_path: Path) -> None:
    steps(3)
    torch.nonzero(torch.ones(2).to("ltc"))
    file = tmp_path / "trace.json"
    lt.chrome_trace(file)
    trace = json.loads(file.read_text())["traceEvents"]
    spans = [e for e in trace if e["ph"] == "X"]
    names = [e["name"] for e in spans]
    assert names.count("execute") == 3
    assert names.count("compile") == 1
    assert "aten::nonzero" in names
    for event in spans:
        assert event["dur"] >= 0
        assert isinstance(event["ts"], float)
    cut = next(e for e in spans if e["name"] == "execute")
    assert cut["args"]["place"].endswith(f"test_metrics.py:{here('sync')}")
