"""An operator's schema as an IR node sees it: which arguments are values, and which are part of the node's structure.

The model follows `torchgen.api.lazy`, with Python annotations in place of C++ types. A *value* is computed by the graph
(a tensor, or a number lifted to run time) and becomes an operand of the node; every other argument is a *scalar* and is
kept as an attribute. Lists are tuples everywhere, because the parts of an interned node must be hashable.

The annotations use the builtin types, `torch.*`, and two names that the generated module has to import: `Value`, what
the graph computes, and `Const`, a Python number of any type that is part of the structure.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

from torchgen.model import (  # type: ignore[import-untyped,unused-ignore]
    Argument,
    BaseTy,
    BaseType,
    FunctionSchema,
    ListType,
    OperatorName,
    OptionalType,
    Return,
    Type,
)


class SchemaError(ValueError):
    """Raised when a schema, or what was asked for it, cannot become an IR node."""


@dataclass(frozen=True)
class LazyIrProperties:
    """What is generated for a node, one choice at most from each group of `GROUPS`."""

    # Shapes are passed in, computed on construction, or computed once and looked up after that.
    ShapePrecompute: bool = False
    ShapeCompute: bool = False
    ShapeCache: bool = False
    # The lowering is generated, or only declared and written by hand; likewise for the next two pairs.
    Lower: bool = False
    LowerDeclOnly: bool = False
    CanBeReused: bool = False
    CanBeReusedDeclOnly: bool = False
    CreateFn: bool = False
    CreateFnDeclOnly: bool = False
    # A Scalar argument is an attribute of the node, not a value lifted to run time.
    TreatScalarsAsConstants: bool = False

    GROUPS: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("ShapePrecompute", "ShapeCompute", "ShapeCache"),
        ("Lower", "LowerDeclOnly"),
        ("CanBeReused", "CanBeReusedDeclOnly"),
        ("CreateFn", "CreateFnDeclOnly"),
        ("TreatScalarsAsConstants",),
    )

    def __post_init__(self) -> None:
        for group in self.GROUPS:
            chosen = [name for name in group if getattr(self, name)]
            if len(chosen) > 1:
                raise SchemaError(f"{' and '.join(chosen)} exclude each other")

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """The properties there are."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def of(cls, *names: str) -> LazyIrProperties:
        """The set of the named properties; two of one group are an error."""
        for name in names:
            if name not in cls.names():
                raise SchemaError(f"there is no property {name}")
        return cls(**dict.fromkeys(names, True))

    def with_(self, names: Iterable[str]) -> LazyIrProperties:
        """These properties, with each named one taking the place of what was chosen in its group."""
        asked = self.of(*names)
        changes = {
            name: getattr(asked, name)
            for group in self.GROUPS
            if any(getattr(asked, name) for name in group)
            for name in group
        }
        return replace(self, **changes)


NATIVE_PROPERTIES = LazyIrProperties.of("ShapePrecompute", "Lower", "CanBeReused")
NON_NATIVE_PROPERTIES = LazyIrProperties.of("ShapeCache", "CanBeReused", "LowerDeclOnly")

_ATTRIBUTES: dict[BaseTy, str] = {
    BaseTy.int: "int",
    BaseTy.DeviceIndex: "int",
    BaseTy.SymInt: "int",
    BaseTy.float: "float",
    BaseTy.bool: "bool",
    BaseTy.SymBool: "bool",
    BaseTy.str: "str",
    BaseTy.Scalar: "Const",
    BaseTy.ScalarType: "torch.dtype",
    BaseTy.Device: "torch.device",
    BaseTy.Layout: "torch.layout",
    BaseTy.MemoryFormat: "torch.memory_format",
    BaseTy.QScheme: "torch.qscheme",
    BaseTy.Generator: "torch.Generator",
}
_NUMBERS = frozenset({BaseTy.int, BaseTy.SymInt, BaseTy.float, BaseTy.bool, BaseTy.Scalar})


def base_type(typ: Type) -> BaseTy | None:
    """What a type is made of once its lists and optionals are taken off; None for a class of the user's."""
    while isinstance(typ, (OptionalType, ListType)):
        typ = typ.elem
    return typ.name if isinstance(typ, BaseType) else None


def is_value_type(typ: Type, *, lift_scalars: bool, symint: bool) -> bool:
    """Whether an argument of this type is, or holds, values computed by the graph."""
    if isinstance(typ, OptionalType):
        return is_value_type(typ.elem, lift_scalars=lift_scalars, symint=symint)
    base = base_type(typ)
    if base is BaseTy.SymInt:
        # A list of sizes stays an attribute: only a size that stands alone is an operand.
        return symint and not isinstance(typ, ListType)
    return base is BaseTy.Tensor or (base is BaseTy.Scalar and lift_scalars)


def lazy_type(typ: Type, *, lift_scalars: bool, symint: bool) -> str:
    """The Python annotation of an argument as the node holds it (`process_ir_type` in torchgen)."""
    if isinstance(typ, OptionalType):
        return f"{lazy_type(typ.elem, lift_scalars=lift_scalars, symint=symint)} | None"
    if isinstance(typ, ListType):
        symint = symint and typ.elem != BaseType(BaseTy.SymInt)
        return f"tuple[{lazy_type(typ.elem, lift_scalars=lift_scalars, symint=symint)}, ...]"
    if is_value_type(typ, lift_scalars=lift_scalars, symint=symint):
        return "Value"
    if isinstance(typ, BaseType) and typ.name in _ATTRIBUTES:
        return _ATTRIBUTES[typ.name]
    raise SchemaError(f"an argument of type {typ} cannot be part of an IR node")


