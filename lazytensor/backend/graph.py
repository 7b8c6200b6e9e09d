"""The graph that a backend is given: the pending step as a list of ATen operations in a valid order.

``graph.nodes``      the operations, inputs before users; each is a :class:`lazytensor.trace.ir.Node` with ``op``,
                     ``args``, ``outputs`` and ``line``, the line of the user's program that recorded it
``graph.inputs``     what the compiled callable is called with: tensors (``graph.data``), then lifted numbers
(``graph.numbers``)
``graph.outputs``    the values it returns, in this order, each in memory of its own
``graph.donatable``  the numbers of the inputs whose memory the callable may overwrite or return

Every value has a ``spec``: size, stride, dtype.  A lifted number is a Python number whose value changes from run to run
without a new compilation; its type does not.  ``graph.python()`` prints the graph as a program that runs, and
``graph.to_fx()`` gives a ``torch.fx.GraphModule``.  Walks are loops over ``nodes``; nothing here recurses, whatever the
depth of the graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace import shapes
from lazytensor.trace.ir import Const, Node, Number, Op, Value, flatten, walk

if TYPE_CHECKING:
    import torch.fx

_CPU = torch.device("cpu")


class Graph:
    """One step of work, as handed to a backend."""

    def __init__(
        self, outputs: list[Value], written: dict[int, int] | None = None, nodes: Iterable[Node] | None = None
    ) -> None:
        """The graph of these outputs.

        ``written`` says which output replaces which input in the same storage, whose memory is free once it is read.
        ``nodes`` are the operations, in a valid order, of a graph that is part of a greater one: what they use and do
        not make are its inputs.
        """
        self.outputs = outputs
        self.nodes: list[Node] = walk(outputs) if nodes is None else list(nodes)
        made: set[Value | None] = set()
        data: dict[Value, None] = {}
        numbers: dict[Number, None] = {}
        for node in self.nodes:
            for argument in flatten(node.args):
                if argument.__class__ is Value:
                    if argument.leaf or argument not in made:
                        data[argument] = None
                elif argument.__class__ is Number:
                    numbers[argument] = None
            made.update(node.outputs)
        for value in outputs:
            if value not in made:
                data[value] = None
        self.data: list[Value] = sorted(data, key=_input_order)
        self.numbers: list[Number] = sorted(numbers, key=lambda n: n.index)
        self.first_cut = 0  # as which cut of the process it was first cut
        self.replaces: dict[int, int] = written or {}  # output number -> input number whose storage it overwrites

    @property
    def inputs(self) -> list[Value | Number]:
        """What the compiled callable is called with, in this order."""
        return [*self.data, *self.numbers]

    @property
    def nbytes(self) -> int:
        """The bytes of everything that is computed, views and what dies on the way included."""
        return sum(value.spec.nbytes for node in self.nodes for value in node.outputs if value is not None)

    @property
    def donatable(self) -> frozenset[int]:
        """The inputs whose memory the callable may overwrite or return: their storage gets another value in this very
        step.
        """
        return frozenset(self.replaces.values())

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

    @functools.cached_property
    def shared_outputs(self) -> set[int]:
        """The outputs that are an input, a view, or another output's memory: a copy gives them memory of their own."""
        copies: set[int] = set()
        inputs: set[Value] = set(self.data)
        seen: set[Value] = set()
        for number, value in enumerate(self.outputs):
            source = shapes.root(value)
            if source in inputs or source.leaf or source in seen or source is not value:
                copies.add(number)
            seen.add(source)
        return copies

    def call(
        self, node: Node, convert: Callable[[Any], Any], device: torch.device = _CPU
    ) -> tuple[list[Any], dict[str, Any]]:
        """A node's arguments as a call: ``convert`` turns values and numbers into what the caller works with; where an
        op names a device, it is this one.
        """

        def each(argument: Any) -> Any:
            if argument.__class__ is Value or argument.__class__ is Number:
                return convert(argument)
            return device if argument.__class__ is torch.device else argument

        return shapes.call_arguments(node.op, node.args, each)

    def first_line(self) -> Any:
        """The user's line that recorded the first operation which has one."""
        return next((node.line for node in self.nodes if node.line is not None), None)

    def python(self) -> str:
        """The graph as a Python program that runs by itself, on inputs it makes up."""
        from lazytensor.backend.text import program

        return program(self)

    def to_fx(self) -> torch.fx.GraphModule:
        """The graph as a ``torch.fx.GraphModule``: one placeholder an input (numbers too), a list of results, source
        lines in ``meta``.
        """
        from lazytensor.backend.fx import module

        return module(self)

    def __len__(self) -> int:
        return len(self.nodes)

    def __repr__(self) -> str:
        inputs = f"{len(self.data)}+{len(self.numbers)} inputs"
        return f"<Graph of {len(self.nodes)} operations, {inputs}, {len(self.outputs)} outputs>"


def _input_order(value: Value) -> tuple[int, int, int]:
    """Leaves by their number, then values of other graphs by when they were made."""
    return (0, value.node.args[1], 0) if value.leaf else (1, value.node.seq, value.index)


def single(node: Node) -> bool:
    """Whether the op returns one tensor, and not a tuple or list of them."""
    return _returns_one(node.op)


@functools.cache
def _returns_one(op: Op) -> bool:
    returns = op.overload._schema.returns
    return len(returns) == 1 and returns[0].type.kind() == "TensorType"


def output_paths(node: Node) -> list[tuple[int, ...]]:
    """Where each output stands in what the op returns: ``()`` for a lone tensor, ``(1, 0)`` for the first of the second
    list.
    """
    if single(node):
        return [()]
    returns = node.op.overload._schema.returns
    lists = [r.type.kind() == "ListType" for r in returns]
    if not any(lists):
        return [(i,) for i in range(len(returns))]
    if len(returns) == 1:
        return [(i,) for i in range(len(node.outputs))]
    # Ops that return several lists return one entry of each for every entry of the list they were given.
    length = (len(node.outputs) - lists.count(False)) // lists.count(True)
    paths: list[tuple[int, ...]] = []
    for position, is_list in enumerate(lists):
        paths += [(position, i) for i in range(length)] if is_list else [(position,)]
    return paths


__all__ = ["Const", "Graph", "output_paths", "single"]
