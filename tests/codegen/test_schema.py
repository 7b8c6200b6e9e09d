"""The schema of an IR node: which arguments are values, what their Python types are, and what a node is called."""

from __future__ import annotations

import gc

import pytest
import torchgen.api.lazy as cpp_lazy  # type: ignore[import-untyped,unused-ignore]
from torchgen.api.types import BaseCppType  # type: ignore[import-untyped,unused-ignore]
from torchgen.model import FunctionSchema, NativeFunctionsGroup  # type: ignore[import-untyped,unused-ignore]

from lazytensor.codegen.natives import load_native_functions, nearest
from lazytensor.codegen.schema import (
    NATIVE_PROPERTIES,
    NON_NATIVE_PROPERTIES,
    LazyArgument,
    LazyIrProperties,
    LazyIrSchema,
    SchemaError,
)


def native(name: str, properties: LazyIrProperties = NATIVE_PROPERTIES, symint: bool = False) -> LazyIrSchema:
    function = load_native_functions().find(name)
    assert function is not None
    return LazyIrSchema(function.func, properties, symint)


def argument(typ: str, *, symint: bool = False, constants: bool = False, structure: bool = False) -> LazyArgument:
    func = FunctionSchema.parse(f"f({typ} x) -> Tensor")
    properties = LazyIrProperties(TreatScalarsAsConstants=constants)
    return LazyArgument.of(func.arguments.flat_all[0], properties, symint=symint, structure=structure)


def names(arguments: list[LazyArgument]) -> list[str]:
    return [a.name for a in arguments]


# Types.


@pytest.mark.parametrize(
    ("typ", "expected", "is_value"),
    [
        ("Tensor", "Value", True),
        ("Tensor?", "Value | None", True),
        ("Tensor[]", "tuple[Value, ...]", True),
        ("Tensor?[]", "tuple[Value | None, ...]", True),
        ("Scalar", "Value", True),
        ("Scalar?", "Value | None", True),
        ("Scalar[]", "tuple[Value, ...]", True),
        ("int", "int", False),
        ("int?", "int | None", False),
        ("int[]", "tuple[int, ...]", False),
        ("int[2]?", "tuple[int, ...] | None", False),
        ("SymInt", "int", False),
        ("SymInt[]", "tuple[int, ...]", False),
        ("float", "float", False),
        ("float[]?", "tuple[float, ...] | None", False),
        ("bool", "bool", False),
        ("bool[3]", "tuple[bool, ...]", False),
        ("str", "str", False),
        ("ScalarType?", "torch.dtype | None", False),
        ("Device?", "torch.device | None", False),
        ("DeviceIndex", "int", False),
        ("Layout", "torch.layout", False),
        ("MemoryFormat", "torch.memory_format", False),
        ("QScheme", "torch.qscheme", False),
        ("Generator?", "torch.Generator | None", False),
    ],
)
def test_an_argument_has_the_python_type_the_node_keeps(typ: str, expected: str, is_value: bool) -> None:
    found = argument(typ)
    assert (found.lazy_type, found.is_lazy_value) == (expected, is_value)
    assert found.is_optional == typ.endswith("?")
    assert found.is_generator == typ.startswith("Generator")
    assert found.is_wrapped_scalar == (typ in ("Scalar", "Scalar?", "Scalar[]"))


def test_a_size_is_a_value_when_the_kernel_takes_symbolic_sizes() -> None:
    size, maybe, sizes = (argument(typ, symint=True) for typ in ("SymInt", "SymInt?", "SymInt[]"))
    assert (size.lazy_type, maybe.lazy_type, sizes.lazy_type) == ("Value", "Value | None", "tuple[int, ...]")
    assert [a.is_symint_or_list for a in (size, maybe, sizes)] == [True, True, False]
    assert not argument("SymInt").is_symint_or_list


@pytest.mark.parametrize("how", ["constants", "structure"])
def test_a_number_that_is_not_lifted_is_a_constant_of_the_node(how: str) -> None:
    found = argument("Scalar?", **{how: True})
    assert (found.lazy_type, found.is_lazy_value, found.is_wrapped_scalar) == ("Const | None", False, False)


