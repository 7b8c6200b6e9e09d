"""Lowering generated nodes onto a `torch._C.Graph`: what `TSLoweringContext` and `LowerTSBuiltin` are in C++.

A node class generated with lowerings has a method `lower(context)`, which asks the context for a TorchScript node.  A
node whose op has no generated class is lowered by its schema, so that a graph of any ops can be lowered whole::

    run = lower_graph(graph)          # in a backend: def compile(self, graph): return lower_graph(graph)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lazytensor.backend.graph import Graph
from lazytensor.codegen.node import LazyNode
from lazytensor.trace import ir
from lazytensor.trace.ir import Const, Node, Number, Value


class TSNode(LazyNode):
    """A node that is lowered to TorchScript (`TsNode`)."""

    __slots__ = ()

    def lower(self, context: TSLoweringContext) -> list[torch._C.Value]:
        """By default, the op itself on the arguments in order."""
        args, kwargs = split(self.node)
        return context.builtin(self.node.op.name, args, kwargs)


class TSLoweringContext:
    """The TorchScript graph under construction, and what each value was lowered to (`TSLoweringContext`)."""

    def __init__(self) -> None:
        self.graph = torch._C.Graph()
        self.lowered: dict[Any, torch._C.Value] = {}

    def parameter(self, leaf: Value | Number) -> torch._C.Value:
        """A new input of the graph (`GetParameter`)."""
        value = self.graph.addInput(f"p{len(list(self.graph.inputs()))}")
        if isinstance(leaf, Number):
            value.setType(_NUMBERS[leaf.kind]())
        self.lowered[leaf] = value
        return value

    def output(self, argument: Any) -> torch._C.Value:
        """What a canonical argument is in the graph (`GetOutputOp`): a value, a list made of values, or a constant."""
        if isinstance(argument, Value | Number):
            return self.lowered[argument]
        if isinstance(argument, tuple) and any(isinstance(a, Value | Number) for a in argument):
            return self._list(argument)
        return self.constant(argument)

    def constant(self, argument: Any) -> torch._C.Value:
        """A constant of the graph."""
        if isinstance(argument, Const):
            argument = argument.value
        if isinstance(argument, tuple):
            argument = [a.value if isinstance(a, Const) else a for a in argument]
            if not argument:
                return self._list(())
        if isinstance(argument, torch.device):
            argument = torch.device("cpu")
        if isinstance(argument, torch.memory_format | torch.layout):
            argument = _ENUMERATED[argument]
        if argument is None:
            node = self.graph.create("prim::Constant", [], 1)
            self.graph.insertNode(node)
            value = node.output()
            value.setType(torch._C.NoneType.get())
            return value
        return self.graph.insertConstant(argument)  # type: ignore[attr-defined,no-any-return]

    def _list(self, items: Sequence[Any]) -> torch._C.Value:
        optional = any(item is None for item in items)
        node = self.graph.create("prim::ListConstruct", [self.output(item) for item in items], 1)
        self.graph.insertNode(node)
        element: Any = torch._C.TensorType.get()
        if items and isinstance(items[0], Number):
            element = _NUMBERS[items[0].kind]()
        elif not items:
            element = torch._C.IntType.get()
        node.output().setType(torch._C.ListType(torch._C.OptionalType(element) if optional else element))
        return node.output()  # type: ignore[no-any-return]

    def builtin(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch._C.Value]:
        """Call an op on canonical arguments; its results, a list opened (`LowerTSBuiltin`)."""
        symbol, _, _ = name.partition(".")
        overload = ir.Op(name).overload
        ordered = [*args, *kwargs.values()]
        returns = overload._schema.returns
        inputs = [self.output(a) for a in ordered]
        node = self.graph.create(symbol, inputs, len(returns))
        self.graph.insertNode(node)
        found = list(node.outputs())
        for value, returned in zip(found, returns, strict=True):
            value.setType(returned.type)
        return found

    def unpack(self, value: torch._C.Value, count: int) -> list[torch._C.Value]:
        """The parts of a list."""
        node = self.graph.create("prim::ListUnpack", [value], count)
        self.graph.insertNode(node)
        for part in node.outputs():
            part.setType(torch._C.TensorType.get())
        return list(node.outputs())

    def lower(self, node: Node) -> None:
        """Lower one node, all of whose inputs have been lowered, and note its outputs (`AssignOutputOp`)."""
        seen = LazyNode.wrap(node)
        typed = seen if isinstance(seen, TSNode) else TSNode(node)
        results = typed.lower(self)
        returns = node.op.overload._schema.returns
        parts: list[torch._C.Value] = []
        for value, returned in zip(results, returns, strict=True):
            if returned.type.kind() == "ListType":
                parts += self.unpack(value, len(node.outputs) - len(returns) + 1)
            else:
                parts.append(value)
        for output, value in zip(node.outputs, parts, strict=True):
            if output is not None:
                self.lowered[output] = value


def split(node: Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The canonical arguments of a node: those passed by position, and the keyword-only ones."""
    keywords = node.op.keywords
    at = len(node.args) - len(keywords)
    return node.args[:at], dict(zip(keywords, node.args[at:], strict=True))


def lower_graph(graph: Graph) -> Callable[..., list[Any]]:
    """The graph as a TorchScript function: what a backend's `compile` may return."""
    context = TSLoweringContext()
    for leaf in graph.inputs:
        context.parameter(leaf)
    for node in graph.nodes:
        context.lower(node)
    results = []
    for number, value in enumerate(graph.outputs):
        shared = number in graph.shared_outputs
        results.append(
            context.builtin("aten::clone", [value], {"memory_format": None})[0] if shared else context.lowered[value]
        )
    together = context.graph.create("prim::ListConstruct", results, 1)
    context.graph.insertNode(together)
    together.output().setType(torch._C.ListType(torch._C.TensorType.get()))
    context.graph.registerOutput(together.output())
    return torch._C._create_function_from_graph("step", context.graph)  # type: ignore[no-any-return]


_NUMBERS: dict[type, Callable[[], Any]] = {
    bool: torch._C.BoolType.get,
    int: torch._C.IntType.get,
    float: torch._C.FloatType.get,
    complex: torch._C.ComplexType.get,
}
# TorchScript writes these as the numbers of their C++ enumerations.
_ENUMERATED: dict[Any, int] = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
    torch.strided: 0,
}
