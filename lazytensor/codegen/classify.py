"""What a schema says: which kind of kernel an op gets, and how its arguments and results are written in Python."""

from __future__ import annotations

import keyword as python_keywords
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torchgen.model import (
    Argument,
    BaseTy,
    BaseType,
    FunctionSchema,
    ListType,
    NativeFunction,
    OptionalType,
    SchemaKind,
)

from lazytensor.codegen.layout import tuple_of
from lazytensor.codegen.natives import qualified

LIFTED = (BaseTy.Scalar, BaseTy.float)


def identifier(name: str) -> str:
    """``add_.Tensor`` as a Python name."""
    text = name.replace("::", "_").replace(".", "_")
    return text + "_" if python_keywords.iskeyword(text) else text


class Kind(NamedTuple):
    """Which kind of kernel an overload gets; for one that is never recorded, the reason."""

    name: str
    reason: str = ""


def classify(
    function: NativeFunction, functional_of: Mapping[str, str], deterministic: frozenset[str] = frozenset()
) -> Kind:
    """Which kind of kernel an overload gets."""
    schema = function.func
    name = str(schema.name)
    types = [a.type for a in schema.arguments.flat_all]
    for kind in types:
        if base(kind) in (BaseTy.Storage, BaseTy.Stream, None):
            return Kind("fallback", f"a {kind} cannot be part of a graph")
    if any(base(t) is BaseTy.Generator for t in types) or (
        "nondeterministic_seeded" in function.tags and name not in deterministic
    ):
        return Kind("draw")
    for returned in schema.returns:
        if base(returned.type) is not BaseTy.Tensor:
            return Kind("fallback", f"it returns a {returned.type}")
    form = schema.kind()
    if form is SchemaKind.functional:
        if any(r.annotation is not None for r in schema.returns):
            return Kind("view")
        if not any(base(t) in (BaseTy.Tensor, BaseTy.Device) for t in types):
            return Kind("fallback", "no argument is a tensor or a device")
        return Kind("functional") if schema.returns else Kind("fallback", "it returns nothing")
    if name not in functional_of:
        return Kind("fallback", "it writes into its arguments and has no functional form")
    if form is SchemaKind.out:
        if any(is_list(a.type) for a in schema.arguments.out):
            return Kind("fallback", "its out= argument is a list")
        if any(is_written(a) for a in in_order(schema)):
            return Kind("fallback", "it writes other arguments beside out=")
        return Kind("out")
    first = in_order(schema)[0]
    alone = form is SchemaKind.inplace and not is_list(first.type) and one_written(schema)
    return Kind("inplace" if alone else "mutable")


def one_written(schema: FunctionSchema) -> bool:
    """Whether exactly one argument is written."""
    return sum(is_written(a) for a in in_order(schema)) == 1


def in_order(schema: FunctionSchema) -> list[Argument]:
    """The arguments of a call in schema order, out= arguments left out."""
    return [a for a in schema.arguments.flat_all if a not in schema.arguments.out]


def is_written(argument: Argument) -> bool:
    """Whether the op writes into this argument."""
    return argument.annotation is not None and argument.annotation.is_write


def base(kind: Any) -> BaseTy | None:
    """The innermost type: ``Tensor?[]`` is made of ``Tensor``."""
    while isinstance(kind, ListType | OptionalType):
        kind = kind.elem
    if not isinstance(kind, BaseType):
        return None
    return BaseTy.int if kind.name is BaseTy.SymInt else kind.name


def tensor_arguments(schema: FunctionSchema) -> str:
    """The tuple of the tensor arguments, with None where an argument is none: who shares memory is asked of them."""
    names = [safe(a.name) if base(a.type) is BaseTy.Tensor else "None" for a in in_order(schema)]
    return tuple_of(names)


def is_list(kind: Any) -> bool:
    """Whether a type is a list, optional or not."""
    return isinstance(kind.elem if isinstance(kind, OptionalType) else kind, ListType)


def is_optional(kind: Any) -> bool:
    """Whether None is allowed."""
    return isinstance(kind, OptionalType)


_ANNOTATIONS = {
    BaseTy.Tensor: "LazyTensor",
    BaseTy.Scalar: "Scalar",
    BaseTy.float: "Scalar",
    BaseTy.int: "int",
    BaseTy.bool: "bool",
    BaseTy.str: "str",
    BaseTy.ScalarType: "torch.dtype",
    BaseTy.Device: "torch.device",
    BaseTy.Layout: "torch.layout",
    BaseTy.MemoryFormat: "torch.memory_format",
}


def annotation(kind: Any) -> str:
    """The Python annotation of an argument as torch hands it to a kernel."""
    if isinstance(kind, OptionalType):
        inner = annotation(kind.elem)
        return inner if inner in ("Any", "Scalar") else f"{inner} | None"
    if isinstance(kind, ListType):
        return f"Sequence[{annotation(kind.elem)}]"
    return _ANNOTATIONS.get(base(kind), "Any")  # type: ignore[arg-type]


def result_type(schema: FunctionSchema) -> str:
    """The Python annotation of what a kernel returns."""
    if not schema.returns:
        return "None"
    kinds = ["list[torch.Tensor]" if is_list(r.type) else "torch.Tensor" for r in schema.returns]
    if len(kinds) == 1:
        return kinds[0]
    return "Any" if "list[torch.Tensor]" in kinds else "tuple[torch.Tensor | None, ...]"


def first_tensor(schema: FunctionSchema) -> str:
    """The name of the first tensor argument."""
    return next(safe(a.name) for a in in_order(schema) if base(a.type) is BaseTy.Tensor)


def safe(name: str) -> str:
    """An argument's name, where it is a word of Python's."""
    return name + "_" if python_keywords.iskeyword(name) else name


def tensor_expressions(argument: Argument, name: str) -> tuple[str, str]:
    """How a kernel gets the value of a tensor argument: in line, and by the slow path."""
    if is_list(argument.type):
        element = argument.type.elem.elem if isinstance(argument.type, OptionalType) else argument.type.elem  # type: ignore[union-attr,attr-defined]
        if isinstance(element, OptionalType) or isinstance(argument.type, OptionalType):
            return f"values_of({name})", f"values_of({name})"
        return f"tuple([t._lt.value or value_of(t) for t in {name}])", f"values_of({name})"
    plain = f"{name}._lt.value or value_of({name})"
    if isinstance(argument.type, OptionalType):
        return f"None if {name} is None else {plain}", f"value_of({name})"
    if argument.name == "other":
        return f"lift({name}) if type({name}) in NUMBERS else {plain}", f"value_of({name})"
    return plain, f"value_of({name})"


_runtime: dict[str, dict[str, Any]] = {}


def runtime_schema(schema: FunctionSchema) -> dict[str, Any]:
    """The installed torch's own arguments of this overload by name: their defaults are real Python values."""
    name = str(schema.name)
    found = _runtime.get(name)
    if found is None:
        stem, _, overload = qualified(name).partition(".")
        try:
            known = torch._C._get_schema(stem, overload)
        except RuntimeError:  # a backend's own op, which is defined when its package is imported
            known = torch._C.parse_schema(str(schema))
        found = _runtime[name] = {a.name: a for a in known.arguments}
    return found
