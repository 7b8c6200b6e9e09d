"""The graph that a backend is given: the pending step as a list of ATen operations in a valid order.

``graph.nodes``     the operations, inputs before users; each is a :class:`lazytensor.trace.ir.Node`
``graph.inputs``    what the compiled callable is called with: data leaves first, then lifted numbers
``graph.outputs``   the values it returns, in this order, each in memory of its own

Walks are loops over ``nodes``; nothing here recurses, whatever the depth of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.trace import shapes
from lazytensor.trace.ir import Const, Node, Number, Value, flatten, walk


class Graph:
    """One step of work, as handed to a backend."""

    def __init__(self, outputs: list[Value], written: dict[int, int] | None = None) -> None:
        self.outputs = outputs
        self.nodes: list[Node] = walk(outputs)
        data: dict[Value, None] = {}
        numbers: dict[Number, None] = {}
        for node in self.nodes:
            for argument in flatten(node.args):
                if argument.__class__ is Value:
                    if argument.leaf:
                        data[argument] = None
                elif argument.__class__ is Number:
                    numbers[argument] = None
        for value in outputs:
            if value.leaf:
                data[value] = None
        self.data: list[Value] = sorted(data, key=lambda v: v.node.args[1])
        self.numbers: list[Number] = sorted(numbers, key=lambda n: n.index)
        self.replaces: dict[int, int] = written or {}  # output number -> input number whose storage it overwrites

    @property
    def inputs(self) -> list[Value | Number]:
        """What the compiled callable is called with, in this order."""
        return [*self.data, *self.numbers]

    @functools.cached_property
    def uses(self) -> dict[Value, list[Node]]:
        """Which nodes use a value."""
        found: dict[Value, list[Node]] = {}
        for node in self.nodes:
            for value in node.inputs:
                found.setdefault(value, []).append(node)
        return found

    @functools.cached_property
    def last_uses(self) -> dict[Node, list[Value]]:
        """The values that nobody needs after a node has run; outputs are needed to the end."""
        kept = set(self.outputs)
        last = {value: node for node in self.nodes for value in node.inputs}
        found: dict[Node, list[Value]] = {}
        for value, node in last.items():
            if value not in kept:
                found.setdefault(node, []).append(value)
        for node in self.nodes:
            for output in node.outputs:
                if output is not None and output not in last and output not in kept:
                    found.setdefault(node, []).append(output)
        return found

    def call(self, node: Node, convert: Callable[[Any], Any]) -> tuple[list[Any], dict[str, Any]]:
        """A node's arguments as a call: ``convert`` turns values and numbers into what the caller works with."""

        def each(argument: Any) -> Any:
            if argument.__class__ is Value or argument.__class__ is Number:
                return convert(argument)
            if argument.__class__ is torch.device:
                return torch.device("cpu")
            return argument

        return shapes.call_arguments(node.op, node.args, each)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        return f"<Graph of {len(self.nodes)} operations, {len(self.data)}+{len(self.numbers)} inputs, {len(self.outputs)} outputs>"


__all__ = ["Const", "Graph"]