def test_a_size_that_is_structure_is_no_value() -> None:
    assert argument("SymInt", symint=True, structure=True).lazy_type == "int"


@pytest.mark.parametrize("typ", ["Storage", "Stream", "Stream?", "__torch__.torch.classes.mine.Thing"])
def test_a_type_that_no_node_can_hold_is_refused(typ: str) -> None:
    with pytest.raises(SchemaError, match=f"an argument of type {typ.rstrip('?')} cannot be part of an IR node"):
        argument(typ)


# Schemas.


def test_arguments_are_filtered_by_place_and_kind() -> None:
    schema = native("bernoulli.p")
    assert names(schema.filtered_args()) == ["self", "p", "generator"]
    assert names(schema.filtered_args(generator=False)) == ["self", "p"]
    assert names(schema.filtered_args(values=False)) == ["p", "generator"]
    assert names(schema.filtered_args(values=False, generator=False)) == ["p"]
    assert names(schema.filtered_args(scalars=False)) == ["self"]
    assert names(schema.filtered_args(values=False, scalars=False)) == []
    assert names(schema.positional_values) == ["self"]
    assert names(schema.positional_scalars) == ["p"]
    assert names(schema.keyword_values) == []
    assert names(schema.keyword_scalars) == ["generator"]


def test_out_arguments_and_tensor_options_are_keywords() -> None:
    assert names(native("add.out").keyword_values) == ["alpha", "out"]
    assert names(native("empty.memory_format").keyword_scalars) == [
        "dtype",
        "layout",
        "device",
        "pin_memory",
        "memory_format",
    ]


@pytest.mark.parametrize(
    ("op", "generator"), [("bernoulli.p", "generator"), ("poisson", "generator"), ("add.Tensor", None)]
)
def test_the_generator_is_found_wherever_it_stands(op: str, generator: str | None) -> None:
    found = native(op).generator_arg
    assert (found.name if found else None) == generator


@pytest.mark.parametrize(
    ("op", "node", "aten", "base"),
    [
        ("bitwise_and.Tensor", "BitwiseAndTensor", "bitwise_and", "bitwise_and"),
        ("_log_softmax_backward_data", "LogSoftmaxBackwardData", "_log_softmax_backward_data", None),
        ("sum.dim_IntList", "SumDimIntlist", "sum", "sum"),
        ("add_.Tensor", "AddTensor", "add_", "add"),
        ("normal_functional", "NormalFunctional", "normal_functional", "normal"),
        ("relu", "Relu", "relu", "relu"),
    ],
)
def test_names_are_those_of_the_cpp_nodes(op: str, node: str, aten: str, base: str | None) -> None:
    schema = native(op)
    assert (schema.node_name, schema.aten_name, schema.base_name) == (node, aten, base or aten)
    assert schema.opkind == f"aten::{op}"


def test_returns_are_those_of_the_operator() -> None:
    assert [str(r.type) for r in native("topk").returns] == ["Tensor", "Tensor"]
    assert [str(r.type) for r in native("split_copy.Tensor").returns] == ["Tensor[]"]


def test_an_argument_named_like_a_keyword_has_an_identifier() -> None:
    found = native("random.from").positional_args
    assert [(a.name, a.identifier) for a in found[:2]] == [("self", "self"), ("from", "from_")]


def test_structure_must_name_a_number_of_the_operator() -> None:
    func = native("add.Tensor").func
    assert names(LazyIrSchema(func, structure=frozenset({"alpha"})).keyword_scalars) == ["alpha"]
    with pytest.raises(SchemaError, match=r"add.Tensor has no argument beta"):
        LazyIrSchema(func, structure=frozenset({"beta"}))
    with pytest.raises(SchemaError, match=r"argument other of add.Tensor is a Tensor; only numbers can be structure"):
        LazyIrSchema(func, structure=frozenset({"other"}))


def test_two_generators_are_refused() -> None:
    func = FunctionSchema.parse("f(Tensor x, Generator? g, *, Generator? h) -> Tensor")
    with pytest.raises(SchemaError, match="f has more than one generator argument"):
        LazyIrSchema(func)


