"""Node classes: one for each op that a backend records (`LazyIr.h`, `LazyNonNativeIr.h`).

What comes out for `add.Tensor`::

    class AddTensor(TSNode):
        '''add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor'''

        op = torch_op("aten::add.Tensor")
        opkind = op.name
        names = ("self_", "other", "alpha")
        self_ = Argument[Value](0)
        other = Argument[Value](1)
        alpha = Argument[Value](2)

        @classmethod
        def create(cls, self_: Value, other: Value, alpha: Value = 1) -> AddTensor: ...
        def can_be_reused(self, self_: Value, other: Value, alpha: Value) -> bool: ...
        def lower(self, context: TSLoweringContext) -> list[torch._C.Value]: ...

`GenLazyIR` leaves the lowering to the base class; `GenTSLazyIR` writes it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch
from torchgen.model import Argument, BaseTy, ListType, OptionalType

from .classify import base, in_order, is_list, runtime_schema, safe
from .layout import docstring, indented, literal, tuple_of, wrapped
from .module import module
from .plan import NodePlan, Plan

# Names that a node class has for itself.
_TAKEN = frozenset(
    ("self", "cls", "node", "op", "names", "opkind", "classes", "wrap", "of", "operands", "attributes", "outputs")
) | {"shapes", "tensors", "create", "can_be_reused", "lower", "context"}
_ATTRIBUTES = {
    BaseTy.int: "int",
    BaseTy.DeviceIndex: "int",
    BaseTy.bool: "bool",
    BaseTy.SymBool: "bool",
    BaseTy.str: "str",
    BaseTy.ScalarType: "torch.dtype",
    BaseTy.Device: "torch.device",
    BaseTy.Layout: "torch.layout",
    BaseTy.MemoryFormat: "torch.memory_format",
    BaseTy.QScheme: "torch.qscheme",
    BaseTy.Generator: "torch.Generator",
}


@dataclass(frozen=True)
class Field:
    """One argument of a node class."""

    name: str
    type: str
    default: str | None
    argument: Argument
    keyword: bool
    lifted: bool
    structure: bool


class GenLazyIR:
    """Writes node classes without lowerings: a backend that compiles graphs by itself needs none."""

    base = "lazytensor.codegen.node.LazyNode"

    def __init__(self, node_base: str | None = None) -> None:
        self.node_base = (node_base or self.base).replace(":", ".")

    @property
    def base_name(self) -> str:
        """The base class as the generated module calls it."""
        return self.node_base.rpartition(".")[2]

    @property
    def base_import(self) -> list[str]:
        """The import of a base class that is not lazytensor's own."""
        home, _, name = self.node_base.rpartition(".")
        return [] if home.startswith("lazytensor.codegen.") else [f"from {home} import {name}"]

    def write(self, plan: NodePlan) -> list[str]:
        """The class of one node."""
        fields = node_fields(plan)
        lines = [*docstring(text_of(plan)), "", *self.head(plan)]
        lines += wrapped("names = " + tuple_of(f'"{f.name}"' for f in fields), 1)
        lines += [f"{f.name} = Argument[{f.type}]({i})" for i, f in enumerate(fields)]
        lines += ["", *self.create(plan, fields), "", *self.can_be_reused(plan, fields), *self.lower(plan, fields)]
        return [f"class {plan.class_name}({self.base_name}):", *indented(lines)]

    def head(self, plan: NodePlan) -> list[str]:
        """The op of the class: torch's, or one that the backend defines, with its meaning written by hand."""
        if plan.own:
            namespace = plan.target.partition("::")[0]
            text = str(plan.schema.func)
            lines = wrapped(f'op = define_op("{namespace}::{text}", handwritten.kernels("lower_{plan.kernel}"))', 1)
        else:
            view = ", view=True" if plan.view else ""
            lines = [f'op = torch_op("{plan.target}"{view})']
        kind = f'"{plan.opkind}"' if plan.opkind != plan.target else "op.name"
        return [*lines, f"opkind = {kind}"]

    def create(self, plan: NodePlan, fields: list[Field]) -> list[str]:
        """The create function: numbers are lifted, then the node there is, or a new one, is returned."""
        arguments = ", ".join(f"{f.name}: {f.type}" + (f" = {f.default}" if f.default else "") for f in fields)
        lines = ["@classmethod", *wrapped(f"def create(cls, {arguments}) -> {plan.class_name}:", 1)]
        names = ", ".join(f.name for f in fields)
        body = docstring("The node of these arguments: the one there is, or a new one.", 2)
        if plan.schema.properties.CreateFnDeclOnly:
            call = f'made: {plan.class_name} = handwritten.kernels("create_{plan.kernel}")({names})'
            body += [*wrapped(call, 2), "return made"]
        else:
            canonical = tuple_of(map(_canonical, fields))
            body += [*wrapped(f"made: {plan.class_name} = cls.of({canonical})", 2), "return made"]
        return [*lines, *indented(body)]

    def can_be_reused(self, plan: NodePlan, fields: list[Field]) -> list[str]:
        """Whether a call with these canonical arguments means this very node."""
        arguments = ", ".join(f"{f.name}: {f.type}" for f in fields)
        names = ", ".join(f.name for f in fields)
        body = docstring("Whether these arguments mean this very node.", 2)
        if plan.schema.properties.CanBeReusedDeclOnly:
            body += wrapped(f'return bool(handwritten.kernels("can_be_reused_{plan.kernel}")(self, {names}))', 2)
        else:
            body += wrapped(f"return self.node.args == {tuple_of(f.name for f in fields)}", 2)
        return [*wrapped(f"def can_be_reused(self, {arguments}) -> bool:", 1), *indented(body)]

    def lower(self, plan: NodePlan, fields: list[Field]) -> list[str]:
        """Nothing: the base class, or the backend, lowers the node."""
        return []


