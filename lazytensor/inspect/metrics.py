"""Counters and metrics, under the names that ``torch._lazy`` gives them where it has them.

Nothing is counted per recorded operation.  ``lazy::add`` is how often ``aten::add`` stands in the graphs that ran,
times their runs, plus what is pending; the samples of ``ExecuteTime`` are the cuts in the ledger.  All of it is
worked out when asked for.
"""

from __future__ import annotations

import gc
import time
from collections import Counter, deque
from collections.abc import Iterator
from typing import Any, NamedTuple

from lazytensor.inspect import events
from lazytensor.inspect.render import duration, size

PERCENTILES = (0.01, 0.05, 0.1, 0.2, 0.5, 0.8, 0.9, 0.95, 0.99)
SAMPLES = 1024  # kept of a metric that was sampled by hand

_counters: Counter[str] = Counter()
_sampled: dict[str, tuple[list[float], deque[tuple[float, float]]]] = {}
_base: Counter[str] = Counter()  # the derived counters at the last reset
_base_metrics: dict[str, tuple[int, float]] = {}
_since = 0.0


class Metric(NamedTuple):
    """A metric: how many samples there were, their sum, and the latest of them as (time, value)."""

    total_samples: int
    accumulator: float
    samples: list[tuple[float, float]]

    def percentiles(self) -> dict[float, float]:
        """The value below which each fraction of the latest samples lies."""
        values = sorted(v for _, v in self.samples)
        return {p: values[min(int(p * len(values)), len(values) - 1)] for p in PERCENTILES} if values else {}

    @property
    def rate(self) -> float | None:
        """Samples a second."""
        span = self.samples[-1][0] - self.samples[0][0] if len(self.samples) > 1 else 0.0
        return (len(self.samples) - 1) / span if span else None


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    _counters[name] += by


def sample(name: str, value: float) -> None:
    """Add a sample to a metric; a name that ends in ``Time``, ``Wait`` or ``Tracing`` is in seconds."""
    totals, ring = _sampled.setdefault(name, ([0, 0.0], deque(maxlen=SAMPLES)))
    totals[0] += 1
    totals[1] += value
    ring.append((time.perf_counter(), value))


# --- counters -------------------------------------------------------------------------------------------------------


def _derived() -> Counter[str]:
    from lazytensor.execute import cut
    from lazytensor.trace import storage
    from lazytensor.trace.ir import walk

    found = Counter(events.folded.counters)
    for each in events.all_cuts():
        for name, by in events.counts(each):
            found[name] += by
    ops, reused, made = Counter(events.folded.ops), Counter(events.folded.reused), 0
    for known in events.graphs.values():
        for op, n in known.ops.items():
            ops[op] += n * known.runs
        reused.update(events.reused(known))
        made += known.results * known.runs
    pending = walk([s.value for s in cut.pending() if s.value is not None])
    for node in pending:
        ops[node.op.name] += 1
        made += 0 if node.op.view else len(node.outputs)
    for op, n in ops.items():
        found["lazy::" + op.rpartition("::")[2].partition(".")[0]] += n
    for op, n in reused.items():
        found[f"IrNodeReused_torch::lazy::{_class(op)}"] += max(n, 0)
    pieces, size_in = storage.uploaded
    found["CreateLtcTensor"] = made + pieces + events.folded.counters["CreateLtcTensor"]
    found["DestroyLtcTensor"] = max(found["CreateLtcTensor"] - _alive(), 0)
    found["SyncTensorsToData"] = pieces
    found["InboundBytes"] = size_in
    found["OutboundBytes"] = events.read_bytes
    found["MarkStep"] = events.step
    return found


def _class(op: str) -> str:
    """The name that codegen gives a node class: ``aten::add.Tensor`` is ``AddTensor``."""
    return "".join(p[:1].upper() + p[1:] for p in op.rpartition("::")[2].replace(".", "_").split("_"))


def _alive() -> int:
    from lazytensor.trace.storage import State

    return sum(1 for each in gc.get_objects() if issubclass(type(each), State))


def _all_counters() -> dict[str, int]:
    found = _derived()
    found.subtract(_base)
    found.update(_counters)
    return {name: value for name, value in sorted(found.items()) if value > 0}


def fallbacks() -> dict[str, int]:
    """The counters ``aten::…``, how often each overload fell back, without working out the others."""
    return {name: n for name, n in _counters.items() if n and name.startswith("aten::")}


def counter_names() -> list[str]:
    """The counters that are not zero."""
    return list(_all_counters())


def counter_value(name: str) -> int | None:
    """The value of a counter; None if it is zero or was never counted."""
    if name in _counters:
        return _counters[name] or None
    return _all_counters().get(name)


def executed_fallback_ops() -> list[str]:
    """The ops that ran eagerly on the CPU since the last reset."""
    return sorted(name for name, value in _counters.items() if value and "::" in name and not name.startswith("lazy::"))


# --- metrics --------------------------------------------------------------------------------------------------------


def _samples() -> Iterator[tuple[str, float, float]]:
    before: float | None = None
    for cut in events.all_cuts():
        if before is not None and cut.started >= before:
            yield "LazyTracing", cut.started, cut.started - before
        before = cut.started + cut.seconds
        for name, value in events.samples(cut):
            yield name, cut.started, value


def metric_data(name: str) -> Metric | None:
    """A metric; None if it has no samples."""
    return _all_metrics().get(name)


def metric_names() -> list[str]:
    """The metrics that have samples."""
    return sorted(_all_metrics())


