"""The recording kernels: one Python function per ATen overload, specialised to its schema.

What comes out for ``add.Tensor`` is, in essence::

    def add_Tensor(self, other, *, alpha=_c1):
        a0 = self._lt.value ...          # each argument in canonical form: values, lifted numbers, constants
        out = add_Tensor_table.get((a0, a1, alpha))
        if out is None:                  # new structure: infer its shape, make the node, or fall back
            return record(add_Tensor_op, (a0, a1, alpha))
        ...                              # known structure: a new tensor with this value

Nothing on that path looks at a schema, flattens an argument list or asks what kind of argument it has: the generator
did.  The rules are over schemas; which ops are left to hand-written kernels, and why, stands in the YAML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torchgen.model import (
    Argument,
    BaseTy,
    FunctionSchema,
    NativeFunction,
)

from lazytensor.codegen.classify import (
    LIFTED,
    Kind,
    annotation,
    base,
    classify,
    first_tensor,
    identifier,
    in_order,
    is_list,
    is_optional,
    is_written,
    result_type,
    runtime_schema,
    safe,
    tensor_arguments,
    tensor_expressions,
)
from lazytensor.codegen.layout import INDENT, docstring, indented, literal, tuple_of, wrapped
from lazytensor.codegen.natives import qualified


@dataclass
class Kernel:
    """One generated function: its ATen name, what kind of kernel it is, and its source."""

    name: str
    function: str
    kind: Kind
    schema: str
    declaration: str
    signature: str
    body: list[str]
    functional: str = ""

    def source(self, locked: bool = False) -> str:
        """The text; a locked kernel may be called from several threads."""
        header = wrapped(f"def {self.function}{self.signature}:")
        body = ["with lock:", *(INDENT + line for line in self.body)] if locked else self.body
        lines = [*docstring(self.schema), *body]
        return "\n".join([self.declaration, "", "", *header, *indented(lines), ""])


@dataclass
class Writer:
    """Writes kernels one by one and keeps the constants that their defaults need."""

    # In-place, mutable and out= overloads -> the functional overload with the same signature.
    functional_of: Mapping[str, str]
    structure: Mapping[str, Iterable[str]]  # op name -> numbers that decide a shape
    deterministic: frozenset[str] = frozenset()  # tagged random, but without a draw on the CPU
    constants: dict[tuple[type, str], str] = field(default_factory=dict)

    def write(self, function: NativeFunction) -> Kernel:
        """The kernel for one overload."""
        schema = function.func
        name = str(schema.name)
        kind = classify(function, self.functional_of, self.deterministic)
        body = [*self._prologue(function), *getattr(self, "_" + kind.name)(function)]
        generic = kind.name in ("draw", "fallback")
        arguments = "*args: Any, **kwargs: Any" if generic else self._signature(schema)
        return Kernel(
            name,
            self.function_name(name),
            kind,
            str(schema),
            self._declare(name, kind.name, function),
            f"({arguments}) -> {'Any' if generic else result_type(schema)}",
            body,
            self.functional_of.get(name, ""),
        )

    def function_name(self, name: str) -> str:
        """What the kernel is called."""
        return identifier(name)

    def target(self, name: str) -> str:
        """The op whose nodes a kernel makes, as the trace calls it."""
        return qualified(name)

    def _prologue(self, function: NativeFunction) -> list[str]:
        """What a kernel does before anything else: nothing, on the device's own hot path."""
        return []

    # --- parts ---------------------------------------------------------------------------------------------------

    def _declare(self, name: str, kind: str, function: NativeFunction) -> str:
        ident = identifier(name)
        if kind in ("functional", "view"):
            flag = ", view=True" if kind == "view" else ""
            return f'{ident}_op = op("{self.target(name)}"{flag})\n{ident}_table = {ident}_op.table'
        if kind in ("inplace", "mutable", "out"):
            args = in_order(function.func)
            written = tuple(i for i, a in enumerate(args) if is_written(a)) if kind != "out" else ()
            outs = len(function.func.arguments.out)
            functional = self.target(self.functional_of[name])
            made = wrapped(f'{ident}_op = Mutation("{qualified(name)}", "{functional}", {written}, {outs})')
            return "\n".join([*made, f"{ident}_table = {ident}_op.table"])
        return f'{ident}_op = op("{qualified(name)}")'

    def _signature(self, schema: FunctionSchema) -> str:
        parts = []
        runtime = runtime_schema(schema)
        starred = False
        arguments = [*in_order(schema), *schema.arguments.out]
        # PyTorch passes keyword-only arguments by name.  Where all have defaults no star is needed, and Python fills in
        # a positional default faster.
        needed = any(runtime[a.name].kwarg_only and not runtime[a.name].has_default_value() for a in arguments)
        for argument in arguments:
            info = runtime[argument.name]
            if info.kwarg_only and needed and not starred:
                parts.append("*")
                starred = True
            text = f"{safe(argument.name)}: {annotation(argument.type)}"
            if info.has_default_value():
                text += " = " + self._default(argument, info.default_value)
            parts.append(text)
        return ", ".join(parts)

    def _default(self, argument: Argument, value: Any) -> str:
        if value is not None and base(argument.type) in LIFTED and not is_list(argument.type):
            return self.constant(value)
        return literal(value)

    def constant(self, value: Any) -> str:
        """The module-level name of a default number: compared by identity, since ``1 == 1.0 == True``."""
        key = (type(value), repr(value))
        return self.constants.setdefault(key, f"_c{len(self.constants)}")

    def canonical(self, function: NativeFunction, arguments: Iterable[Argument]) -> tuple[list[str], list[str]]:
        """Statements that bring the arguments into canonical form, and the expressions of the canonical arguments."""
        schema = function.func
        runtime = runtime_schema(schema)
        structural = self.structure.get(str(schema.name), [])
        fast: list[str] = []
        slow: list[str] = []
        rest: list[str] = []
        names: list[str] = []
        for argument in arguments:
            name = safe(argument.name)
            kind = base(argument.type)
            if kind is BaseTy.Tensor:
                target = f"v_{name}"
                fast_text, slow_text = tensor_expressions(argument, name)
                fast.append(f"{target} = {fast_text}")
                slow.append(f"{target} = {slow_text}")
                names.append(target)
                continue
            text = self._scalar(argument, name, runtime[argument.name], structural, rest)
            names.append(text)
        lines = []
        if fast:
            lines += ["try:", *[INDENT + f for f in fast], "except AttributeError:", *[INDENT + s for s in slow]]
        return lines + rest, names

    def _scalar(self, argument: Argument, name: str, info: Any, structural: Iterable[str], lines: list[str]) -> str:
        kind = base(argument.type)
        if argument.name == "pin_memory":
            return "None"
        if kind is BaseTy.Device:
            return name
        if is_list(argument.type):
            if kind is BaseTy.Scalar:
                return f"lift_all({name})"
            if is_optional(argument.type):
                return f"None if {name} is None else tuple({name})"
            return f"tuple({name})"
        if kind in LIFTED:
            lifted = "const" if argument.name in structural else "lift"
            if info.has_default_value() and info.default_value is not None:
                lines += [
                    f"if {name} is not {self.constant(info.default_value)}:",
                    f"{INDENT}{name} = {lifted}({name})",
                ]
            elif is_optional(argument.type):
                lines += [f"if {name} is not None:", f"{INDENT}{name} = {lifted}({name})"]
            else:
                lines.append(f"{name} = {lifted}({name})")
        return name

    # --- kinds of kernels ------------------------------------------------------------------------------------------

    def _functional(self, function: NativeFunction) -> list[str]:
        ident = identifier(str(function.func.name))
        lines, names = self.canonical(function, in_order(function.func))
        lines = self._elsewhere(function) + lines
        lines += wrapped(f"key = {tuple_of(names)}", 1)
        lines += [f"out = {ident}_table.get(key)", *self._missed(function, f"record({ident}_op, key)")]
        return lines + self._results(function)

    def _missed(self, function: NativeFunction, call: str) -> list[str]:
        """What a kernel does when its table does not know the structure."""
        return ["if out is None:", *indented(wrapped(f"return {call}", 2))]

    def _elsewhere(self, function: NativeFunction) -> list[str]:
        """A factory or a ``*_like`` op that was asked for another device than ltc."""
        schema = function.func
        if not any(base(a.type) is BaseTy.Device for a in in_order(schema)):
            return []
        passed = ", ".join(
            f"{safe(a.name)}={safe(a.name)}" if runtime_schema(schema)[a.name].kwarg_only else safe(a.name)
            for a in in_order(schema)
        )
        ident = identifier(str(schema.name))
        if any(base(a.type) is BaseTy.Tensor for a in in_order(schema)):
            return [
                "if device is None:",
                f"{INDENT}device = {first_tensor(schema)}.device",
                'elif device.type != "ltc":',
                *indented(wrapped(f"return elsewhere({ident}_op, {passed})", 2)),
            ]
        return [
            'if device is None or device.type != "ltc" or device.index is None:',
            f"{INDENT}device = this_device(device)",
        ]

    def _results(self, function: NativeFunction) -> list[str]:
        returns = function.func.returns
        if len(returns) == 1 and not is_list(returns[0].type):
            return [
                "if out.plain:",
                f"{INDENT}tensor = create(out.size, out.dtype)",
                f"{INDENT}state = State()",
                f"{INDENT}state.value = out",
                f"{INDENT}tensor._lt = tensor.untyped_storage()._lt = state",
                f"{INDENT}fresh.append(state)",
                f"{INDENT}if len(fresh) > FRESH:",
                f"{INDENT * 2}sweep()",
                f"{INDENT}return tensor",
                "return make(out)",
            ]
        if len(returns) == 1:
            return ["return [make(value) for value in out]"]
        if any(is_list(r.type) for r in returns):
            return ["return wrap(out)"]
        return ["return tuple([make_optional(value) for value in out])"]

    def _view(self, function: NativeFunction) -> list[str]:
        ident = identifier(str(function.func.name))
        lines, names = self.canonical(function, in_order(function.func))
        first = safe(in_order(function.func)[0].name)
        lines += [*wrapped(f"key = {tuple_of(names)}", 1), f"out = {ident}_table.get(key)"]
        lines += self._missed(function, f"record_view({ident}_op, {first}, key)")
        if is_list(function.func.returns[0].type):
            return [*lines, f"return [make_view({first}, value) for value in out]"]
        return [*lines, f"return make_view({first}, out)"]

    def _inplace(self, function: NativeFunction) -> list[str]:
        ident = identifier(str(function.func.name))
        lines, names = self.canonical(function, in_order(function.func))
        first = safe(in_order(function.func)[0].name)
        lines += [*wrapped(f"key = {tuple_of(names)}", 1), f"out = {ident}_table.get(key)"]
        tensors = tensor_arguments(function.func)
        lines += self._missed(function, f"mutate({ident}_op, key, ({first},), {first}, {tensors})")
        return [
            *lines,
            f"state = {first}._lt",
            "if state.__class__ is State:",
            f"{INDENT}if v_{first}.leaf:",
            f"{INDENT * 2}track(state)",
            f"{INDENT}state.value = out[1][0]",
            "else:",
            f"{INDENT}write({first}, out[1][0])",
            f"return {first}",
        ]

    def _mutable(self, function: NativeFunction) -> list[str]:
        schema = function.func
        ident = identifier(str(schema.name))
        lines, names = self.canonical(function, in_order(schema))
        written = [safe(a.name) for a in in_order(schema) if is_written(a)]
        lines += [*wrapped(f"key = {tuple_of(names)}", 1), f"out = {ident}_table.get(key)"]
        targets = tuple_of(written)
        returned = self._returned(function)
        tensors = tensor_arguments(schema)
        lines += self._missed(function, f"mutate({ident}_op, key, {targets}, {returned}, {tensors})")
        if str(schema.name).startswith("_foreach_"):
            lines.append(f"increment_version({written[0]})")
        for i, argument in enumerate(a for a in in_order(schema) if is_written(a)):
            call = "write_all" if is_list(argument.type) else "write"
            lines.append(f"{call}({safe(argument.name)}, out[1][{i}])")
        if schema.returns and not any(r.annotation is not None for r in schema.returns):
            return [*lines, "return finish(out[0])"]
        return [*lines, f"return {returned}"]

    def _returned(self, function: NativeFunction) -> str:
        """What a mutating op returns: its written arguments, new tensors, or nothing."""
        schema = function.func
        if not schema.returns:
            return "None"
        if any(r.annotation is not None for r in schema.returns):
            written = [safe(a.name) for a in in_order(schema) if is_written(a)]
            return written[0] if len(schema.returns) == 1 else f"({', '.join(written)})"
        return "NEW"

    def _out(self, function: NativeFunction) -> list[str]:
        schema = function.func
        ident = identifier(str(schema.name))
        lines, names = self.canonical(function, in_order(schema))
        outs = [safe(a.name) for a in schema.arguments.out]
        returned = "None" if not schema.returns else outs[0] if len(outs) == 1 else f"({', '.join(outs)})"
        lines += wrapped(f"key = {tuple_of(names)}", 1)
        lines += wrapped(f"write_out({ident}_op, key, {tuple_of(outs)}, {tensor_arguments(schema)})", 1)
        return [*lines, f"return {returned}"]

    def _draw(self, function: NativeFunction) -> list[str]:
        return [f"return draw({identifier(str(function.func.name))}_op, args, kwargs)"]

    def _fallback(self, function: NativeFunction) -> list[str]:
        reason = classify(function, self.functional_of, self.deterministic).reason
        ident = identifier(str(function.func.name))
        return wrapped(f'return fallback({ident}_op, args, kwargs, "{reason}")', 1)
