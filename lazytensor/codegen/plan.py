"""What is generated for each operator of a YAML: its node, its kernel, where its shape comes from, and its counter.

Every generator works from this plan, and `lazytensor codegen --show` and the table of ops print it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torchgen.model import BaseTy, DispatchKey, NativeFunction, OperatorName

from .backend_yaml import OpOptions, ParsedExternalYaml
from .classify import Kind, classify, identifier, in_order
from .generate import deterministic_in, functional_counterparts
from .natives import QualifiedName, load_native_functions, qualified
from .schema import LazyIrSchema, base_type


@dataclass(frozen=True, eq=False)
class NodePlan:
    """One node class. `own` is an operator of the backend's own namespace, whose meaning is written by hand."""

    schema: LazyIrSchema
    class_name: str
    kernel: str  # how hand-written functions of this operator are called: lower_<kernel>, compute_shape_<kernel>
    target: str  # the op that the trace records: aten::add.Tensor
    function: NativeFunction | None = None  # None for a non-native node
    own: bool = False
    view: bool = False

    @functools.cached_property
    def opkind(self) -> str:
        """The op's kind: what the YAML calls it, or the op itself."""
        return self.schema.opkind if self.function is None else qualified(str(self.schema.name))


@dataclass(frozen=True, eq=False)
class OpPlan:
    """One operator that gets a kernel or a node class."""

    name: str  # as the YAML has it: add.Tensor
    section: str
    kernel: str | None
    kind: Kind
    shape: str  # the rule: structured, meta, composite, a function's name, or why there is none
    shape_function: str | None
    node: NodePlan | None
    counter: str | None
    function: NativeFunction | None


@dataclass(frozen=True, eq=False)
class Plan:
    """Everything that one YAML asks for."""

    parsed: ParsedExternalYaml
    backend_name: str
    ops: tuple[OpPlan, ...]
    nodes: tuple[NodePlan, ...]  # native, each once, also if several operators record it
    non_native: tuple[NodePlan, ...]
    functional_of: Mapping[str, str]

    @property
    def namespace(self) -> str:
        """The namespace of the backend's own operators, as torch can spell it."""
        return own_namespace(self.parsed)

    def node_of(self, name: str) -> NodePlan | None:
        """The node that an operator records."""
        wanted = self.functional_of.get(name, name)
        return self._by_name.get(qualified(wanted))

    @functools.cached_property
    def kernels(self) -> dict[str, str]:
        """What the kernel of each operator is called."""
        return {op.name: op.kernel for op in self.ops if op.kernel is not None}

    def counter(self, name: str) -> str:
        """What the kernel of an operator counts its calls under."""
        return f"{self.backend_name}.{self.kernels.get(name) or identifier(name)}"

    @functools.cached_property
    def _by_name(self) -> dict[str, NodePlan]:
        native = {qualified(n.schema.name): n for n in self.nodes}
        return native | {n.target: n for n in self.non_native}


def own_namespace(parsed: ParsedExternalYaml) -> str:
    """`torch::lazy` as a namespace of torch.library."""
    return re.sub(r"\W+", "_", parsed.namespace).strip("_")


def make_plan(parsed: ParsedExternalYaml, backend_name: str | None = None) -> Plan:
    """Work out what is generated for each operator."""
    natives, functional_of = load_native_functions(), functional_counterparts()
    quiet = deterministic_in(parsed)
    called = backend_name or own_namespace(parsed)
    taken: dict[str, str] = {}
    nodes: dict[str, NodePlan] = {}
    ops: list[OpPlan] = []
    sections = {op: s for s in ("full_codegen", "ir_gen", "supported", "autograd") for op in getattr(parsed, s)}
    kernels = {op: m.kernel for key in _keys(parsed) for op, m in parsed.backend_indices[key].index.items()}
    for op, section in sections.items():
        function = natives.function(op)
        kind = classify(function, functional_of, quiet)
        node = None
        if op in parsed.schemas and kind.name != "fallback":
            wanted = functional_of.get(str(op), str(op))
            if wanted not in nodes:
                nodes[wanted] = _node(parsed, op, wanted, taken)
            node = nodes[wanted]
        options = parsed.options.get(op, OpOptions())
        generated = section == "full_codegen"
        rule, needed = _shape(function, options, kind) if generated else ("", None)
        ops.append(
            OpPlan(
                str(op),
                section,
                identifier(kernels[op]) if op in kernels else None,
                kind,
                rule,
                needed,
                node,
                f"{called}.{identifier(kernels[op])}" if generated else None,
                function,
            )
        )
    own = tuple(_non_native(parsed, schema, taken) for schema in parsed.non_native)
    return Plan(parsed, called, tuple(ops), tuple(nodes.values()), own, functional_of)