class GenTSLazyIR(GenLazyIR):
    """Writes node classes with their lowering to one node of a `torch._C.Graph` (`ts_lowering_body`)."""

    base = "lazytensor.codegen.lowering.TSNode"

    def lower(self, plan: NodePlan, fields: list[Field]) -> list[str]:
        """The lowering: positional arguments in order, keyword ones by name."""
        args = tuple_of([f"self.{f.name}" for f in fields if not f.keyword])
        kwargs = ", ".join(f'"{f.argument.name}": self.{f.name}' for f in fields if f.keyword)
        body = docstring("One call of the op.", 2)
        target = "self.op.name"
        if plan.function is None and plan.schema.properties.Lower:
            target = f'"{plan.opkind}"'  # a lowering can be generated for a kind that torch knows
        body += wrapped(f"return context.builtin({target}, {args}, {{{kwargs}}})", 2)
        return ["", "def lower(self, context: TSLoweringContext) -> list[torch._C.Value]:", *indented(body)]


def text_of(plan: NodePlan) -> str:
    """The schema of a node."""
    return str(plan.schema.func)


def node_fields(plan: NodePlan) -> list[Field]:
    """The arguments of a node as its class has them, in the order in which the trace keeps them."""
    schema = plan.schema
    if plan.function is not None:
        runtime = runtime_schema(schema.func)
    else:
        parsed = torch._C.parse_schema(f"{plan.target.partition('::')[0]}::{schema.func}")
        runtime = {a.name: a for a in parsed.arguments}
    found = []
    for argument in in_order(schema.func):
        name = safe(argument.name)
        name = f"{name}_" if name in _TAKEN else name
        info = runtime[argument.name]
        default = None
        if info.has_default_value():
            default = literal(info.default_value)
        if base(argument.type) in (BaseTy.ScalarType, BaseTy.Layout, BaseTy.Device, BaseTy.MemoryFormat):
            default = "None" if default is not None and isinstance(argument.type, OptionalType) else None
        kind = base(argument.type)
        number = kind in (BaseTy.Scalar, BaseTy.float)
        structure = argument.name in schema.structure or (
            kind is BaseTy.Scalar and schema.properties.TreatScalarsAsConstants
        )
        lifted = number and not structure
        found.append(Field(name, _type(argument.type, lifted), default, argument, info.kwarg_only, lifted, structure))
    # Python wants what has no default first.
    if any(a.default and not b.default for a, b in itertools.pairwise(found)):
        found = [Field(**{**f.__dict__, "default": None}) for f in found]
    return found


def _type(kind: Any, lifted: bool) -> str:
    if isinstance(kind, OptionalType):
        return f"{_type(kind.elem, lifted)} | None"
    if isinstance(kind, ListType):
        return f"tuple[{_type(kind.elem, lifted)}, ...]"
    name = base(kind)
    if name is BaseTy.Tensor or lifted:
        return "Value"
    if name in (BaseTy.Scalar, BaseTy.float):
        return "Const | complex"
    return _ATTRIBUTES.get(name, "Any")  # type: ignore[arg-type]


def _canonical(part: Field) -> str:
    if base(part.argument.type) not in (BaseTy.Scalar, BaseTy.float):
        return part.name
    if is_list(part.argument.type):
        return f"tuple(map(number, {part.name}))" if part.lifted else f"tuple(map(constant, {part.name}))"
    if part.structure:
        return f"constant({part.name})"
    return f"number({part.name}, {part.default})" if part.default not in (None, "None") else f"number({part.name})"


def nodes_module(plan: Plan, generator: GenLazyIR, yaml: str) -> str:
    """`nodes.py`: the classes of native ops."""
    body: list[str] = []
    for node in plan.nodes:
        body += ["", "", *generator.write(node)]
    doc = f"The nodes that {plan.backend_name} records: one class for each op (`LazyIr.h`)."
    return module(doc, body, yaml, [("handwritten", ".")], generator.base_import)


def non_native_module(plan: Plan, generator: GenLazyIR, yaml: str) -> str:
    """`non_native.py`: the classes of the backend's own ops, which ATen does not have."""
    body: list[str] = []
    for node in plan.non_native:
        body += ["", "", *generator.write(node)]
    doc = f"The nodes of {plan.backend_name} that ATen has no op for (`LazyNonNativeIr.h`)."
    return module(doc, body, yaml, [("handwritten", ".")], generator.base_import)
