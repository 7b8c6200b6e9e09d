"""Finds the first operation whose result on a backend is not what the reference interpreter gives.

The interpreter runs the graph op by op and keeps every value.  The backend runs the same graph with every value as an
output; the first value out of tolerance names the operation.  Making everything an output may hide a fault (nothing can
be fused away), so if all agree and the step itself still differs, the prefixes of the graph are bisected, each with the
outputs that the rest of the step needs.
"""

from __future__ import annotations

import hashlib
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.backend import graphfile, memory, registry
from lazytensor.backend.contract import Failure
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.backend.reference import Program
from lazytensor.execute import cut, stepfile
from lazytensor.inspect import events
from lazytensor.trace.ir import Node, Value
from lazytensor.trace.shapes import clean

log = logging.getLogger("lazytensor")

# How far an element may be off, relative to the largest element of the result.  Everything else must be equal.
TOLERANCES = {
    torch.float64: 1e-9,
    torch.complex128: 1e-9,
    torch.float32: 1e-4,
    torch.complex64: 1e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 4e-2,
}


@dataclass
class Difference:
    """The first operation whose result differs, and the part of the step that shows it."""

    backend: str
    node: Node
    what: str  # in which way the result differs
    alone: (
        bool | None
    )  # whether the op differs when it runs by itself on the right inputs; None if that cannot be tried
    graph: Graph = field(repr=False)  # up to this operation, from the step's own inputs
    inputs: list[Any] = field(repr=False)
    expected: list[torch.Tensor] = field(repr=False)
    path: Path | None = None  # the step file that repeats it

    def save(self, path: Path) -> Path:
        """Write the part of the step that differs as a step file."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        stepfile.write(path, self.graph, self.inputs, self.expected)
        self.path = path
        return path

    @property
    def script(self) -> str:
        """A program that repeats the difference from the step file."""
        room = _tolerance(self.expected[0].dtype, None)
        return (
            "import lazytensor as lt\n\n"
            f"step = lt.load_step({str(self.path)!r})\n"
            f"step.check({self.backend!r}, rtol={room}, atol={room})\n"
        )

    def __str__(self) -> str:
        text = f"{self.node.op.name}, recorded at {self.node.line}, differs on {self.backend!r}: {self.what}"
        if self.alone is not None:
            text += "; it also differs by itself" if self.alone else "; by itself, on the same inputs, it is right"
        if self.path is not None:
            text += f". Repeat it: lazytensor bisect {self.path} --backend {self.backend}"
        return text


def _tolerance(dtype: torch.dtype, chosen: float | None) -> float:
    return TOLERANCES.get(dtype, 0.0) if chosen is None or dtype not in TOLERANCES else chosen


def differs(expected: torch.Tensor, actual: Any, tolerance: float | None = None) -> str | None:
    """In which way a result is out of tolerance; None if it is not."""
    if not isinstance(actual, torch.Tensor):
        return f"it is a {type(actual).__name__}"
    if actual.shape != expected.shape or actual.dtype is not expected.dtype:
        return f"it is {actual.dtype}{list(actual.shape)} instead of {expected.dtype}{list(expected.shape)}"
    if not expected.numel():
        return None
    wide = torch.complex128 if expected.is_complex() else torch.float64
    if _tolerance(expected.dtype, tolerance) == 0.0:
        wrong = ~((expected == actual) | ((expected != expected) & (actual != actual)))
    else:
        e, a = expected.to(wide), actual.to(wide)
        finite = e.abs()[e.isfinite()]
        room = _tolerance(expected.dtype, tolerance) * (float(finite.max()) if finite.numel() else 0.0)
        wrong = ~torch.isclose(a, e, rtol=0.0, atol=room, equal_nan=True)
    count = int(wrong.sum())
    if not count:
        return None
    where = tuple(wrong.nonzero()[0].tolist())
    some = f"{count} of {expected.numel()} elements, the first at {list(where)}"
    return f"{some}: {actual[where].item()!r} instead of {expected[where].item()!r}"


def geometry(tensor: torch.Tensor) -> str:
    """What a tensor looks like, in words."""
    return f"{tensor.dtype}{list(tensor.shape)} with strides {list(tensor.stride())}"


class Comparison:
    """One graph and its inputs, on the interpreter and on a backend."""

    def __init__(self, graph: Graph, inputs: list[Any], backend: Backend, tolerance: float | None = None) -> None:
        self.graph = graph
        self.backend = backend
        self.tolerance = tolerance
        self.given = {leaf: memory.host(data) for leaf, data in zip(graph.inputs, inputs, strict=True)}
        every = [v for node in graph.nodes for v in node.outputs if v is not None]
        self.every = list(dict.fromkeys([*every, *graph.outputs]))
        results = Program(Graph(self.every, nodes=graph.nodes))(*self._inputs(Graph(self.every, nodes=graph.nodes)))
        self.expected: dict[Value, Any] = dict(zip(self.every, results, strict=True))

    def _inputs(self, part: Graph) -> list[Any]:
        return [_copy(self.given[i] if i in self.given else self.expected[i]) for i in part.inputs]  # type: ignore[index]

    def _run(self, part: Graph) -> list[Any]:
        inputs = self._inputs(part)
        if self.backend.own_memory:
            inputs = [memory._fitted(self.backend, i) if isinstance(i, torch.Tensor) else i for i in inputs]
        return [memory.host(r) for r in self.backend.computation(part).run(*inputs)]

    def wrong(self, part: Graph) -> tuple[Node, str] | None:
        """The first output of a part that differs, in the order of the part's operations; what raises differs too."""
        try:
            with clean():
                results = self._run(part)
        except Exception as error:
            return (part.nodes[-1] if part.nodes else self.graph.nodes[0]), f"it raised {type(error).__name__}: {error}"
        order = {node: i for i, node in enumerate(part.nodes)}
        found: list[tuple[int, Node, str]] = []
        with clean():
            for value, result in zip(part.outputs, results, strict=True):
                right = self.expected[value]
                if right.__class__ is Failure:
                    continue  # the step's own error: there is no right result
                what = differs(right, result, self.tolerance)
                if what is not None:
                    found.append((order.get(value.node, -1), value.node, what))
        return min(found, key=lambda f: f[0])[1:] if found else None

    def prefix(self, length: int) -> Graph:
        """The first operations of the graph, with the outputs that the rest needs."""
        nodes = self.graph.nodes[:length]
        needed = (
            {v for node in self.graph.nodes[length:] for v in node.inputs}
            | set(self.graph.outputs)
            | set(nodes[-1].outputs)
        )
        return Graph([v for node in nodes for v in node.outputs if v is not None and v in needed], nodes=nodes)

    def first(self) -> Difference | None:
        """The first operation that differs."""
        if not self.graph.nodes:
            return None
        everything = Graph(self.every, nodes=self.graph.nodes)
        found = self.wrong(everything)
        if found is not None and not found[1].startswith("it raised"):
            return self._difference(*found)
        whole = self.wrong(Graph(self.graph.outputs, dict(self.graph.replaces), self.graph.nodes))
        if whole is None:
            return None
        low, high, last = 0, len(self.graph.nodes), whole
        while high - low > 1:
            middle = (low + high) // 2
            found = self.wrong(self.prefix(middle))
            if found is None:
                low = middle
            else:
                high, last = middle, found
        return self._difference(self.graph.nodes[high - 1], last[1])

    def _difference(self, node: Node, what: str) -> Difference:
        outputs = [v for v in node.outputs if v is not None and self.expected[v].__class__ is not Failure]
        needed: set[Node] = {node}
        for earlier in reversed(self.graph.nodes):
            if earlier in needed:
                needed.update(v.node for v in earlier.inputs)
        part = Graph(outputs, nodes=[n for n in self.graph.nodes if n in needed])
        inputs = [_copy(self.given[leaf]) for leaf in part.inputs]
        return Difference(
            self.backend.name, node, what, self._alone(node, outputs), part, inputs, [self.expected[v] for v in outputs]
        )

    def _alone(self, node: Node, outputs: list[Value]) -> bool | None:
        """Whether an operation differs by itself.  A view cannot be tried: it needs the memory it looks at."""
        if node.op.view or any(self.expected.get(v).__class__ is Failure for v in node.inputs):
            return None
        return self.wrong(Graph(outputs, nodes=[node])) is not None


