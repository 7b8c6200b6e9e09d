"""Making nodes and lowering them: ``IrBuilder`` and ``LoweringContext``.

A backend needs neither: ``compile(graph)`` is enough.  It overrides :meth:`Backend.ir_builder` to record an op in its
own way or to add node kinds, and :meth:`Backend.lowering_context` to share this file's bookkeeping when it lowers node
by node.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.backend.data import BackendDevice, Computation
from lazytensor.backend.graph import Graph
from lazytensor.trace import record, storage
from lazytensor.trace.ir import Const, Node, Number, Op, Spec, Value, const

if TYPE_CHECKING:
    from lazytensor.backend.interface import Backend


class Emit(enum.Enum):
    """How far the lowering of a node is (``Util::EmitStatus``)."""

    EMITTING = 1
    EMITTED = 2


EmissionMap = dict[Node, Emit]

_libraries: list[Any] = []  # PyTorch drops a library's registrations with the object
_defined: dict[str, str] = {}


def define_op(schema: str, meaning: Callable[..., Any]) -> Op:
    """A node kind of one's own: an op with this schema, which means what the Python function does to plain tensors.

    ``schema`` is written as in PyTorch, with a namespace: ``"mine::scale_add(Tensor x, Tensor y, float by) ->
    Tensor"``.  The function is also the op's shape rule, its decomposition, and what the reference interpreter runs.
    """
    namespace, _, rest = schema.partition("::")
    name = f"{namespace}::{rest.partition('(')[0]}"
    if _defined.setdefault(name, schema) != schema:
        raise ValueError(f"the op {name} is already defined as {_defined[name]}")
    if not any(library.ns == namespace and rest in library.schemas for library in _libraries):
        library = torch.library.Library(namespace, "FRAGMENT")
        library.define(rest)
        library.impl(rest.partition("(")[0], meaning, "CompositeExplicitAutograd")
        library.schemas = {rest}  # type: ignore[attr-defined]
        _libraries.append(library)
    return record.op(name)


class IrBuilder:
    """Makes nodes (``torch::lazy::IrBuilder``).  The values it returns are interned: the same call gives the same
    value.

    ``recordings()`` may name ops that the backend records in its own way, for example as one node of its own kind::

        class Builder(lt.IrBuilder):
            def recordings(self):
                return {"aten::gelu": lambda value, approximate: self.node(MY_GELU, value)}

    The function gets the canonical arguments of the ATen op (values, lifted numbers, constants) and returns the value,
    or the tuple of values, that stands for its result: of the same sizes and dtypes.
    """

    def recordings(self) -> dict[str, Callable[..., Any]]:
        """How to record an op in another way than as itself, by the ATen overload's name.

        Asked for when the backend comes into force.
        """
        return {}

    def node(self, op: Op | str, *args: Any) -> Any:
        """The outputs of an op on canonical arguments, keyword-only ones last (``MakeGeneric``)."""
        return record.intern(record.op(op) if isinstance(op, str) else op, tuple(map(_canonical, args)))

    def device_data(self, tensor: torch.Tensor) -> Value:
        """The value of an ltc tensor, or of a CPU tensor that becomes device data (``MakeDeviceData``)."""
        if tensor.device.type != "ltc":
            tensor = storage.make_data(tensor.detach().clone(memory_format=torch.preserve_format), 0)
        return storage.value_of(tensor)  # type: ignore[no-any-return]

    def scalar(self, number: complex, dtype: torch.dtype) -> Value:
        """A tensor without dimensions whose value is a run-time input (``MakeScalar``)."""
        return self.node("aten::scalar_tensor", storage.lift(number), dtype, None, torch.device("ltc", 0), None)  # type: ignore[no-any-return]

    def expand(self, value: Value, size: Sequence[int]) -> Value:
        """A value expanded to a size (``MakeExpand``)."""
        return record.intern(record.op("aten::expand", view=True), (value, tuple(size), False))  # type: ignore[no-any-return]

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """A value of another dtype (``MakeCast``)."""
        device = torch.device("ltc", max(value.spec.device, 0))
        return self.node("aten::_to_copy", value, dtype, None, device, None, False, None)  # type: ignore[no-any-return]

    def tensor_list(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """A list of tensors as an argument (``MakeTensorList``)."""
        return tuple(values)

    def size(self, value: Value, dim: int) -> Const:
        """The length of a dimension (``MakeSizeNode``): sizes are structure, so it is a constant."""
        return const(value.size[dim])

    def size_add(self, a: Const, b: Const) -> Const:
        """The sum of two lengths (``MakeSizeAdd``)."""
        return const(a.value + b.value)

    def size_mul(self, a: Const, b: Const) -> Const:
        """The product of two lengths (``MakeSizeMul``)."""
        return const(a.value * b.value)

    def size_div(self, a: Const, b: Const) -> Const:
        """The whole quotient of two lengths (``MakeSizeDiv``)."""
        return const(int(a.value.real) // int(b.value.real))


def _canonical(argument: Any) -> Any:
    return tuple(map(_canonical, argument)) if isinstance(argument, list) else argument


class LoweringContext:
    """The bookkeeping of lowering a graph node by node (``torch::lazy::LoweringContext``).

    A backend overrides :meth:`lower`, which calls :meth:`parameter`, :meth:`output` and :meth:`emit`, and
    :meth:`build`.  This class by itself lowers nothing: its ``build`` gives the computation of the results added, for
    the backend to compile.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        device: BackendDevice,
        post_order: Sequence[Node] = (),
        emitted: EmissionMap | None = None,
    ) -> None:
        self.backend = backend
        self.name = name
        self.device = device
        self.emitted: EmissionMap = {} if emitted is None else emitted
        self.parameters: list[Value | Number] = []
        self.results: list[Value] = []
        self.aliases: dict[int, int] = {}  # result number -> parameter number
        self._lowered: dict[Any, Any] = {}
        self.begin()
        self.lower_all(post_order)

    def begin(self) -> None:
        """Set up what :meth:`lower` needs, before the first node.  Override instead of ``__init__``."""

    def lower_all(self, post_order: Sequence[Node]) -> None:
        """Lower nodes whose inputs come before them."""
        for node in post_order:
            if self.emitted.get(node) is Emit.EMITTING:
                raise RuntimeError(f"graph loop found at {node!r}")
            if node not in self.emitted:
                self.emitted[node] = Emit.EMITTING
                self.lower(node)
                self.emitted[node] = Emit.EMITTED

    def lower(self, node: Node) -> None:
        """Lower one node, all of whose inputs have been lowered."""

    def emit(self, value: Any, lowered: Any) -> None:
        """Note what a value was lowered to (``AssignOutputOp``)."""
        self._lowered[value] = lowered

    def output(self, value: Any) -> Any:
        """What a value was lowered to; a leaf becomes a parameter when first asked for (``GetOutputOp``)."""
        if value not in self._lowered:
            if not value.leaf:
                raise KeyError(f"{value!r} has not been lowered")
            self.add_parameter(value)
        return self._lowered[value]

    def add_parameter(self, leaf: Value | Number) -> int:
        """Make a leaf, or a value made elsewhere, the next parameter; its number (``AddParameter``,
        ``GetParametersData``).
        """
        self.parameters.append(leaf)
        self.emit(leaf, self.make_parameter(leaf, len(self.parameters) - 1))
        return len(self.parameters) - 1

    def make_parameter(self, leaf: Value | Number, number: int) -> Any:
        """What a parameter is lowered to."""
        return leaf

    def add_result(self, value: Value) -> int:
        """Make a value the next result; its number (``AddResult``)."""
        self.results.append(value)
        return len(self.results) - 1

    def set_alias(self, result: int, parameter: int) -> None:
        """Let a result take over the memory of a parameter (``SetUpAlias``)."""
        if result >= len(self.results) or parameter >= len(self.parameters):
            raise IndexError(f"there is no result {result} or no parameter {parameter} to alias")
        self.aliases[result] = parameter

    def check_result_shape(self, spec: Spec, result: int) -> bool:
        """Whether a result has this size and dtype (``CheckResultShape``)."""
        declared = self.results[result].spec
        return (declared.size, declared.dtype) == (spec.size, spec.dtype)

    @property
    def emitted_count(self) -> int:
        """How many nodes were lowered (``GetEmittedNodeCount``)."""
        return sum(status is Emit.EMITTED for status in self.emitted.values())

    def build(self) -> Computation:
        """The computation that gives the results added (``Build``), for :meth:`Backend.compile_all`."""
        graph = Graph(list(self.results))
        order = {leaf: number for number, leaf in enumerate(graph.inputs)}
        graph.replaces = {r: order[self.parameters[p]] for r, p in self.aliases.items()}
        return Computation(self.backend, graph, self.device, self.name)
