"""Where two graphs differ: the pairs of nodes at which a difference begins.

Both graphs are walked together from their results down to their leaves, in step; nodes that were recorded again are the
same objects and end the walk at once.  A pair that differs although all its inputs agree is where a difference begins.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from lazytensor.inspect import names, places
from lazytensor.trace.ir import LEAF, Node, Number, Op, Value, flatten, show


class Difference:
    """One place where a difference between two graphs begins."""

    __slots__ = ("follows", "kind", "leaf", "new", "new_line", "old", "old_line", "op", "rank", "what")

    def __init__(self, kind: str, what: str, old: Any, new: Any, op: str, old_node: Any, new_node: Any) -> None:
        self.kind = kind  # op, attribute, shape, dtype, number, inputs, input, results
        self.what = what
        self.old = old
        self.new = new
        self.op = op
        self.old_line = None if old_node is None else old_node.line
        self.new_line = None if new_node is None else new_node.line
        self.rank = 0 if new_node is None else new_node.seq
        self.follows = False  # whether it only follows from others
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
    uses = first_uses(new)
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
            difference.follows = difference.kind == "input" or (inherited and difference.kind == "attribute")
            (shifted if difference.follows else found).append(difference)
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


def first_uses(graph: Any) -> dict[Any, tuple[Node, int]]:
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
        difference.leaf = (*origin(user, position), dim)
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


def origin(user: Node, position: int) -> tuple[Any, ...]:
    """What tells the data that a program passes here from other data: its first use, whatever its shape."""
    place = user.line.place if user.line is not None else ("", 0, "")
    return user.op.name, place[0], place[1], user.line.module if user.line is not None else None, position
