"""The base of generated node classes: a recorded operation with its arguments by name.

A node of the trace is an op and a tuple of canonical arguments.  The class generated for an op knows what each of them
is: `AddTensor(node).other` is its second operand, `AddTensor.create(a, b)` the node for these values, and `str(...)`
its text.  It holds nothing but the trace's node, so wrapping one costs nothing and two wrappers of one node are equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Generic, TypeVar, overload

import torch

from lazytensor.trace import ir
from lazytensor.trace.ir import Const, Node, Op, Spec, flatten, show
from lazytensor.trace.record import intern, wrap
from lazytensor.trace.record import op as torch_op

__all__ = ["Argument", "LazyNode", "Value", "torch_op"]

T = TypeVar("T")
Value = ir.Value | ir.Number | complex  # what the graph computes, and numbers lifted to run time


class Argument(Generic[T]):
    """One argument of a node, by its place among the canonical arguments."""

    def __init__(self, index: int) -> None:
        self.index = index

    @overload
    def __get__(self, node: None, owner: type[LazyNode]) -> Argument[T]: ...
    @overload
    def __get__(self, node: LazyNode, owner: type[LazyNode]) -> T: ...
    def __get__(self, node: LazyNode | None, owner: type[LazyNode]) -> Argument[T] | T:
        return self if node is None else node.node.args[self.index]


class LazyNode:
    """A recorded operation, seen through the class generated for its op (`torch::lazy::Node`)."""

    opkind: ClassVar[str] = ""  # the op, as the backend calls it (`ClassOpKind`)
    op: ClassVar[Op]
    names: ClassVar[tuple[str, ...]] = ()  # of the arguments, in order
    classes: ClassVar[dict[str, type[LazyNode]]] = {}

    __slots__ = ("node",)

    def __init__(self, node: Node) -> None:
        self.node = node

    def __init_subclass__(cls) -> None:
        if "op" in cls.__dict__:
            LazyNode.classes[cls.op.name] = cls

    @staticmethod
    def wrap(node: Node) -> LazyNode:
        """The node seen through the class generated for its op, or through this one if there is none."""
        return LazyNode.classes.get(node.op.name, LazyNode)(node)

    @classmethod
    def of(cls, args: tuple[Any, ...]) -> Any:
        """The node of this op with these canonical arguments: the one there is, or a new one (`ReuseNode`)."""
        return cls.behind(intern(cls.op, args))

    @classmethod
    def behind(cls, entry: Any) -> Any:
        """The node that made these outputs: a value, or a tuple or list of values."""
        value: ir.Value = next(part for part in flatten((_tuples(entry),)) if part is not None)
        return cls(value.node)

    @property
    def operands(self) -> tuple[Any, ...]:
        """What the graph computes among the arguments, lists opened: values and lifted numbers."""
        return tuple(a for a in flatten(self.node.args) if isinstance(a, ir.Value | ir.Number))

    @property
    def attributes(self) -> dict[str, Any]:
        """The arguments that are part of the structure, by name."""
        parts = zip(self.names, self.node.args, strict=False)
        return {name: _plain(a) for name, a in parts if not any(map(_computed, flatten((a,))))}

    @property
    def outputs(self) -> tuple[ir.Value | None, ...]:
        """The values that it computes."""
        return self.node.outputs

    @property
    def shapes(self) -> tuple[Spec | None, ...]:
        """What each output looks like."""
        return tuple(None if value is None else value.spec for value in self.node.outputs)

    def tensors(self) -> Any:
        """New ltc tensors for the outputs, as the op returns them."""
        return wrap(intern(self.op, self.node.args))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LazyNode) and other.node is self.node

    def __hash__(self) -> int:
        return hash(self.node)

    def __str__(self) -> str:
        """The text form: shapes, op, operands and attributes, absent optional ones as null (`ToString`)."""
        shapes = ", ".join("null" if s is None else repr(s) for s in self.shapes)
        return f"[{shapes}] {self.opkind or self.node.op.name}" + "".join(f", {part}" for part in self._parts())

    __repr__ = __str__

    def _parts(self) -> Iterator[str]:
        names = self.names or tuple(f"arg{i}" for i in range(len(self.node.args)))
        for name, argument in zip(names, self.node.args, strict=False):
            if isinstance(argument, torch.Generator):
                yield f"{name}=torch.Generator()"
            else:
                yield f"{name}={'null' if argument is None else show(argument)}"


def _computed(argument: Any) -> bool:
    return isinstance(argument, ir.Value | ir.Number)


def _plain(argument: Any) -> Any:
    return argument.value if isinstance(argument, Const) else argument


def _tuples(entry: Any) -> Any:
    return tuple(map(_tuples, entry)) if isinstance(entry, list | tuple) else entry
