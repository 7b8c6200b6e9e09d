"""The trace's data model: what a node is, what a value is, and how each exists only once.

Read this file first. Everything lazytensor records is made of four things:

``Spec``
    What a tensor looks like: size, stride, storage offset, dtype, device number.  Interned: two equal specs are one
    object, so comparing them is ``is``.
``Value``
    One tensor-shaped result, or a leaf.  A value is pure structure and holds no data.
``Node``
    One recorded operation: an :class:`Op`, its arguments (values and constants) and its output values.
``Op``
    One ATen overload, and the table that interns its nodes.

Interning is the central idea.  ``op.table`` maps the canonical arguments of a call to the outputs that this call has.
The same program therefore gives the same value objects at every step, and one dict lookup replaces building a node,
inferring its shape, hashing it and finding its source line.  All of that happens only when the lookup misses.

What must hold:

* A canonical argument is a ``Value``, ``None``, an ``int``/``bool``/``str``/dtype/layout/memory format at a position
  whose schema type admits nothing else, a ``Const``, or a tuple of these.  Python's ``1 == 1.0 == True`` cannot mix
  them up: a number whose *type* may vary is either lifted to a number leaf, which is a different value per type, or a
  ``Const``.
* Equality of values is identity.  No hash of structure is ever trusted.
* A node's arguments were made before the node, so ``node.seq`` orders any set of nodes topologically, and no walk
  over a graph needs recursion.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any

import torch

DATA = "data"
NUMBER = "number"

_made = 0  # nodes made so far; a node's sequence number
_kept = 0  # nodes that survived the last sweep
_since = 0  # the sequence number then


def nodes_made() -> int:
    """How many nodes were ever made."""
    return _made


def node_count() -> int:
    """About how many nodes are interned: those kept by the last sweep and those made since."""
    return _kept + _made - _since


def nodes_dropped(kept: int) -> None:
    """Start counting again after a sweep that kept this many nodes."""
    global _kept, _since
    _kept, _since = kept, _made


class Spec:
    """What a tensor looks like: size, stride, storage offset, dtype and device number."""

    __slots__ = ("bits", "device", "dtype", "nbytes", "numel", "offset", "plain", "size", "stride")

    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: int
    bits: int  # 1: seen conjugated, 2: seen negated (the bits PyTorch sets on an alias instead of computing)
    numel: int
    nbytes: int
    plain: bool  # contiguous, not empty, offset 0, on device 0: what the fastest way of making a tensor makes

    def __repr__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        shape = ", ".join(map(str, self.size))
        return f"{name}[{shape}]" + ("" if self.stride == contiguous_stride(self.size) else f"@{list(self.stride)}")

    def __reduce__(self) -> tuple[Any, ...]:
        return spec, (self.size, self.stride, self.offset, self.dtype, self.device, self.bits)


_specs: dict[tuple[Any, ...], Spec] = {}


def contiguous_stride(size: tuple[int, ...]) -> tuple[int, ...]:
    """The row-major strides that PyTorch gives a contiguous tensor of this size."""
    stride = []
    step = 1
    for length in reversed(size):
        stride.append(step)
        step *= max(length, 1)
    return tuple(reversed(stride))


def spec(
    size: tuple[int, ...], stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: int, bits: int = 0
) -> Spec:
    """The one Spec with these fields."""
    key = (size, stride, offset, dtype, device, bits)
    found = _specs.get(key)
    if found is None:
        found = Spec()
        found.size, found.stride, found.offset, found.dtype, found.device, found.bits = key
        numel = 1
        for length in size:
            numel *= length
        found.numel = numel
        found.nbytes = numel * dtype.itemsize
        found.plain = numel > 0 and device == 0 and offset == 0 and bits == 0 and stride == contiguous_stride(size)
        _specs[key] = found
    return found


def spec_of(tensor: torch.Tensor, device: int) -> Spec:
    """The Spec of a real (or meta) tensor, as if it lived on the given ltc device."""
    bits = tensor.is_conj() + 2 * tensor.is_neg()
    return spec(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, device, bits)


class Value:
    """One tensor-shaped result of a node, or a leaf.

    ``size``, ``dtype`` and ``plain`` repeat the spec's, since a kernel reads them for every recorded op.
    """

    __slots__ = ("dtype", "index", "leaf", "node", "plain", "size", "spec")

    node: Node
    index: int
    spec: Spec
    size: tuple[int, ...]
    dtype: torch.dtype
    plain: bool
    leaf: bool

    def __init__(self, node: Node, index: int, spec: Spec, leaf: bool = False) -> None:
        self.node = node
        self.index = index
        self.spec = spec
        self.size = spec.size
        self.dtype = spec.dtype
        self.plain = spec.plain
        self.leaf = leaf

    @property
    def name(self) -> str:
        """How this value is called in printed graphs."""
        node = self.node
        if node.op is LEAF:
            return f"x{node.args[1]}" if node.args[0] is DATA else f"n{node.args[1]}"
        return f"v{node.seq}" + (f"_{self.index}" if len(node.outputs) > 1 else "")

    def __repr__(self) -> str:
        return f"{self.name}: {self.spec}"


class Number:
    """A leaf that stands for a Python number: the ``index``-th number lifted since the last cut, of this type."""

    __slots__ = ("index", "kind", "node")

    def __init__(self, index: int, kind: type) -> None:
        self.index = index
        self.kind = kind

    leaf = True

    @property
    def name(self) -> str:
        """How this number is called in printed graphs."""
        return f"n{self.index}"

    def __repr__(self) -> str:
        return f"{self.name}: {self.kind.__name__}"


class Const:
    """A Python number that is part of the structure, kept apart from equal numbers of another type."""

    __slots__ = ("value",)

    def __init__(self, value: complex) -> None:
        self.value = value

    def __repr__(self) -> str:
        return repr(self.value)


_consts: dict[tuple[type, Any], Const] = {}


def const(value: complex) -> Const:
    """The one Const for this number: its type, and for floats its bits, decide."""
    bits = struct.pack("<d", value) if type(value) is float else value
    key = (type(value), bits)
    found = _consts.get(key)
    if found is None:
        found = _consts[key] = Const(value)
    return found


class Op:
    """One ATen overload: how to call it, and the table in which its nodes are interned."""

    __slots__ = ("_keywords", "_overload", "name", "table", "view")

    def __init__(self, name: str, view: bool = False) -> None:
        self.name = name  # "aten::add.Tensor"
        self.table: dict[tuple[Any, ...], Any] = {}
        self.view = view
        self._overload: Any = None
        self._keywords: tuple[str, ...] | None = None

    @property
    def overload(self) -> Any:
        """The ``torch._ops.OpOverload``, looked up when first needed."""
        if self._overload is None:
            namespace, _, rest = self.name.partition("::")
            base, _, overload = rest.partition(".")
            self._overload = getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
        return self._overload

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword-only arguments, which stand last in the canonical arguments."""
        if self._keywords is None:
            self._keywords = tuple(a.name for a in self.overload._schema.arguments if a.kwarg_only)
        return self._keywords

    def __repr__(self) -> str:
        return self.name