def _totals() -> dict[str, tuple[int, float]]:
    found = {name: (int(n), total) for name, (n, total) in events.folded.metrics.items()}
    for name, _, value in _samples():
        n, total = found.get(name, (0, 0.0))
        found[name] = (n + 1, total + value)
    return found


def _all_metrics() -> dict[str, Metric]:
    rings: dict[str, list[tuple[float, float]]] = {}
    for name, at, value in _samples():
        if at >= _since:
            rings.setdefault(name, []).append((at, value))
    found = {}
    for name, (n, total) in _totals().items():
        base = _base_metrics.get(name, (0, 0.0))
        if n > base[0]:
            found[name] = Metric(n - base[0], total - base[1], rings.get(name, [])[-SAMPLES:])
    for name, (totals, ring) in _sampled.items():
        if totals[0]:
            found[name] = Metric(int(totals[0]), totals[1], list(ring))
    return found


def _kind(name: str) -> str:
    base = name.partition(".")[0]
    if base.endswith(("Time", "Wait", "Tracing", "Handle")):
        return "time"
    return "bytes" if base.endswith(("Data", "Bytes")) else "value"


def _show(name: str, value: float) -> str:
    kind = _kind(name)
    if kind == "time":
        return duration(value)
    return size(value) if kind == "bytes" else f"{value:.2f}"


# --- reports --------------------------------------------------------------------------------------------------------


def cache_sizes() -> dict[str, int]:
    """How many things each cache holds."""
    from lazytensor.execute import cut
    from lazytensor.trace import ir, record

    return {
        "computations": len(cut.computations),
        "nodes": ir.node_count(),
        "table_entries": sum(len(o.table) for o in record.ops.values()) + sum(len(m.table) for m in record.mutations),
        "specs": len(ir._specs),
        "leaves": len(ir._data_leaves),
        "graphs_in_ledger": len(events.graphs),
        "cuts_in_ledger": len(events.cuts),
    }


def data() -> dict[str, Any]:
    """Everything as plain data."""
    return {
        "counters": _all_counters(),
        "metrics": {
            name: {
                "kind": _kind(name),
                "total_samples": m.total_samples,
                "accumulator": m.accumulator,
                "rate": m.rate,
                "percentiles": {str(p): v for p, v in m.percentiles().items()},
            }
            for name, m in sorted(_all_metrics().items())
        },
        "caches": cache_sizes(),
    }


def report() -> str:
    """Everything as text: metrics, counters, cache sizes, and what the backend adds."""
    lines = []
    for name, metric in sorted(_all_metrics().items()):
        lines += [
            f"Metric: {name}",
            f"  TotalSamples: {metric.total_samples}",
            f"  Accumulator: {_show(name, metric.accumulator)}",
        ]
        if metric.rate is not None:
            mean = metric.accumulator / metric.total_samples
            lines += [
                f"  ValueRate: {_show(name, mean * metric.rate)} / second",
                f"  Rate: {metric.rate:.6g} / second",
            ]
        shown = "; ".join(f"{p * 100:g}%={_show(name, v)}" for p, v in metric.percentiles().items())
        lines.append(f"  Percentiles: {shown}")
    for name, value in _all_counters().items():
        lines += [f"Counter: {name}", f"  Value: {value}"]
    for name, value in cache_sizes().items():
        lines += [f"Cache: {name}", f"  Size: {value}"]
    return "\n".join([*lines, *_backend_text()])


def _backend_text() -> list[str]:
    from lazytensor.backend import registry

    text = registry.current().metric_report()
    return [text] if text else []


def reset() -> None:
    """Start counting from zero.  The ledgers stay."""
    global _base, _base_metrics, _since
    _counters.clear()
    _sampled.clear()
    _base = _derived()
    _base_metrics = _totals()
    _since = time.perf_counter()


def prometheus() -> str:
    """Everything in the text format that Prometheus scrapes."""
    lines = ["# TYPE lazytensor_total counter"]
    for name, value in _all_counters().items():
        lines.append(f'lazytensor_total{{name="{_quoted(name)}"}} {value}')
    lines.append("# TYPE lazytensor_cache_entries gauge")
    for name, value in cache_sizes().items():
        lines.append(f'lazytensor_cache_entries{{cache="{_quoted(name)}"}} {value}')
    lines.append("# TYPE lazytensor_metric summary")
    for name, metric in sorted(_all_metrics().items()):
        label = _quoted(name)
        for quantile, figure in metric.percentiles().items():
            lines.append(f'lazytensor_metric{{name="{label}",quantile="{quantile:g}"}} {figure:.9g}')
        lines.append(f'lazytensor_metric_sum{{name="{label}"}} {metric.accumulator:.9g}')
        lines.append(f'lazytensor_metric_count{{name="{label}"}} {metric.total_samples}')
    return "\n".join(lines) + "\n"


def _quoted(name: str) -> str:
    return name.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def write_tensorboard(writer: Any, step: int | None = None) -> None:
    """Write every counter and the median of every metric as scalars.

    ``writer`` is a ``SummaryWriter`` (or anything with ``add_scalar``), or a folder for which one is made, where
    tensorboard is installed.
    """
    at = events.step if step is None else step
    own = not hasattr(writer, "add_scalar")
    if own:
        from torch.utils.tensorboard import SummaryWriter  # needs the package tensorboard

        writer = SummaryWriter(writer)  # type: ignore[no-untyped-call]
    for name, value in _all_counters().items():
        writer.add_scalar(f"lazytensor/counter/{name}", value, at)
    for name, metric in _all_metrics().items():
        if metric.samples:
            writer.add_scalar(f"lazytensor/metric/{name}", metric.percentiles()[0.5], at)
    if own:
        writer.close()
