"""Recompile blame: why a cut found no compiled graph, and which line of the program made the difference.

The new graph is compared with the nearest known one.  Both are walked together from their results down to their leaves,
in step; nodes that were recorded again are the same objects and end the walk at once.  A pair of nodes that differs
although all its inputs agree is where a difference begins, and of those the one recorded first is blamed.
"""

from __future__ import annotations

import functools
import itertools
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lazytensor.inspect import events, names, places
from lazytensor.inspect.events import Known
from lazytensor.trace import source
from lazytensor.trace.ir import LEAF, Node, Number, Op, Value, flatten, show

log = logging.getLogger("lazytensor.recompile")

SHOWN = 200  # differences that a blame keeps
WARM_UP = 2  # misses of one cut that are expected: the first step, and the first with optimizer state
LOUD = 8  # warnings about one line before they become quiet


class Difference:
    """One place where a difference between two graphs begins."""

    __slots__ = ("kind", "leaf", "new", "new_line", "old", "old_line", "op", "rank", "what")

    def __init__(self, kind: str, what: str, old: Any, new: Any, op: str, old_node: Any, new_node: Any) -> None:
        self.kind = kind  # op, attribute, shape, dtype, number, inputs, input, results
        self.what = what
        self.old = old
        self.new = new
        self.op = op
        self.old_line = None if old_node is None else old_node.line
        self.new_line = None if new_node is None else new_node.line
        self.rank = 0 if new_node is None else new_node.seq
        self.leaf: tuple[Any, ...] | None = None  # for a shape: (operation, file, line, argument, dimension)

    @property
    def place(self) -> places.Place:
        """The user's line to look at: that of the new node."""
        return places.of(self.new_line or self.old_line)

    @property
    def module(self) -> str | None:
        """The module of that line."""
        line = self.new_line or self.old_line
        return None if line is None else line.module

    def __str__(self) -> str:
        module = f" ({self.module})" if self.module else ""
        before = (
            ""
            if self.old_line is None or places.of(self.old_line) == self.place
            else f", was {places.of(self.old_line)}"
        )
        return f"{self.what} {self.old} → {self.new}, {self.op} at {self.place}{module}{before}"

    @property
    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "kind": self.kind,
            "what": self.what,
            "old": str(self.old),
            "new": str(self.new),
            "op": self.op,
            "module": self.module,
            "place": places.data(self.place),
            "old_place": None if self.old_line is None else places.data(places.of(self.old_line)),
        }


