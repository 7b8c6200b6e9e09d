"""A chain of views that comes back to where it began is no view: ``x.t().t()``, ``x.view(6).view(2, 3)``, ``x[:]``."""

from __future__ import annotations

from lazytensor.trace.ir import Node, Value


def rule(node: Node) -> Value | None:
    """Any view op whose result looks at the same part of the same storage as a value further up its chain."""
    result = node.outputs[0]
    assert result is not None
    if not node.op.view:
        return None
    source: Value = node.args[0]
    while True:
        if source.spec is result.spec:
            return source
        if not source.node.op.view:
            return None
        source = source.node.args[0]
