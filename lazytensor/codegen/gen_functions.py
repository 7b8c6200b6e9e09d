"""Native functions: the kernels of a backend's `full_codegen` ops (`<Key>NativeFunctions.cpp`).

What comes out for `add.Tensor` is the device's own kernel (:mod:`lazytensor.codegen.kernels`), and before it what C++
has there::

    add_Tensor_op = nodes.AddTensor.op

    def add_Tensor(self: LazyTensor, other: LazyTensor, *, alpha: Scalar = _c0) -> torch.Tensor:
        '''add.Tensor(Tensor self, Tensor other, *, Scalar alpha=1) -> Tensor'''
        if add_Tensor_op.name in forced:                  # the forced-fallback check
            return fallback(add_Tensor_op, (self, other), {"alpha": alpha}, "it is forced")
        count("my_backend.add_Tensor")                    # the counter
        ...                                               # operands; reuse, or shape inference and a node; result

In-place and out= forms write the value of the functional node (`SetInPlaceIrValue`), views alias their base, and tuples
and lists of tensors come back as such.  Both run on the same runtime, so a backend's kernels and the device's mix in
one trace.  (`lazy::add`, the counter of C++, is counted for all nodes when a graph runs; a kernel counts its calls.)
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torchgen.model import BaseOperatorName, Location, NativeFunction

from .classify import classify, identifier, in_order, is_written, runtime_schema, safe
from .generate import deterministic_in
from .kernels import Kernel, Writer
from .layout import INDENT, indented, tuple_of, wrapped
from .module import module
from .natives import QualifiedName, qualified
from .plan import NodePlan, Plan


@dataclass
class GenLazyNativeFuncDefinition(Writer):
    """Writes the kernels of one backend: the device's, and before them the forced-fallback check and the counter."""

    plan: Plan = field(kw_only=True)

    @classmethod
    def of(cls, plan: Plan) -> GenLazyNativeFuncDefinition:
        """The writer for a plan."""
        structure = {str(n.schema.name): n.schema.structure for n in plan.nodes}
        for op in plan.ops:
            if op.node is not None:
                structure[op.name] = op.node.schema.structure
        return cls(plan.functional_of, structure, deterministic_in(plan.parsed), plan=plan)

    def function_name(self, name: str) -> str:
        """What the backend index calls the kernel."""
        return self.plan.kernels.get(name) or identifier(name)

    def _node(self, name: str) -> NodePlan:
        node = self.plan.node_of(name)
        assert node is not None, name
        return node

    def _declare(self, name: str, kind: str, function: NativeFunction) -> str:
        ident = identifier(name)
        if kind == "fallback":
            return f'{ident}_op = op("{qualified(name)}")'
        node = self._node(name)
        home = "nodes" if node.function is not None else "non_native"
        if kind == "draw" and str(node.schema.name) != name:
            return f'{ident}_op = op("{qualified(name)}")'
        if kind not in ("inplace", "mutable", "out"):
            first = f"{ident}_op = {home}.{node.class_name}.op"
            return first if kind == "draw" else f"{first}\n{ident}_table = {ident}_op.table"
        args = in_order(function.func)
        written = tuple(i for i, a in enumerate(args) if is_written(a)) if kind != "out" else ()
        outs = len(function.func.arguments.out)
        functional = f"{home}.{node.class_name}.op.name"
        made = wrapped(f'{ident}_op = Mutation("{qualified(name)}", {functional}, {written}, {outs})')
        table = [] if kind == "out" else [f"{ident}_table = {ident}_op.table"]
        return "\n".join([*made, *table])

    def _prologue(self, function: NativeFunction) -> list[str]:
        schema = function.func
        ident = identifier(str(schema.name))
        kind = classify(function, self.functional_of, self.deterministic).name
        if kind in ("draw", "fallback"):
            passed = "args, kwargs"
        else:
            runtime = runtime_schema(schema)
            arguments = [*in_order(schema), *schema.arguments.out]
            by_position = tuple_of([safe(a.name) for a in arguments if not runtime[a.name].kwarg_only])
            by_name = ", ".join(f'"{a.name}": {safe(a.name)}' for a in arguments if runtime[a.name].kwarg_only)
            passed = f"{by_position}, {{{by_name}}}"
        call = wrapped(f'return fallback({ident}_op, {passed}, "it is forced")', 2)
        return [f"if {ident}_op.name in forced:", *indented(call), f'count("{self.plan.counter(str(schema.name))}")']

    def _missed(self, function: NativeFunction, call: str) -> list[str]:
        name = str(function.func.name)
        node = self._node(name)
        if classify(function, self.functional_of, self.deterministic).name != "functional":
            return super()._missed(function, call)
        home = "nodes" if node.function is not None else "non_native"
        cls, properties = f"{home}.{node.class_name}", node.schema.properties
        if properties.CreateFnDeclOnly:
            call = f"{cls}.create(*key).tensors()"
        if not properties.CanBeReusedDeclOnly:
            return super()._missed(function, call)
        ident = identifier(name)
        return [
            f"if out is not None and not {cls}.behind(out).can_be_reused(*key):",
            f"{INDENT}del {ident}_table[key]",
            f"{INDENT}out = None",
            *super()._missed(function, call),
        ]


def non_native_function(node: NodePlan) -> NativeFunction | None:
    """A backend's own op as if torch's YAML had it; None for one that no kernel can be called for."""
    entry: dict[str, object] = {"func": str(node.schema.func), "dispatch": {"CompositeExplicitAutograd": "by_hand"}}
    if "Tensor" not in str(node.schema.func.arguments) and "Device" not in str(node.schema.func.arguments):
        return None
    function, _ = NativeFunction.from_yaml(entry, Location(node.target, 0), set())
    op = function.func.name
    name = QualifiedName(BaseOperatorName.parse(str(op.name)), op.overload_name, node.target.partition("::")[0])
    return replace(function, func=replace(function.func, name=name))


def write_kernels(plan: Plan) -> tuple[list[Kernel], GenLazyNativeFuncDefinition]:
    """The kernels of `full_codegen` ops, then those of the backend's own ops."""
    writer = GenLazyNativeFuncDefinition.of(plan)
    functions = [op.function for op in plan.ops if op.section == "full_codegen"]
    functions += [non_native_function(node) for node in plan.non_native]
    return [writer.write(function) for function in functions if function is not None], writer


def native_functions_module(plan: Plan, yaml: str) -> str:
    """`native_functions.py`: every generated kernel, and `kernels`, the table of them by op name."""
    kernels, writer = write_kernels(plan)
    body = [f"{name} = {text}" for (_, text), name in writer.constants.items()]
    for kernel in kernels:
        body += ["", *kernel.source().rstrip("\n").split("\n"), ""]
    body += ["", "kernels: Mapping[str, Callable[..., Any]] = {"]
    body += [f"    {identifier(kernel.name)}_op.name: {kernel.function}," for kernel in kernels]
    body += ["}"]
    doc = f"The kernels of {plan.backend_name}: each records its op on ltc (`{plan.parsed.class_name}.cpp`)."
    return module(doc, body, yaml, [("nodes", "."), ("non_native", ".")])
