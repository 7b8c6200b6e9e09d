"""A graph of which a backend supports only part: decomposed, divided into segments, each run by whoever can.

Segments alternate between the backend and the reference interpreter, each as large as the dependences allow.  Views
cost nothing and tie memory together, so they are not passed from one segment to another: a segment that needs a view
makes it again from what it is a view of.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

from lazytensor.backend.contract import Failure, Guard
from lazytensor.backend.data import Computation
from lazytensor.backend.decompose import CannotDecompose, decompose
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.backend.reference import Program
from lazytensor.trace.ir import Node, Value, make_node, values_in

log = logging.getLogger("lazytensor")
_said: set[tuple[str, str]] = set()


def compile_parts(backend: Backend, computation: Computation) -> Callable[..., list[Any]]:
    """A callable for the whole graph.  What was decomposed and what is interpreted is noted in the computation."""
    if backend.own_memory:
        return _ThroughHost(backend, computation)
    graph, decomposed = simplified(computation.graph, backend.supports)
    segments = divide(graph, backend.supports)
    interpreted = Counter(n.op.name for s in segments if not s.supported for n in s.nodes if not n.op.view)
    computation.decomposed = dict(decomposed)
    computation.interpreted = dict(interpreted)
    _report(backend, decomposed, interpreted)
    return Plan(backend, computation, graph, segments)


def _report(backend: Backend, decomposed: Counter[str], interpreted: Counter[str]) -> None:
    backend.counts["decomposed"] += decomposed.total()
    backend.counts["interpreted"] += interpreted.total()
    new = [name for name in interpreted if (backend.name, name) not in _said]
    if new:
        _said.update((backend.name, name) for name in new)
        log.warning(
            "lazytensor: the backend %r does not support %s: the reference interpreter runs it",
            backend.name,
            ", ".join(sorted(new)),
        )


def simplified(graph: Graph, supports: Callable[[Node], bool]) -> tuple[Graph, Counter[str]]:
    """The same graph, unsupported operations decomposed where that makes them supported; how many of each were."""
    now: dict[Value, Value] = {}
    nodes: list[Node] = []
    count: Counter[str] = Counter()

    def renewed(argument: Any) -> Any:
        if argument.__class__ is tuple:
            return tuple(map(renewed, argument))
        return now.get(argument, argument) if argument.__class__ is Value else argument

    for original in graph.nodes:
        node = original
        if any(v in now for v in node.inputs):
            node = make_node(
                node.op, renewed(node.args), [None if v is None else v.spec for v in node.outputs], node.line
            )
            now.update(
                (a, b) for a, b in zip(original.outputs, node.outputs, strict=True) if a is not None and b is not None
            )
        if not supports(node):
            try:
                parts, outputs = decompose(node, supports)
            except CannotDecompose:
                pass
            else:
                count[node.op.name] += 1
                nodes += parts
                now.update(
                    (a, b) for a, b in zip(original.outputs, outputs, strict=True) if a is not None and b is not None
                )
                continue
        nodes.append(node)
    return Graph([now.get(v, v) for v in graph.outputs], graph.replaces, nodes), count


class Segment:
    """Operations that one side runs together."""

    def __init__(self, supported: bool) -> None:
        self.supported = supported
        self.nodes: dict[Node, None] = {}

    def take(self, node: Node, inlined: dict[Node, int]) -> None:
        """Add a node, and before it the views it looks through."""
        views: set[Node] = set()
        stack = [v.node for v in node.inputs]
        while stack:
            above = stack.pop()
            if above in inlined and above not in self.nodes and above not in views:
                views.add(above)
                stack += [v.node for v in above.inputs]
        for view in sorted(views, key=inlined.__getitem__):
            self.nodes[view] = None
        self.nodes[node] = None


def divide(graph: Graph, supports: Callable[[Node], bool]) -> list[Segment]:
    """The graph's nodes in segments, in an order in which they can run."""
    supported = {node: supports(node) for node in graph.nodes}
    inlined = {node: i for i, node in enumerate(graph.nodes) if node.op.view and supported[node]}
    users: dict[Node, list[Node]] = {}
    waiting: dict[Node, int] = {}
    ready: dict[bool, deque[Node]] = {True: deque(), False: deque()}
    for node in graph.nodes:
        if node in inlined:
            continue
        needed = {above for above in _makers(node, inlined) if above in supported}
        waiting[node] = len(needed)
        for above in needed:
            users.setdefault(above, []).append(node)
        if not needed:
            ready[supported[node]].append(node)
    segments: list[Segment] = []
    side = bool(ready[True])
    while ready[True] or ready[False]:
        segment = Segment(side)
        while ready[side]:
            node = ready[side].popleft()
            segment.take(node, inlined)
            for user in users.get(node, ()):
                waiting[user] -= 1
                if not waiting[user]:
                    ready[supported[user]].append(user)
        if segment.nodes:
            segments.append(segment)
        side = not side
    rest = Segment(False)  # results that are views
    for value in graph.outputs:
        if value.node in inlined:
            rest.take(value.node, inlined)
    if rest.nodes:
        segments.append(rest)
    return segments


