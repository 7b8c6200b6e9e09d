"""``explain`` before paying, ``analyze`` with measured times, and ``why``: what is pending, by line and by module."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lazytensor.backend import registry
from lazytensor.backend.graph import Graph
from lazytensor.execute import cut
from lazytensor.inspect import blame, estimate, events, names, places, watch
from lazytensor.inspect.render import Report, Table, amount, duration, size
from lazytensor.trace import source, storage
from lazytensor.trace.ir import Node, Value, walk

LOOP = 8  # how often something must be repeated to look like a loop over steps
SHOWN = 25  # rows of a table that are printed; the data has all


def pending_values() -> list[Value]:
    """The values that a cut would make now, in its order."""
    return [state.value for state in cut.pending() if state.value is not None] + list(storage.effects)


def compiled() -> cut.Computation | None:
    """The computation that a cut would run now, if it is there."""
    key = (registry.current(), *pending_values(), *(state.number for state in cut.pending()))
    return cut.computations.get(key)


class Group:
    """The nodes of one line, or of one module."""

    def __init__(self, label: Any) -> None:
        self.label = label
        self.ops = 0
        self.bytes = 0
        self.flops = 0
        self.seconds = 0.0

    def add(self, node: Node, seconds: float) -> None:
        """Count one node."""
        self.ops += 1
        self.bytes += estimate.result_bytes(node)
        self.flops += estimate.flops(node)
        self.seconds += seconds


def by_line(nodes: Iterable[Node], seconds: dict[Node, float]) -> dict[tuple[places.Place, str | None], Group]:
    """The nodes by the line, and the module, that they belong to."""
    groups: dict[tuple[places.Place, str | None], Group] = {}
    for node in nodes:
        key = (places.of(node.line), node.line.module if node.line is not None else None)
        groups.setdefault(key, Group(key)).add(node, seconds.get(node, 0.0))
    return groups


def by_module(nodes: Iterable[Node], seconds: dict[Node, float]) -> dict[str, Group]:
    """The nodes by module; a module has the nodes of those in it as well."""
    groups: dict[str, Group] = {}
    for node in nodes:
        path = (node.line.module if node.line is not None else None) or ""
        parts = path.split(".") if path else []
        for depth in range(len(parts)):
            name = ".".join(parts[: depth + 1])
            groups.setdefault(name, Group(name)).add(node, seconds.get(node, 0.0))
        if not parts:
            groups.setdefault("(no module)", Group("(no module)")).add(node, seconds.get(node, 0.0))
    return groups


def explain() -> Report:
    """What is pending and what running it would cost, by line and by module, without running it."""
    values = pending_values()
    graph = Graph(values)
    known = compiled()
    return _describe("pending", graph, known is not None, None if known else _why_not(graph), {}, None)


def analyze() -> Report:
    """Run everything pending once, op by op on the reference interpreter, and tell how long each line took."""
    values = pending_values()
    graph = Graph(values)
    known = compiled()
    why = None if known else _why_not(graph)
    seconds: dict[Node, float] = {}
    started = time.perf_counter()
    if values:
        with watch.instead(lambda graph: watch.Timed(graph, seconds)):
            cut.cut("analyze")
    return _describe("measured", graph, known is not None, why, seconds, time.perf_counter() - started)


def _why_not(graph: Graph) -> blame.Blame | None:
    return blame.why_not(graph) if graph.nodes else None


def _describe(
    word: str, graph: Graph, hit: bool, why: blame.Blame | None, seconds: dict[Node, float], total: float | None
) -> Report:
    curve, peak = estimate.memory(graph)
    lines = sorted(by_line(graph.nodes, seconds).values(), key=_weight, reverse=True)
    modules = sorted(by_module(graph.nodes, seconds).values(), key=lambda g: str(g.label))
    fallbacks = [f for f in events.fallbacks if f.step == events.step]
    repeats = repeated(graph.nodes)
    flops = estimate.total_flops(graph.nodes)
    data = {
        "ops": len(graph.nodes),
        "inputs": len(graph.data),
        "numbers": len(graph.numbers),
        "bytes_in": sum(v.spec.nbytes for v in graph.data),
        "bytes_out": sum(v.spec.nbytes for v in graph.outputs),
        "flops": flops,
        "peak_bytes": peak,
        "memory": estimate.thinned(curve),
        "seconds": total,
        "hit": hit,
        "why_not": None if why is None else why.data,
        "results": [_result(v) for v in graph.outputs],
        "lines": [_row(g) | places.data(g.label[0]) | {"module": g.label[1]} for g in lines],
        "modules": [_row(g) | {"module": g.label} for g in modules],
        "fallbacks": [f.name for f in fallbacks],
        "repeated": repeats,
    }
    notes = _notes(word, graph, hit, why, data)
    columns = ["line", "module", ">ops", ">bytes", ">FLOPs", *([">time"] if total is not None else []), "code"]
    rows = [
        [
            g.label[0],
            g.label[1] or "",
            *_cells(g, total is not None),
            g.label[0].text[:60],
        ]
        for g in lines[:SHOWN]
    ]
    tables = [
        Table("By line", columns, rows, max(len(lines) - SHOWN, 0)),
        Table(
            "By module",
            ["module", *columns[2:-1]],
            [[_indented(g.label), *_cells(g, total is not None)] for g in modules[:SHOWN]],
            max(len(modules) - SHOWN, 0),
        ),
        Table(
            "What would be made" if total is None else "What was made",
            ["result", "op", "line"],
            [[r["value"], r["op"], f"{places.short(r['file'])}:{r['line']}"] for r in data["results"][:SHOWN]],  # type: ignore[index]
            max(len(graph.outputs) - SHOWN, 0),
        ),
    ]
    return Report(f"lazytensor: {len(graph.nodes):,} operations {word}", notes, tables, data)


def _weight(group: Group) -> tuple[float, int, int]:
    return group.seconds, group.flops, group.bytes


def _row(group: Group) -> dict[str, Any]:
    return {"ops": group.ops, "bytes": group.bytes, "flops": group.flops, "seconds": group.seconds}


def _cells(group: Group, timed: bool) -> list[str]:
    return [
        f"{group.ops:,}",
        size(group.bytes),
        amount(group.flops),
        *([duration(group.seconds)] if timed else []),
    ]


def _indented(path: str) -> str:
    return "  " * path.count(".") + path.rpartition(".")[2]


def _result(value: Value) -> dict[str, Any]:
    place = places.of(value.node.line)
    return {"value": repr(value), "op": value.node.op.name, **places.data(place)}


def _notes(word: str, graph: Graph, hit: bool, why: blame.Blame | None, data: dict[str, Any]) -> list[str]:
    if not graph.nodes:
        return ["nothing is pending: a read would wait for nothing"]
    notes = [
        f"{len(graph.data)} pieces of data ({size(data['bytes_in'])}) and {len(graph.numbers)} numbers in, "
        f"{len(graph.outputs)} results ({size(data['bytes_out'])}) out, because tensors that are alive hold them",
        f"{amount(data['flops'])} FLOPs, peak memory about {size(data['peak_bytes'])}",
        "any read, or lt.sync(), cuts all of it as one graph"
        if word == "pending"
        else f"ran in {duration(data['seconds'])}",
    ]
    if hit:
        notes.append("this graph is compiled: the cut hits the cache")
    elif why is None:
        notes.append("this graph is new: the cut compiles it; nothing like it is known")
    elif why.first is None:
        notes.append(f"this graph is new: it has the operations of {why.old}, but other results are alive")
    else:
        notes.append(
            f"this graph is new: it differs from {why.old}: {why.first}" + (f". {why.advice}" if why.advice else "")
        )
    for repeat in data["repeated"][:1]:
        notes.append(repeat["text"])
    if data["fallbacks"]:
        notes.append(f"in this step these ran eagerly on the CPU: {', '.join(sorted(set(data['fallbacks'])))}")
    return notes


def repeated(nodes: Sequence[Node]) -> list[dict[str, Any]]:
    """The line at the end of a loop that was recorded again and again since the last cut: a loop that forgot to cut.

    Its mark is that what was recorded last was recorded about as often as anything.  A loop inside of a step (the
    cells of an RNN, the layers of a model) is followed by other lines.
    """
    counts: Counter[Any] = Counter()
    for node in nodes:
        if node.line is not None and node.line is not source.UNKNOWN:
            counts[_kind(node)] += 1
    if not counts or (most := max(counts.values())) < LOOP:
        return []
    for node in reversed(nodes[-max(len(nodes) // most, 1) :]):
        if node.line is not None and counts[_kind(node)] >= most * 0.75:
            place = places.of(node.line)
            text = (
                f"{place} was recorded {counts[_kind(node)]} times since the last cut: if that is a loop over steps, "
                f"call lt.sync() at the end of each step, after {place}"
            )
            return [{"times": counts[_kind(node)], **places.data(place), "text": text}]
    return []


def _kind(node: Node) -> Any:
    return node.op.name, places.of(node.line), node.line.module, tuple(v.spec for v in node.outputs if v is not None)


# --- why ------------------------------------------------------------------------------------------------------------


def why(tensor: torch.Tensor) -> Report:
    """The recorded lines that make this tensor, and what reading it would run."""
    if tensor.device.type != "ltc":
        raise TypeError(f"lt.why() is about tensors on ltc; this one is on {tensor.device}")
    state = storage.state_of(tensor)
    value = state.value
    everything = pending_values()
    if value is None or value.leaf:
        data: dict[str, Any] = {"pending": False, "ops": 0, "lines": [], "reading_runs": 0}
        return Report("lazytensor: this tensor has its value", ["reading it runs nothing"], [], data)
    names.use(names.look(source.user_frame()))
    try:
        nodes = walk([value])
        leaves = {v: names.of_leaf(v) for n in nodes for v in n.inputs if v.leaf}
    finally:
        names.forget()
    whole = walk(everything)
    rows = [
        [places.of(n.line), n.line.module or "" if n.line else "", _named(n, leaves), places.of(n.line).text[:60]]
        for n in nodes
    ]
    data = {
        "pending": True,
        "ops": len(nodes),
        "lines": [
            {
                **places.data(places.of(n.line)),
                "op": n.op.name,
                "text_of_node": _named(n, leaves),
                "module": n.line.module if n.line else None,
            }
            for n in nodes
        ],
        "inputs": sorted(set(leaves.values())),
        "reading_runs": len(whole),
        "flops": estimate.total_flops(nodes),
    }
    notes = [
        f"made by {len(nodes)} operations from {', '.join(data['inputs'][:8]) or 'nothing'}",
        f"reading it now runs everything pending: {len(whole)} operations, {len(everything)} results",
    ]
    table = Table(
        "The slice that makes it, in order",
        ["line", "module", "operation", "code"],
        rows[-100:],
        max(len(rows) - 100, 0),
    )
    return Report(f"lazytensor: {value!r} is pending", notes, [table], data)


def _named(node: Node, leaves: dict[Value, str]) -> str:
    text = repr(node)
    for value in node.inputs:
        if value.leaf and value in leaves and leaves[value].startswith("`"):
            text = text.replace(f"{value.name},", f"{leaves[value]},").replace(f"{value.name})", f"{leaves[value]})")
    return text