def test_every_operator_of_torch_has_a_node_unless_it_takes_a_storage_or_a_stream() -> None:
    refused = set()
    for name, function in load_native_functions().functions.items():
        for symint in (False, True):
            try:
                LazyIrSchema(function.func, symint=symint)
            except SchemaError:
                refused.add(str(name))
    assert all(name == "record_stream" or "_Storage" in name for name in refused), refused


def test_values_scalars_and_names_agree_with_torchgen_for_every_operator_it_can_model() -> None:
    cpp_lazy.setValueT(BaseCppType("torch::lazy", "Value"))
    compared = 0
    for function in load_native_functions().functions.values():
        for symint in (False, True):
            try:
                theirs = cpp_lazy.LazyIrSchema(function.func, symint=symint)
            except AssertionError:  # a type that the C++ model lacks
                continue
            ours = LazyIrSchema(function.func, symint=symint)
            assert ours.node_name == theirs.node_name
            for kind in ("positional_values", "positional_scalars", "keyword_values", "keyword_scalars"):
                assert names(getattr(ours, kind)) == [a.name for a in getattr(theirs, kind)], (kind, str(function.func))
            for mine, cpp in zip(ours.filtered_args(), theirs.filtered_args(), strict=True):
                flags = ("is_optional", "is_generator", "is_wrapped_scalar", "is_symint_or_list", "is_lazy_value")
                assert [getattr(mine, f) for f in flags] == [getattr(cpp, f) for f in flags], (mine, str(function.func))
            compared += 1
    assert compared > 6000


# Properties.


def test_the_defaults_are_those_of_the_cpp_generator() -> None:
    assert LazyIrProperties.of("ShapePrecompute", "Lower", "CanBeReused") == NATIVE_PROPERTIES
    assert LazyIrProperties.of("ShapeCache", "CanBeReused", "LowerDeclOnly") == NON_NATIVE_PROPERTIES


def test_a_property_takes_the_place_of_its_group() -> None:
    changed = NATIVE_PROPERTIES.with_(["ShapeCache", "CreateFn"])
    assert changed == LazyIrProperties.of("ShapeCache", "Lower", "CanBeReused", "CreateFn")


@pytest.mark.parametrize("group", LazyIrProperties.GROUPS)
def test_two_properties_of_a_group_exclude_each_other(group: tuple[str, ...]) -> None:
    for name in group:
        assert getattr(LazyIrProperties.of(name), name)
    if len(group) > 1:
        with pytest.raises(SchemaError, match=f"{' and '.join(group)} exclude each other"):
            LazyIrProperties.of(*group)


def test_groups_hold_every_property_once() -> None:
    assert tuple(name for group in LazyIrProperties.GROUPS for name in group) == LazyIrProperties.names()


def test_an_unknown_property_is_refused() -> None:
    with pytest.raises(SchemaError, match="there is no property Lowr"):
        LazyIrProperties.of("Lowr")


# The installed torch.


def test_torchs_schemas_are_read_once_and_leave_the_collector_as_it_was() -> None:
    assert gc.isenabled()
    natives = load_native_functions()
    assert load_native_functions() is natives
    assert natives.find("add.Tensor") is natives.find("aten::add.Tensor")
    assert natives.find("normal_functional") is not None, "variants that torch generates are there too"
    assert gc.isenabled()


def test_the_forms_of_an_operator_are_one_group() -> None:
    groups = [g for g in load_native_functions().groups if isinstance(g, NativeFunctionsGroup)]
    forms = next(
        sorted(str(f.func.name) for f in g.functions()) for g in groups if str(g.functional.func.name) == "abs"
    )
    assert forms == ["abs", "abs.out", "abs_"]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [("add", "add.Tensor"), ("add.scaler", "add.Scalar"), ("aten::relo", "relu"), ("xyzzyq", None)],
)
def test_a_wrong_name_is_answered_with_the_nearest(wrong: str, right: str | None) -> None:
    assert load_native_functions().nearest(wrong) == right


def test_nearest_does_not_mind_case() -> None:
    assert nearest("privateuse1", ["PrivateUse1", "XLA"]) == "PrivateUse1"
    assert nearest("qq", ["PrivateUse1", "XLA"]) is None