class Blame:
    """Why one cut missed."""

    def __init__(self, new: Known | None, nodes: int, old: Known | None, differences: list[Difference]) -> None:
        self.graph = "this graph" if new is None else new.name
        self.old = None if old is None else old.name
        self.cause = "" if new is None else new.cause
        self.cut = (None, 0) if new is None else new.where
        self.step = events.step
        self.nodes = nodes
        self.seconds = 0.0 if new is None else new.compile_seconds
        self.differences = differences[:SHOWN]
        self.total = len(differences)
        self.advice = _advice(differences[0]) if differences else ""

    @property
    def first(self) -> Difference | None:
        """The difference that was recorded first."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        place = places.place(*self.cut)
        head = f"{self.graph} ({self.nodes} ops) compiled in {self.seconds * 1e3:.1f} ms at {place} ({self.cause})"
        if self.old is None:
            return f"{head}: nothing like it was known"
        if self.first is None:
            return f"{head}: it has the operations of {self.old}, but other results are alive"
        return f"{head} because it differs from {self.old}: {self.first}" + (f". {self.advice}" if self.advice else "")

    @property
    def full(self) -> str:
        """Every difference found, one a line."""
        lines = [str(self), *(f"  {d}" for d in self.differences)]
        if self.total > len(self.differences):
            lines.append(f"  and {self.total - len(self.differences)} more")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "graph": self.graph,
            "old": self.old,
            "cause": self.cause,
            "step": self.step,
            "cut": places.data(places.place(*self.cut)),
            "nodes": self.nodes,
            "seconds": self.seconds,
            "text": str(self),
            "differences": [d.data for d in self.differences],
            "total": self.total,
            "advice": self.advice,
        }


# --- the nearest known graph ----------------------------------------------------------------------------------------


def nearest(graph: Any, where: Any = None, before: int | None = None) -> Known | None:
    """The known graph most like this one: one cut at the same line if there is a good one, then the latest."""
    ops = Counter(node.op.name for node in graph.nodes)
    best: tuple[float, int] | None = None
    chosen = None
    recent = [k for k in events.graphs.values() if k.graph is not None and (before is None or k.number < before)]
    for known in recent[-32:]:
        likeness = _likeness(ops, known.ops) + (0.2 if where is not None and known.where == where else 0.0)
        if likeness > 0.3 and (best is None or (likeness, known.number) >= best):
            best, chosen = (likeness, known.number), known
    return chosen


def _likeness(one: Counter[str], other: Counter[str]) -> float:
    """How much of two graphs is the same kind of operation.  Their order says little: what hit is older."""
    return (one & other).total() / max(one.total(), other.total(), 1)


# --- the walk -------------------------------------------------------------------------------------------------------


def compare(old: Any, new: Any) -> list[Difference]:
    """Where the differences between two graphs begin, in record order; what only follows from others stands last."""
    matched, gone, added = _match(old.outputs, new.outputs)
    pairs: dict[Node, Node] = {}
    stack = [(a.node, b.node) for a, b in matched]
    while stack:
        a, b = stack.pop()
        if a is b or b in pairs:
            continue
        pairs[b] = a
        if a.op is b.op and len(a.inputs) == len(b.inputs):
            stack.extend((x.node, y.node) for x, y in zip(a.inputs, b.inputs, strict=True))
    uses = _uses(new)
    found: list[Difference] = []
    shifted: list[Difference] = []
    changed: set[Node] = set()
    for b in sorted(pairs, key=lambda n: n.seq):
        a = pairs[b]
        inherited = any(v.node in changed for v in b.inputs)
        own = list(_own(a, b, inherited, uses))
        if own or inherited:
            changed.add(b)
        for difference in own:
            # A size that is passed on (a view's) follows the shape it was computed from, and only names it again.
            follows = difference.kind == "input" or (inherited and difference.kind == "attribute")
            (shifted if follows else found).append(difference)
    # What was made in one step and is data in the next changes once, and seldom alone: other causes come first.
    found.sort(key=lambda d: (d.kind == "data", d.rank))
    for value in added:
        found.append(
            Difference("results", "a result more is alive:", "none", value.spec, value.node.op.name, None, value.node)
        )
    for value in gone:
        found.append(
            Difference("results", "a result less is alive:", value.spec, "none", value.node.op.name, value.node, None)
        )
    return found + shifted


def _match(old: list[Value], new: list[Value]) -> tuple[list[tuple[Value, Value]], list[Value], list[Value]]:
    """Pair the results of two graphs: by identity, then by operation and line in order, then by place in the list."""
    common = set(old) & set(new)
    old, new = [v for v in old if v not in common], [v for v in new if v not in common]
    waiting: dict[Any, list[Value]] = {}
    for value in old:
        waiting.setdefault(_label(value), []).append(value)
    matched: list[tuple[Value, Value]] = []
    left: list[Value] = []
    for value in new:
        row = waiting.get(_label(value))
        if row:
            matched.append((row.pop(0), value))
        else:
            left.append(value)
    remaining = [v for v in old if any(v is w for row in waiting.values() for w in row)]
    for alike in ("line", "op"):  # a result whose op changed, or whose line moved
        for value in list(left):
            wanted = getattr(value.node, alike)
            partner = next((v for v in remaining if getattr(v.node, alike) == wanted), None)
            if partner is not None:
                matched.append((partner, value))
                remaining.remove(partner)
                left.remove(value)
    if remaining and left:
        matched.extend(zip(remaining, left, strict=False))
        count = min(len(remaining), len(left))
        remaining, left = remaining[count:], left[count:]
    return matched, remaining, left


def _label(value: Value) -> Any:
    return value.node.op.name, value.index, value.node.line


def _uses(graph: Any) -> dict[Any, tuple[Node, int]]:
    """The first operation that takes each leaf, and as which argument."""
    first: dict[Any, tuple[Node, int]] = {}
    for node in graph.nodes:
        for position, argument in enumerate(node.args):
            for each in flatten((argument,)):
                if each.__class__ is Value and each.leaf:
                    first.setdefault(each, (node, position))
    return first


def _own(a: Node, b: Node, inherited: bool, uses: dict[Any, tuple[Node, int]]) -> Iterator[Difference]:
    """The differences that begin at this pair."""
    if a.op is LEAF or b.op is LEAF:
        yield from _leaves(a, b, uses)
        return
    if a.op is not b.op:
        yield Difference("op", "operation", a.op.name, b.op.name, b.op.name, a, b)
        return
    alike = True
    for position, (one, other) in enumerate(zip(a.args, b.args, strict=False)):
        if one is other or (one.__class__ is Value and other.__class__ is Value):
            continue
        for difference in _arguments(position, one, other, a, b):
            alike = False
            yield difference
    if alike and not inherited and [v and v.spec for v in a.outputs] != [v and v.spec for v in b.outputs]:
        yield Difference("shape", "result", a.outputs[0], b.outputs[0], b.op.name, a, b)


def _arguments(position: int, one: Any, other: Any, a: Node, b: Node) -> Iterator[Difference]:
    op = b.op.name
    name = _name(b.op, position)
    if isinstance(one, tuple) and isinstance(other, tuple):
        tensors = any(x.__class__ is Value for x in (*one, *other))
        if len(one) != len(other) and tensors:
            yield Difference("inputs", f"tensors in `{name}`:", len(one), len(other), op, a, b)
        elif tensors or any(x.__class__ is Number for x in (*one, *other)):
            for x, y in zip(one, other, strict=False):
                yield from _arguments(position, x, y, a, b)
        elif one != other:
            yield Difference("attribute", f"`{name}`", show(one), show(other), op, a, b)
        return
    if one.__class__ is Value and other.__class__ is Value:
        return
    if one.__class__ is Number and other.__class__ is Number:
        if one.kind is not other.kind:
            yield Difference("number", f"the type of `{name}`", one.kind.__name__, other.kind.__name__, op, a, b)
        elif one is not other:
            yield Difference("input", f"`{name}`", one.name, other.name, op, a, b)
        return
    if one is not other and (one.__class__ is not other.__class__ or one != other):
        yield Difference("attribute", f"`{name}`", show(one), show(other), op, a, b)


@functools.lru_cache(maxsize=4096)
def _name(op: Op, position: int) -> str:
    """What the op's schema calls an argument."""
    schema = op.overload._schema.arguments
    return str(schema[position].name) if position < len(schema) else str(position)


