"""The report: everything that is known of a run, as one JSON document and as one page without server or network."""

from __future__ import annotations

import json
import linecache
import os
import platform
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from lazytensor._version import __version__
from lazytensor.inspect import blame, estimate, events, ledgers, metrics, places, timeline
from lazytensor.inspect.events import Known
from lazytensor.trace.ir import Node, Number, Value

FORMAT = 1
TEXT_LIMIT = 4_000_000  # characters of a backend's text that go into the page
GRAPHS = 24  # graphs that are shown node by node: those that ran most, and the latest
SPANS = 20_000


def report(path: str | os.PathLike[str]) -> Path:
    """Write what is known of this run: a page if the name ends in ``.html``, its data if it ends in ``.json``."""
    target = Path(path)
    if target.suffix == ".json":
        target.write_text(json.dumps(data(), separators=(",", ":")))
    else:
        target.write_text(page(data()))
    return target


def page(document: dict[str, Any]) -> str:
    """A report's data as a page."""
    template = Path(__file__).with_name("report.html").read_text()
    text = json.dumps(document, separators=(",", ":")).replace("</", "<\\/").replace("<!--", "<\\!--")
    return template.replace("/*DATA*/null", text)


def data() -> dict[str, Any]:
    """Everything that is known of this run, as plain data."""
    shown = _shown()
    spans = timeline.spans()
    return {
        "format": FORMAT,
        "made": time.strftime("%Y-%m-%d %H:%M:%S"),
        "program": Path(sys.argv[0]).name or "interactive",
        "versions": {"lazytensor": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "spans": spans[-SPANS:],
        "spans_left_out": max(len(spans) - SPANS, 0),
        "history": ledgers.history().data,
        "syncs": ledgers.syncs().data["lines"],
        "fallbacks": ledgers.fallbacks().data,
        "recompiles": blame.blame().data,
        "graphs": [graph_data(known, known.number in shown) for known in events.graphs.values()],
        "coverage": coverage(),
        "metrics": metrics.data(),
    }


def _shown() -> set[int]:
    with_nodes = [k for k in events.graphs.values() if k.graph is not None]
    most = sorted(with_nodes, key=lambda k: k.runs * k.nodes, reverse=True)[: GRAPHS // 2]
    return {k.number for k in [*most, *with_nodes[-(GRAPHS - len(most)) :]]}


class _Table:
    """Values by number, each once: what keeps the document small."""

    def __init__(self) -> None:
        self.numbers: dict[Any, int] = {}

    def __call__(self, value: Any) -> int:
        return self.numbers.setdefault(value, len(self.numbers))

    def values(self) -> list[Any]:
        return list(self.numbers)


def graph_data(known: Known, nodes: bool) -> dict[str, Any]:
    """One graph as plain data; node by node if wanted."""
    computation = known.computation()
    found: dict[str, Any] = {
        "name": known.name,
        "ops": known.nodes,
        "inputs": known.inputs,
        "numbers": known.numbers,
        "outputs": known.outputs,
        "bytes_in": known.bytes_in,
        "bytes_out": known.bytes_out,
        "runs": known.runs,
        "hits": known.hits,
        "compile_seconds": known.compile_seconds,
        "backend": known.backend,
        "tier": ledgers.tier(known),
        "place": places.data(places.place(*known.where)),
        "nodes": None,
    }
    if not nodes or known.graph is None:
        return found
    curve, peak = estimate.memory(known.graph)
    found |= {"memory": estimate.thinned(curve), "peak": peak, "flops": estimate.total_flops(known.graph.nodes)}
    found["nodes"] = _nodes(known.graph)
    found["text"] = _text(computation)
    return found


def _nodes(graph: Any) -> dict[str, Any]:
    """The nodes in columns.  Leaves come first; a node names its inputs by their place in these columns."""
    ops, lines, modules, shapes = _Table(), _Table(), _Table(), _Table()
    at: dict[Any, int] = {}
    names: dict[Any, str] = {}  # as the backend's text calls them: numbered in this graph
    rows: list[list[Any]] = []
    for number, leaf in enumerate(graph.data):
        at[leaf] = len(rows)
        rows.append([ops("input"), lines(None), modules(""), shapes(str(leaf.spec)), 0, [], f"x{number}", "", 0, 0])
        names[leaf] = f"x{number}"
    for number, lifted in enumerate(graph.numbers):
        names[lifted] = f"n{number}"
    results = set(graph.outputs)
    for number, node in enumerate(graph.nodes):
        row = [
            ops(node.op.name.removeprefix("aten::")),
            lines(None if node.line is None else places.of(node.line)),
            modules((node.line.module if node.line is not None else None) or ""),
            shapes(", ".join(str(v.spec) for v in node.outputs if v is not None)),
            _phase(node, results),
            sorted({at[v] for v in node.inputs if v in at}),
            f"v{number}",
            ", ".join(_argument(a, names) for a in node.args)[:200],
            estimate.result_bytes(node),
            estimate.flops(node),
        ]
        for value in node.outputs:
            if value is not None:
                at[value] = len(rows)
                names[value] = f"v{number}" + (f"_{value.index}" if len(node.outputs) > 1 else "")
        rows.append(row)
    columns = ("op", "line", "module", "shape", "phase", "inputs", "name", "args", "bytes", "flops")
    return {
        "tables": {
            "op": ops.values(),
            "line": [None if p is None else places.data(p) | {"around": _around(p)} for p in lines.values()],
            "module": modules.values(),
            "shape": shapes.values(),
        },
        **{name: [row[i] for row in rows] for i, name in enumerate(columns)},
    }


def _argument(argument: Any, names: dict[Any, str]) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(_argument(a, names) for a in argument[:9]) + (", …]" if len(argument) > 9 else "]")
    return names[argument] if isinstance(argument, Value | Number) else repr(argument)


def _phase(node: Node, results: set[Any]) -> int:
    """1 for an op of backward, plus 2 for one whose result leaves the graph."""
    backward = node.line is not None and node.line.forward is not None
    return int(backward) + 2 * any(v in results for v in node.outputs)


def _around(place: places.Place) -> list[str]:
    """The source around a line, so that the page can show it."""
    first = max(place.line - 2, 1)
    return [linecache.getline(place.file, n).rstrip("\n") for n in range(first, place.line + 3)]


def _text(computation: Any) -> str:
    if computation is None:
        return ""
    try:
        text = str(computation.compiled.text)
    except Exception as error:  # a backend that cannot show itself does not make the report fail
        return f"the backend could not show this graph: {type(error).__name__}: {error}"
    return text if len(text) <= TEXT_LIMIT else text[:TEXT_LIMIT] + "\n…"


def coverage() -> list[dict[str, Any]]:
    """By op: how often it ran in graphs, was interpreted or decomposed inside of them, or fell back."""
    ran: Counter[str] = Counter(events.folded.ops)
    interpreted: Counter[str] = Counter()
    decomposed: Counter[str] = Counter()
    for known in events.graphs.values():
        for op, n in known.ops.items():
            ran[op] += n * known.runs
        compiled = getattr(known.computation(), "compiled", None)
        for counter, name in ((interpreted, "interpreted"), (decomposed, "decomposed")):
            for op, n in getattr(compiled, name, {}).items():
                counter[op] += n * known.runs
    fell: Counter[str] = Counter(f.name for f in events.fallbacks)
    return [
        {
            "op": op,
            "ran": ran[op],
            "interpreted": interpreted[op],
            "decomposed": decomposed[op],
            "fallbacks": fell[op],
        }
        for op in sorted({*ran, *interpreted, *decomposed, *fell}, key=lambda o: -ran[o] - fell[o])
    ]