LEAF = Op("lazytensor::leaf")


class Node:
    """One recorded operation.  ``args`` holds the canonical arguments in the order of the op's schema."""

    __slots__ = ("args", "depth", "inputs", "line", "mark", "op", "outputs", "seq")

    op: Op
    args: tuple[Any, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value | None, ...]
    seq: int
    depth: int
    line: Any
    mark: int

    def __init__(self, op: Op, args: tuple[Any, ...], line: Any = None) -> None:
        global _made
        self.op = op
        self.args = args
        self.inputs = tuple(values_in(args))
        self.outputs = ()
        _made += 1
        self.seq = _made
        depth = 0
        for value in self.inputs:
            if value.node.depth > depth:
                depth = value.node.depth
        self.depth = depth + 1
        self.line = line
        self.mark = 0

    @property
    def numbers(self) -> Iterator[Number]:
        """The lifted numbers among the arguments."""
        return (a for a in flatten(self.args) if a.__class__ is Number)

    def __repr__(self) -> str:
        outputs = ", ".join("None" if v is None else v.name for v in self.outputs)
        return f"{outputs} = {self.op.name}({', '.join(map(show, self.args))})"


def show(argument: Any) -> str:
    """One canonical argument as printed in a node's text."""
    if isinstance(argument, Value | Number):
        return argument.name
    if isinstance(argument, tuple):
        return "[" + ", ".join(map(show, argument)) + "]"
    return repr(argument)


def flatten(args: Iterable[Any]) -> Iterator[Any]:
    """The canonical arguments with lists opened."""
    for argument in args:
        if argument.__class__ is tuple:
            yield from flatten(argument)
        else:
            yield argument


def values_in(args: Iterable[Any]) -> list[Value]:
    """The tensor values among canonical arguments, in lists too."""
    found: list[Value] = []
    for argument in args:
        kind = argument.__class__
        if kind is Value:
            found.append(argument)
        elif kind is tuple:
            found += values_in(argument)
    return found


_data_leaves: dict[tuple[int, Spec], Value] = {}
# Some are there before a program's first step needs them.
_number_leaves: dict[type, list[Number]] = {
    kind: [Number(index, kind) for index in range(16)] for kind in (bool, int, float, complex)
}


def data_leaf(index: int, spec: Spec) -> Value:
    """The value that means: the ``index``-th piece of device data used since the last cut, which looks like this."""
    key = (index, spec)
    found = _data_leaves.get(key)
    if found is None:
        node = Node(LEAF, (DATA, index))
        found = _data_leaves[key] = Value(node, 0, spec, leaf=True)
        node.outputs = (found,)
    return found


def number_leaf(index: int, kind: type) -> Number:
    """The leaf that means: the ``index``-th number lifted since the last cut, a Python number of this type."""
    row = _number_leaves[kind]
    if index >= len(row):  # many at once: the compiled recorder asks for each that is not there
        row += [Number(i, kind) for i in range(len(row), 2 * index)]
    return row[index]


def make_node(op: Op, args: tuple[Any, ...], specs: Iterable[Spec | None], line: Any = None) -> Node:
    """A new node with outputs of these specs.  The caller interns it."""
    node = Node(op, args, line)
    node.outputs = tuple([None if s is None else Value(node, i, s) for i, s in enumerate(specs)])
    return node


def walk(roots: Iterable[Value]) -> list[Node]:
    """Every node the roots depend on, leaves left out, each once, inputs before users."""
    found: dict[Node, None] = {}
    stack = [v.node for v in roots]
    while stack:
        node = stack.pop()
        if node in found or node.op is LEAF:
            continue
        found[node] = None
        for value in node.inputs:
            if value.node not in found:
                stack.append(value.node)
    return sorted(found, key=_by_sequence)


def _by_sequence(node: Node) -> int:
    return node.seq
