"""What a graph will cost, from its structure alone: floating-point operations, bytes and peak memory.

FLOPs are what ``torch.utils.flop_counter`` counts (products and sums of matrix multiplications, convolutions and
attention), by its own formulas applied to the declared shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch.utils.flop_counter import flop_registry

from lazytensor.trace.ir import Const, Node, Number, Value
from lazytensor.trace.shapes import root


def flops(node: Node) -> int:
    """The floating-point operations of one node; 0 for an op that PyTorch's counter does not count."""
    formula = _formula(node.op)
    if formula is None:
        return 0
    split = len(node.args) - len(node.op.keywords)
    args = [_shape(a) for a in node.args[:split]]
    keywords = {k: _shape(a) for k, a in zip(node.op.keywords, node.args[split:], strict=True)}
    out: Any = [None if v is None else list(v.size) for v in node.outputs]
    try:
        return int(formula(*args, **keywords, out_val=out[0] if len(out) == 1 else tuple(out)))
    except Exception:  # a formula that cannot take this call does not make the report fail
        return 0


@functools.lru_cache(maxsize=4096)
def _formula(op: Any) -> Any:
    try:
        overload = op.overload
    except AttributeError:  # an op of our own, which PyTorch does not know
        return None
    return flop_registry.get(overload._overloadpacket)


def _shape(argument: Any) -> Any:
    if argument.__class__ is Value:
        return list(argument.size)
    if argument.__class__ is tuple:
        return [_shape(a) for a in argument]
    if argument.__class__ is Const:
        return argument.value
    return 1 if argument.__class__ is Number else argument


def result_bytes(node: Node) -> int:
    """The bytes that a node's results take; a view takes none."""
    return 0 if node.op.view else sum(v.spec.nbytes for v in node.outputs if v is not None)


def memory(graph: Any) -> tuple[list[int], int]:
    """The bytes alive after each node, inputs included, and their peak, if each value dies at its last use."""
    alive = sum({root(v): root(v).spec.nbytes for v in graph.data}.values())
    last: dict[Value, Node] = {}
    for node in graph.nodes:
        for value in (*node.inputs, *(v for v in node.outputs if v is not None)):
            last[root(value)] = node
    for value in graph.outputs:
        last.pop(root(value), None)
    dying: dict[Node, list[Value]] = {}
    for value, node in last.items():
        if not value.leaf:
            dying.setdefault(node, []).append(value)
    curve = []
    peak = alive
    for node in graph.nodes:
        alive += result_bytes(node)
        peak = max(peak, alive)
        alive -= sum(v.spec.nbytes for v in dying.get(node, ()))
        curve.append(alive)
    return curve, peak


def thinned(curve: list[int], points: int = 400) -> list[int]:
    """A curve of at most so many points that keeps its peaks."""
    if len(curve) <= points:
        return curve
    width = len(curve) / points
    return [max(curve[int(i * width) : max(int((i + 1) * width), int(i * width) + 1)]) for i in range(points)]


def total_flops(nodes: Iterable[Node]) -> int:
    """The floating-point operations of many nodes."""
    return sum(map(flops, nodes))