def _makers(node: Node, inlined: dict[Node, int]) -> set[Node]:
    """The nodes that make what this one uses, seen through views."""
    found: set[Node] = set()
    for value in values_in(node.args):
        above = value.node
        while above in inlined:
            above = above.inputs[0].node
        found.add(above)
    return found


class Plan:
    """The segments of one graph as one callable."""

    def __init__(self, backend: Backend, computation: Computation, graph: Graph, segments: list[Segment]) -> None:
        self.graph = graph
        needed = _needed(graph, segments)
        self.steps: list[tuple[Callable[..., list[Any]], list[Any], list[Value]]] = []
        parts = []
        for number, segment in enumerate(segments):
            part = Graph(needed[number], nodes=segment.nodes)
            if segment.supported:
                compiled = Computation(backend, part, computation.device, f"{computation.name}.{number}")
                parts.append((number, compiled))
                self.steps.append((compiled.run, part.inputs, part.outputs))
            else:
                self.steps.append((Program(part), part.inputs, part.outputs))
        backend.compile_all([compiled for _, compiled in parts])
        for number, compiled in parts:
            _, inputs, outputs = self.steps[number]
            self.steps[number] = (Guard(compiled), inputs, outputs)
        self.computations = [compiled for _, compiled in parts]

    def __call__(self, *given: Any) -> list[Any]:
        """Run the segments one after another."""
        have: dict[Any, Any] = dict(zip(self.graph.inputs, given, strict=False))
        for run, inputs, outputs in self.steps:
            results = run(*[have[i] for i in inputs])
            for value, result in zip(outputs, results, strict=True):
                if result.__class__ is Failure:
                    raise result.error
                have[value] = result
        return [have[v] for v in self.graph.outputs]


def _needed(graph: Graph, segments: list[Segment]) -> list[list[Value]]:
    """What each segment must hand out: what a later one or the caller uses."""
    wanted: set[Value] = set(graph.outputs)
    needed: list[list[Value]] = []
    for segment in reversed(segments):
        made = [v for node in segment.nodes for v in node.outputs if v is not None]
        handed = [v for v in made if v in wanted]
        needed.append(handed)
        wanted.difference_update(handed)
        own = set(made)
        wanted.update(v for node in segment.nodes for v in node.inputs if v not in own)
    return needed[::-1]


class _ThroughHost:
    """For a backend with memory of its own: segments meet on the host, which both sides can reach."""

    def __init__(self, backend: Backend, computation: Computation) -> None:
        self.backend = backend
        self.device = computation.device
        outer = _OnHost(backend)
        self.plan = compile_parts(outer, computation)
        self.outputs = computation.graph.outputs

    def __call__(self, *given: Any) -> list[Any]:
        from lazytensor.backend.memory import host

        results = self.plan(*map(host, given))
        return [self.backend.to_device(r, v.spec, self.device) for r, v in zip(results, self.outputs, strict=True)]


class _OnHost(Backend):
    """A backend with memory of its own, seen as one that takes and returns CPU tensors."""

    def __init__(self, backend: Backend) -> None:
        super().__init__()
        self.inner = backend
        self.name = backend.name
        self.counts = backend.counts

    def supports(self, node: Node) -> bool:
        """What the backend itself supports."""
        return self.inner.supports(node)

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """The backend's own compilation, its arguments uploaded and its results downloaded."""
        inner, device = self.inner, self.device_of()
        run = inner.compile(graph)
        specs = [v.spec for v in graph.data]

        def through(*given: Any) -> list[Any]:
            data = [inner.to_device(t, s, device) for t, s in zip(given, specs, strict=False)]
            return [inner.to_host(r) for r in run(*data, *given[len(specs) :])]

        return through

    def device_of(self) -> Any:
        """The device on which the backend computes."""
        return self.inner.devices()[0]
