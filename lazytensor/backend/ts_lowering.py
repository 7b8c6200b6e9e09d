"""Lowering to TorchScript: a ``torch._C.Graph`` built node by node.

Every node becomes the JIT operator of the same schema, its arguments typed as the schema says: tensors, lifted numbers
as scalar inputs, lists by ``prim::ListConstruct``, constants by ``prim::Constant``.  A Python number where the schema
has a tensor selects the operator's ``Scalar`` overload, which promotes types as the number did.  The attribute
``source`` of each node names the user's line.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lazytensor.backend import cpu_only
from lazytensor.backend.graph import single
from lazytensor.backend.hardware import place
from lazytensor.backend.lowering import LoweringContext
from lazytensor.trace.ir import Const, Node, Number, Op, Spec, Value, flatten

_TENSOR = torch._C.TensorType.get()
_TYPES: dict[type, Any] = {
    bool: torch._C.BoolType.get(),
    int: torch._C.IntType.get(),
    float: torch._C.FloatType.get(),
    complex: torch._C.ComplexType.get(),  # type: ignore[attr-defined]
}
_MEMORY_FORMATS = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}


@functools.cache
def signature(op: Op) -> tuple[str, list[Any], list[Any]]:
    """The name of an op and the types of its arguments and results (asking PyTorch each time is slow)."""
    schema = op.overload._schema
    return schema.name, [a.type for a in schema.arguments], [r.type for r in schema.returns]


class TSLoweringContext(LoweringContext):
    """Builds one ``torch._C.Graph`` (``TSLoweringContext``)."""

    graph: Any
    mends: dict[Value, Spec]  # values that the CPU's kernels lay out otherwise than declared

    def begin(self) -> None:
        """Start with an empty graph."""
        self.graph = torch._C.Graph()
        self.mends = {}
        self._constants: dict[Any, Any] = {}
        self._device = place(self.device)

    def make_parameter(self, leaf: Value | Number, number: int) -> Any:
        """A typed graph input: p0, p1, …"""
        made = self.graph.addInput(f"p{number}")
        made.setType(_TYPES[leaf.kind] if isinstance(leaf, Number) else _TENSOR)
        return made

    def output(self, value: Any) -> Any:
        """What a value was lowered to; anything not made here becomes a parameter."""
        if value not in self._lowered:
            self.add_parameter(value)
        return self._lowered[value]

    def lower(self, node: Node) -> None:
        """Add the JIT operator for one node."""
        made = self.operator(node)
        made.s_("source", str(node.line))
        self.graph.appendNode(made)
        outputs = list(made.outputs())
        if not single(node):
            outputs = [o for output in outputs for o in self._unpacked(output, node)]
        for value, lowered in zip(node.outputs, outputs, strict=True):
            if value is not None:
                self.emit(value, lowered)
                if value in self.mends:
                    self.emit(value, self.copied(value))

    def operator(self, node: Node) -> Any:
        """The JIT node, not yet in the graph."""
        name, taken, returned = signature(node.op)
        arguments = [self._argument(a, declared) for a, declared in zip(node.args, taken, strict=True)]
        made = self.graph.create(name, arguments, len(returned))
        for output, declared in zip(made.outputs(), returned, strict=True):
            output.setType(declared)
        return made

    def _unpacked(self, output: Any, node: Node) -> list[Any]:
        if output.type().kind() != "ListType":
            return [output]
        lists = [r for r in node.op.overload._schema.returns if r.type.kind() == "ListType"]
        others = len(node.op.overload._schema.returns) - len(lists)
        unpack = self.graph.create("prim::ListUnpack", [output], (len(node.outputs) - others) // len(lists))
        for part in unpack.outputs():
            part.setType(_TENSOR)
        self.graph.appendNode(unpack)
        return list(unpack.outputs())

    def copied(self, value: Value) -> Any:
        """A value in memory of its own, laid out as declared."""
        spec = value.spec
        integer = torch._C.IntType.get()
        lists = [self._constant(list(part)) if part else self._list([], integer) for part in (spec.size, spec.stride)]
        arguments = lists + [self._constant(a) for a in (spec.dtype, None, self._device, None)]
        empty = self.graph.create("aten::empty_strided", arguments, 1)
        self.graph.appendNode(empty)
        filled = self.graph.create("aten::copy_", [empty.output(), self.output(value), self._constant(False)], 1)
        self.graph.appendNode(filled)
        return filled.output()

    def _argument(self, argument: Any, declared: Any) -> Any:
        if declared.kind() == "OptionalType":
            declared = declared.getElementType()
        if argument.__class__ is Value:
            return self.output(argument)
        if argument.__class__ is Number:
            return self._number(argument, declared)
        if argument.__class__ is tuple:
            element = declared.getElementType() if declared.kind() == "ListType" else declared
            if argument and all(_plain(a) for a in argument) and element.kind() != "NumberType":
                return self._constant([_typed(a, element) for a in argument])
            return self._list([self._argument(a, element) for a in argument], element)
        return self._constant(_typed(argument, declared))

    def _number(self, number: Number, declared: Any) -> Any:
        """A lifted number; an int where the schema has a float is converted at run time."""
        lowered = self.output(number)
        if declared.kind() != "FloatType" or number.kind is float:
            return lowered
        made = self.graph.create("aten::Float", [lowered], 1)
        made.output().setType(torch._C.FloatType.get())
        self.graph.appendNode(made)
        return made.output()

    def _list(self, elements: list[Any], element: Any) -> Any:
        made = self.graph.create("prim::ListConstruct", elements, 1)
        made.output().setType(torch._C.ListType(element))
        self.graph.appendNode(made)
        return made.output()

    def _constant(self, value: Any) -> Any:
        """A constant, each once."""
        if isinstance(value, torch.device):
            value = self._device
        if isinstance(value, torch.memory_format):
            value = _MEMORY_FORMATS[value]
        key = (type(value), repr(value))
        found = self._constants.get(key)
        if found is None:
            found = self._constants[key] = self.graph.insertConstant(value)
        return found

    def finish(self, copies: set[int]) -> Any:
        """Register the results, those numbered in ``copies`` in memory of their own; the function, which returns a
        tuple or a tensor.
        """
        for number, value in enumerate(self.results):
            self.graph.registerOutput(self.copied(value) if number in copies else self.output(value))
        if len(self.results) != 1:
            self.graph.makeMultiOutputIntoTuple()
        return torch._C._create_function_from_graph(self.name, self.graph)  # type: ignore[attr-defined]


def _plain(argument: Any) -> bool:
    return isinstance(argument, int | float | bool | Const) and not isinstance(argument, complex)


def _typed(argument: Any, declared: Any) -> Any:
    """A constant of the type that the schema has: JIT operators tell 1 from 1.0."""
    if argument.__class__ is Const:
        argument = argument.value
    if declared.kind() == "FloatType" and isinstance(argument, int):
        return float(argument)
    return argument


def lowerable(node: Node, backend: Any) -> bool:
    """Whether TorchScript has the operator for this node with these arguments."""
    overload = node.op.overload
    if backend.own_memory and cpu_only.instead(node.op) is not None:
        return False
    numbers = tuple(a.kind if a.__class__ is Number else a.__class__ for a in flatten(node.args))
    key = (node.op.name, numbers)
    found = _lowerable.get(key)
    if found is None:
        context = TSLoweringContext(backend, "probe", backend.devices()[0])
        try:
            matched = context.operator(node).schema()
            found = matched.partition("(")[0] == _full_name(overload) or _takes_number(node, matched)
        except Exception:
            found = False
        _lowerable[key] = found
    return found


_lowerable: dict[Any, bool] = {}


def _full_name(overload: Any) -> str:
    schema = overload._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else str(schema.name)


def _takes_number(node: Node, matched: str) -> bool:
    """Whether the operator found is the overload for a Python number in the place of a tensor."""
    schema = node.op.overload._schema
    number = any(
        a.__class__ in (Number, Const) and d.type.kind() == "TensorType"
        for a, d in zip(node.args, schema.arguments, strict=True)
    )
    return number and matched.startswith(schema.name + ".") and "Scalar" in matched.partition("(")[0]