def _leaves(a: Node, b: Node, uses: dict[Any, tuple[Node, int]]) -> Iterator[Difference]:
    user, position = uses.get(b.outputs[0], (b, 0))
    if a.op is not LEAF or b.op is not LEAF:
        before = a if a.op is not LEAF else None
        after = b if b.op is not LEAF else user
        one, other = (f"data {n.outputs[0].spec}" if n.op is LEAF else f"the result of {n.op.name}" for n in (a, b))  # type: ignore[union-attr]
        yield Difference("data", "what was", one, other, after.op.name, before, after)
        return
    old, new = a.outputs[0], b.outputs[0]
    assert old is not None
    assert new is not None
    name = names.of_leaf(new)
    if old.spec.dtype is not new.spec.dtype:
        yield _ranked(Difference("dtype", f"dtype of {name}:", old.dtype, new.dtype, user.op.name, None, user), a)
    elif len(old.size) != len(new.size):
        yield _ranked(
            Difference("shape", f"shape of {name}:", list(old.size), list(new.size), user.op.name, None, user), a
        )
    elif old.size != new.size:
        dim = next(i for i, (m, n) in enumerate(zip(old.size, new.size, strict=True)) if m != n)
        difference = Difference(
            "shape", f"dim {dim} of {name}:", old.size[dim], new.size[dim], user.op.name, None, user
        )
        difference.leaf = (*_origin(user, position), dim)
        yield _ranked(difference, user)
    elif old.spec is not new.spec:
        yield _ranked(
            Difference("shape", f"strides of {name}:", old.spec.stride, new.spec.stride, user.op.name, None, user), a
        )
    else:
        yield Difference("input", "input", old.name, new.name, user.op.name, None, user)


def _ranked(difference: Difference, node: Node) -> Difference:
    difference.rank = node.seq
    return difference


# --- what a leaf's dimension has been -------------------------------------------------------------------------------

_sizes: dict[tuple[Any, ...], list[int]] = {}  # by first use and dimension: the sizes it took, in order of appearance


def _origin(user: Node, position: int) -> tuple[Any, ...]:
    place = user.line.place if user.line is not None else ("", 0, "")
    return user.op.name, place[0], place[1], user.line.module if user.line is not None else None, position