def _copy(data: Any) -> Any:
    """The same tensor in other memory, laid out alike."""
    if not isinstance(data, torch.Tensor):
        return data
    with clean():
        made = torch.empty(0, dtype=data.dtype)
        return made.set_(data.untyped_storage().clone(), data.storage_offset(), data.size(), data.stride())


def first_difference(
    graph: Graph, inputs: list[Any], backend: str | Backend, tolerance: float | None = None
) -> Difference | None:
    """The first operation of a graph whose result on a backend is not the interpreter's."""
    chosen = backend if isinstance(backend, Backend) else registry.instance(backend)
    chosen.prepare()
    return Comparison(graph, inputs, chosen, tolerance).first()


def keep(difference: Difference) -> Difference:
    """Write the step file that repeats a difference into the cache folder; without the library for it, do nothing."""
    text = graphfile.dumps(difference.graph)
    name = hashlib.sha256(text.encode()).hexdigest()[:12]
    try:
        difference.save(settings.cache_directory() / "steps" / f"differs-{name}.step")
    except (OSError, errors.LazyTensorError) as problem:
        log.warning("lazytensor: no step file that repeats the difference could be written: %s", problem)
    return difference


def verify(
    backend: str | Backend | None = None, tolerance: float | None = None, path: str | Path | None = None
) -> Difference | None:
    """Run what is pending, and compare every operation of it on a backend with the reference interpreter.

    Returns the first :class:`Difference`, with the operation's line and a step file that repeats it (at ``path``, or in
    the cache folder), or None.  Without a name the backend in force is compared.  ``tolerance`` is relative to the
    largest element of each result; without one it is that of the dtype (``TOLERANCES``), and 0 asks for equal bits.
    The program goes on as after ``lt.sync()``.
    """
    found: list[Difference | None] = []

    def run(computation: Any, inputs: list[Any]) -> list[Any]:
        found.append(first_difference(computation.graph, inputs, backend or registry.current(), tolerance))
        return computation.run(*inputs)  # type: ignore[no-any-return]

    before, events.take_over = events.take_over, run
    try:
        cut.cut("verify", wait=True)
    finally:
        events.take_over = before
    difference = next((d for d in found if d is not None), None)
    if difference is None:
        return None
    if path is None:
        return keep(difference)
    difference.save(Path(path))
    return difference