def _keys(parsed: ParsedExternalYaml) -> Iterable[DispatchKey]:
    return [key for key in (parsed.backend_key, parsed.autograd_key) if key is not None]


def _node(parsed: ParsedExternalYaml, op: OperatorName, wanted: str, taken: dict[str, str]) -> NodePlan:
    function = load_native_functions().find(wanted)
    assert function is not None
    schema = parsed.schemas[op]
    if str(op) != wanted:
        written = parsed.schemas.get(function.func.name)
        names = {a.name for a in function.func.arguments.flat_all}
        schema = written or LazyIrSchema(
            function.func, schema.properties, schema.symint, structure=frozenset(schema.structure & names)
        )
    if schema.properties.TreatScalarsAsConstants:
        numbers = {a.name for a in in_order(function.func) if base_type(a.type) is BaseTy.Scalar}
        schema = replace(schema, structure=frozenset(schema.structure | numbers))
    own = schema.properties.LowerDeclOnly
    target = f"{own_namespace(parsed)}::{wanted}" if own else qualified(wanted)
    view = not own and classify(function, functional_counterparts()).name == "view"
    kernel = identifier(function.func.name.unambiguous_name())
    return NodePlan(schema, _class_name(schema, taken), kernel, target, function, own, view)


def _non_native(parsed: ParsedExternalYaml, schema: LazyIrSchema, taken: dict[str, str]) -> NodePlan:
    target = f"{own_namespace(parsed)}::{schema.name}"
    return NodePlan(schema, _class_name(schema, taken), identifier(schema.name.unambiguous_name()), target, own=True)


def _class_name(schema: LazyIrSchema, taken: dict[str, str]) -> str:
    """The node's name; `_softmax` and `softmax` would have the same one."""
    name = schema.node_name
    if isinstance(schema.name, QualifiedName):
        name = "".join(map(str.capitalize, schema.name.namespace.split("_"))) + name
    while taken.setdefault(name, schema.opkind) != schema.opkind:
        name = f"_{name}" if schema.aten_name.startswith("_") and not name.startswith("_") else f"{name}_"
    return name


def _shape(function: NativeFunction, options: OpOptions, kind: Kind) -> tuple[str, str | None]:
    """Where the shapes of an operator come from, and the function that has to be written for them."""
    name = str(function.func.name)
    kernel = identifier(function.func.name.unambiguous_name())
    properties = options.properties
    if options.shape or properties.ShapeCompute or properties.ShapeCache:
        wanted = options.shape or f"compute_shape_{kernel}"
        return f"{wanted}, by hand", wanted
    if kind.name == "fallback":
        return f"none: {kind.reason}", None
    if kind.name == "draw":
        return "none: it is drawn on the host", None
    if "dynamic_output_shape" in function.tags:
        return "none: it depends on data", f"compute_shape_{kernel}"
    if function.structured or function.structured_delegate is not None:
        return "structured", None
    full = qualified(name)
    if isinstance(function.func.name, QualifiedName):
        from .custom import has_shape_rule

        return ("fake kernel", None) if has_shape_rule(full) else ("none", f"compute_shape_{kernel}")
    if torch._C._dispatch_has_kernel_for_dispatch_key(full, "Meta"):
        return "meta kernel", None
    if torch._C._dispatch_has_computed_kernel_for_dispatch_key(full, "Meta"):
        return "composite", None
    return "none", f"compute_shape_{kernel}"