def learn(graph: Any) -> None:
    """Remember the sizes of the data that a new graph takes."""
    for value, (user, position) in _uses(graph).items():
        origin = _origin(user, position)
        for dim, size in enumerate(value.size):
            row = _sizes.setdefault((*origin, dim), [])
            if size not in row:
                row.append(size)


def _advice(first: Difference) -> str:
    if first.kind == "shape" and first.leaf is not None:
        taken = _sizes.get(first.leaf, [])
        dim, name = first.leaf[-1], first.what.partition(" of ")[2].rstrip(":")
        said = f"dim {dim} of {name} took {len(taken)} values {{{', '.join(map(str, taken[-8:]))}}}"
        if len(taken) > 2 and all(n > m for m, n in itertools.pairwise(taken)):
            return f"{said} and grows: preallocate it and write into a slice, or pad to a few fixed sizes"
        if dim == 0:
            return f"{said}: pad or drop the last batch (DataLoader(drop_last=True))"
        return f"{said}: pad to a fixed size or to a few buckets"
    return _ADVICE.get(first.kind, "")


_ADVICE = {
    "op": "the program took another branch here: keep the operations of a step the same, for example with torch.where",
    "attribute": "this argument is part of the structure: keep it constant, or pass it as a tensor",
    "inputs": "a list of tensors changed its length: keep it constant, or preallocate one tensor and write into it",
    "number": "a number changed its Python type, which changes type promotion: keep it int or float",
    "data": "what one step made, a later one takes as data: usual in the second step, when optimizer state exists",
    "dtype": "keep the dtype of the data constant",
    "results": "a tensor that is kept alive is a result of the graph: drop references that are not needed, or keep "
    "them from the first step on",
    "input": "other data is used here: the same tensors have to be used in the same order at every step",
}


# --- at a miss ------------------------------------------------------------------------------------------------------

_sites: dict[Any, list[int]] = {}  # by line of the cut: misses, hits seen at the last miss
_warned: dict[Any, int] = {}


def reset() -> None:
    """Forget what was learnt about sizes and lines."""
    _sizes.clear()
    _sites.clear()
    _warned.clear()


def of(known: Known) -> Blame:
    """Compare a graph that was just compiled with the nearest one known before, and say so in the log."""
    frame = source.user_frame(sys._getframe(1))
    names.look(frame)
    try:
        learn(known.graph)
        old = nearest(known.graph, known.where, known.number)
        differences = [] if old is None else compare(old.graph, known.graph)
        blame = Blame(known, known.nodes, old, differences)
    finally:
        names.forget()
    _say(blame, known)
    return blame


def why_not(graph: Any) -> Blame | None:
    """What would be blamed if this graph, which is not known, were cut now."""
    frame: FrameType | None = source.user_frame(sys._getframe(1))
    names.look(frame)
    try:
        old = nearest(graph)
        if old is None:
            return None
        return Blame(None, len(graph.nodes), old, compare(old.graph, graph))
    finally:
        names.forget()


def _say(blame: Blame, known: Known) -> None:
    """One line in the log: loud when a cut that was warm compiles again, quiet while it warms up."""
    site = _sites.setdefault(known.where, [0, 0])
    site[0] += 1
    warm = any(k.hits and k.where == known.where for k in events.graphs.values())
    level = logging.INFO
    if blame.old is not None and (warm or site[0] > WARM_UP):
        about = blame.first.place if blame.first is not None else known.where
        _warned[about] = _warned.get(about, 0) + 1
        if _warned[about] <= LOUD:
            level = logging.WARNING
    log.log(level, "lazytensor: %s", blame)


class Blames:
    """The recompilations in the ledger, the latest last; printing shows the last one in full."""

    def __init__(self, blames: list[Blame]) -> None:
        self.blames = blames

    def __iter__(self) -> Iterator[Blame]:
        return iter(self.blames)

    def __len__(self) -> int:
        return len(self.blames)

    def __getitem__(self, index: int) -> Blame:
        return self.blames[index]

    def __str__(self) -> str:
        return self.blames[-1].full if self.blames else "nothing was compiled"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    @property
    def data(self) -> list[dict[str, Any]]:
        """As plain data."""
        return [b.data for b in self.blames]


def blame() -> Blames:
    """Why graphs were compiled: the comparison of each with the nearest one known before."""
    return Blames([k.blame for k in events.graphs.values() if k.blame is not None])


__all__ = ["Blame", "Difference", "blame", "compare", "nearest", "of", "why_not"]
