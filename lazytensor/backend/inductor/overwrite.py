"""Which inputs compiled code may overwrite: those whose new value is written after everything that can fail.

Compiled code writes a new parameter into the memory of the old one as soon as it can.  If an index out of range stops
it later, the cut is run again where the failing operation can be named, and must find its inputs as they were.  So an
input is overwritten only by a value that depends on every check of the graph; any other gets memory of its own.  In a
training step these are few: the loss depends on every lookup, and the parameters on the loss.

Nor is an input overwritten by what is only a copy of another that is overwritten, too.  Inductor drops copies, also one
that was made before the write and is read after it.  Symptom: two tensors that change places were the same afterwards.
"""

from __future__ import annotations

from typing import Any

from lazytensor.backend.graph import Graph
from lazytensor.trace.ir import Node, Value, flatten

_INDICES = ("index", "indices", "target")  # arguments of these names are checked against a size
_DIVISIONS = ("div", "floor_divide", "remainder", "fmod", "bitwise_left_shift", "bitwise_right_shift")


def overwritten(graph: Graph) -> dict[int, int]:
    """Of the outputs that replace an input, by number: those that may be written into its memory."""
    checks: dict[Any, int] = {}  # what is checked -> its bit
    passed: dict[Node, int] = {}  # which checks a node's value depends on, itself included
    for node in graph.nodes:
        bits = 0
        for value in node.inputs:
            bits |= passed.get(value.node, 0)
        for check in _checks(node):
            bits |= checks.setdefault(check, 1 << len(checks))
        passed[node] = bits
    every = (1 << len(checks)) - 1
    allowed = {n: at for n, at in graph.replaces.items() if passed.get(graph.outputs[n].node, 0) == every}
    position = {value: at for at, value in enumerate(graph.data)}
    written = set(allowed.values())
    copied = {n: position.get(_copied(graph.outputs[n])) for n in allowed}
    return {n: at for n, at in allowed.items() if copied[n] == at or copied[n] not in written}


# What may turn out to be a copy of its only, or first, tensor (``noop_registry`` in Inductor's ``post_grad.py``).
_COPIES = ("clone", "_to_copy", "repeat", "constant_pad_nd", "ceil", "floor", "round", "trunc", "pow", "cat", "copy")


def _copied(value: Value) -> Value:
    """What a value is, or may be, only a view or a copy of."""
    while value.node.inputs and (value.node.op.view or _stem(value.node) in _COPIES):
        value = value.node.inputs[-1 if _stem(value.node) == "copy" else 0]
    return value


def _stem(node: Node) -> str:
    return node.op.name.partition("::")[2].partition(".")[0]


def _checks(node: Node) -> list[Any]:
    """What this node may find wrong when it runs: the same indices are checked once, whoever uses them."""
    stem = _stem(node)
    if "linalg" in stem or "cholesky" in stem or node.op.name.startswith("lazytensor::"):
        return [node]
    if stem in _DIVISIONS and any(v is not None and not v.dtype.is_floating_point for v in node.outputs):
        return [node]
    names = [a.name for a in node.op.overload._schema.arguments]
    found: list[Any] = []
    for name, argument in zip(names, node.args, strict=False):
        if name in _INDICES:
            found += [a for a in flatten((argument,)) if a.__class__ is Value and not a.dtype.is_floating_point]
    return found