@dataclass(frozen=True)
class LazyArgument:
    """One argument of a node: the schema's argument, and how the node holds it."""

    argument: Argument
    lazy_type: str
    symint: bool
    is_lazy_value: bool

    @classmethod
    def of(
        cls, argument: Argument, properties: LazyIrProperties, *, symint: bool, structure: bool = False
    ) -> LazyArgument:
        """`structure` keeps a number in the node even though numbers of its type are lifted."""
        lift = not (properties.TreatScalarsAsConstants or structure)
        symint = symint and not structure
        return cls(
            argument,
            lazy_type(argument.type, lift_scalars=lift, symint=symint),
            symint,
            is_value_type(argument.type, lift_scalars=lift, symint=symint),
        )

    @property
    def name(self) -> str:
        """The name in the schema."""
        return str(self.argument.name)

    @property
    def identifier(self) -> str:
        """The name as Python code can write it: `random.from` has an argument called `from`."""
        return f"{self.name}_" if keyword.iskeyword(self.name) else self.name

    @property
    def orig_type(self) -> Type:
        """The type in the schema."""
        return self.argument.type

    @property
    def is_optional(self) -> bool:
        """Whether None is allowed."""
        return isinstance(self.orig_type, OptionalType)

    @property
    def is_generator(self) -> bool:
        """Whether it is a random generator."""
        return base_type(self.orig_type) is BaseTy.Generator

    @property
    def is_wrapped_scalar(self) -> bool:
        """A number, or a list of them, lifted to a value."""
        return self.is_lazy_value and base_type(self.orig_type) is BaseTy.Scalar

    @property
    def is_symint_or_list(self) -> bool:
        """A symbolic size held as a value; as in torchgen, a list of sizes is not one."""
        return self.is_lazy_value and base_type(self.orig_type) is BaseTy.SymInt


@dataclass(frozen=True)
class LazyIrSchema:
    """The schema of one IR node, built from the schema of its operator.

    `structure` names the number arguments that belong to the node although their type is lifted, because a shape or the
    choice of an algorithm depends on them.
    """

    func: FunctionSchema
    properties: LazyIrProperties = NATIVE_PROPERTIES
    symint: bool = False
    opkind: str = ""
    structure: frozenset[str] = frozenset()
    positional_args: tuple[LazyArgument, ...] = field(init=False, repr=False, compare=False)
    keyword_args: tuple[LazyArgument, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        arguments = self.func.arguments
        types = {a.name: a.type for a in arguments.flat_all}
        for name in sorted(self.structure):
            if name not in types:
                raise SchemaError(f"{self.name} has no argument {name}")
            if base_type(types[name]) not in _NUMBERS:
                raise SchemaError(f"argument {name} of {self.name} is a {types[name]}; only numbers can be structure")
        if not self.opkind:
            object.__setattr__(self, "opkind", f"aten::{self.name}")
        object.__setattr__(self, "positional_args", self._lazy(arguments.flat_positional))
        object.__setattr__(self, "keyword_args", self._lazy((*arguments.flat_kwarg_only, *arguments.out)))
        if sum(a.is_generator for a in self.filtered_args()) > 1:
            raise SchemaError(f"{self.name} has more than one generator argument")

    def _lazy(self, arguments: Iterable[Argument]) -> tuple[LazyArgument, ...]:
        return tuple(
            LazyArgument.of(a, self.properties, symint=self.symint, structure=a.name in self.structure)
            for a in arguments
        )

    @property
    def name(self) -> OperatorName:
        """The operator, overload included."""
        return self.func.name

    @property
    def aten_name(self) -> str:
        """The operator without its overload, the underscore of an in-place one kept: `add_`."""
        return str(self.name.name)

    @property
    def base_name(self) -> str:
        """The operator without overload and without the mark of its variant: `add`."""
        return str(self.name.name.base)

    @property
    def node_name(self) -> str:
        """The node's class name, which is the name and overload in CamelCase: `BitwiseAndTensor`."""
        words = f"{self.name.name}_{self.name.overload_name}".lower().split("_")
        return "".join(word.capitalize() for word in words)

    @property
    def returns(self) -> tuple[Return, ...]:
        """What the operator returns."""
        return tuple(self.func.returns)

    @property
    def generator_arg(self) -> LazyArgument | None:
        """The random generator, wherever it stands: fallback and shape inference need it, a lowering does not."""
        return next((a for a in self.filtered_args() if a.is_generator), None)

    def filtered_args(
        self,
        positional: bool = True,
        keyword: bool = True,
        values: bool = True,
        scalars: bool = True,
        generator: bool = True,
    ) -> list[LazyArgument]:
        """The arguments of the asked kinds, in schema order. A generator counts as a scalar."""
        arguments = (*(self.positional_args if positional else ()), *(self.keyword_args if keyword else ()))
        return [a for a in arguments if (values if a.is_lazy_value else scalars) and (generator or not a.is_generator)]

    @property
    def positional_values(self) -> list[LazyArgument]:
        """The operands that are passed by position."""
        return self.filtered_args(keyword=False, scalars=False)

    @property
    def positional_scalars(self) -> list[LazyArgument]:
        """The attributes that are passed by position."""
        return self.filtered_args(keyword=False, values=False)

    @property
    def keyword_values(self) -> list[LazyArgument]:
        """The operands that are passed by keyword."""
        return self.filtered_args(positional=False, scalars=False)

    @property
    def keyword_scalars(self) -> list[LazyArgument]:
        """The attributes that are passed by keyword."""
        return self.filtered_args(positional=False, values=False)
