"""A copy of a value is the value: values never change, so only outputs need memory of their own.

``copy(old, new)``, which is what a write over a whole tensor records, is ``new``; where the layout has to change, it at
least no longer waits for what is overwritten.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from lazytensor.trace.ir import Node, Value
from lazytensor.trace.record import op


class Instead(NamedTuple):
    """What to use in place of a node's result, and the nodes that make it."""

    made: list[Node]
    value: Value


def stands_for(value: Value, result: Value) -> bool:
    """Whether ``value`` can be used in place of ``result``: the same geometry, in a storage that begins with it."""
    return value.spec is result.spec and not value.node.op.view


def rule(node: Node) -> Value | Instead | None:
    """``clone`` and ``copy``."""
    result = node.outputs[0]
    assert result is not None
    if node.op.name == "aten::clone":
        source = node.args[0]
        return source if stands_for(source, result) else None
    if node.op.name != "aten::copy":
        return None
    target, source = node.args[0], node.args[1]
    if source.__class__ is not Value:
        return None
    if stands_for(source, result):
        return source  # type: ignore[no-any-return]
    if target.node.op.name == "aten::empty_strided" or target.spec is not result.spec:
        return None
    geometry = result.spec
    layout = Node(
        op("aten::empty_strided"),
        (geometry.size, geometry.stride, geometry.dtype, None, torch.device("ltc", max(geometry.device, 0)), None),
        node.line,
    )
    layout.outputs = (Value(layout, 0, geometry),)
    copy = Node(node.op, (layout.outputs[0], *node.args[1:]), node.line)
    value = Value(copy, 0, geometry)
    copy.outputs = (value,)
    return Instead([layout, copy], value)
