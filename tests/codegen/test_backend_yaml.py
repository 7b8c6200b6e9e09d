"""A backend's YAML: what it may say, and that everything wrong is reported at once, with line and nearest name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from torchgen.model import DispatchKey, OperatorName  # type: ignore[import-untyped,unused-ignore]

from lazytensor.codegen.backend_yaml import ParsedExternalYaml, parse_backend_yaml
from lazytensor.codegen.checks import check_kernels
from lazytensor.codegen.natives import load_native_functions
from lazytensor.codegen.yaml_document import CodegenErrors

SHARED = Path(__file__).parents[2].parent / "shared" / "data"

SMALL = """
backend: Lazy
cpp_namespace: my::backend
extra_headers: [a.h]
full_codegen:
  - add.Tensor
  - all
  - {op: topk, properties: [ShapeCompute, LowerDeclOnly], shape: shapes.topk}
  - {op: add.Scalar, structure: [alpha]}
ir_gen:
  - selu
supported:
  - empty.memory_format
  - selu
symint:
  - empty.memory_format
autograd:
  - max_pool3d
non_native:
  - func: scalar(Scalar value, ScalarType type) -> Tensor
    opkind: prim::Constant
    properties:
      - ShapeCompute
      - TreatScalarsAsConstants
  - func: expand(Tensor input, int[] size, bool is_scalar_expand) -> Tensor
"""

Parse = Callable[[str], ParsedExternalYaml]
Problems = Callable[[str], list[str]]


@pytest.fixture
def parse(tmp_path: Path) -> Parse:
    def run(text: str) -> ParsedExternalYaml:
        path = tmp_path / "backend.yaml"
        path.write_text(dedent(text).strip("\n") + "\n")
        return parse_backend_yaml(path)

    return run


@pytest.fixture
def problems(parse: Parse, tmp_path: Path) -> Problems:
    """What is wrong with a file, each as `line: text`."""

    def run(text: str) -> list[str]:
        with pytest.raises(CodegenErrors) as caught:
            parse(text)
        assert str(caught.value) == "\n".join(map(str, caught.value.errors))
        prefix = f"{tmp_path / 'backend.yaml'}:"
        assert all(str(error).startswith(prefix) for error in caught.value.errors)
        return [str(error).removeprefix(prefix) for error in caught.value.errors]

    return run


def ops(*names: str) -> tuple[OperatorName, ...]:
    return tuple(map(OperatorName.parse, names))


# What a file says.


def test_a_small_file_is_read_section_by_section(parse: Parse) -> None:
    parsed = parse(SMALL)
    assert (parsed.backend_key, parsed.autograd_key) == (DispatchKey.Lazy, DispatchKey.AutogradLazy)
    assert (parsed.class_name, parsed.namespace) == ("LazyNativeFunctions", "my::backend")
    assert parsed.full_codegen == ops("add.Tensor", "all", "topk", "add.Scalar")
    assert parsed.ir_gen == ops("selu")
    assert parsed.supported == ops("empty.memory_format", "selu")
    assert parsed.autograd == ops("max_pool3d")
    assert parsed.symint == set(ops("empty.memory_format"))
    assert parsed.lines[OperatorName.parse("topk")] == 7
    assert parsed.warnings == ()


def test_an_entry_with_options_changes_its_schema_only(parse: Parse) -> None:
    parsed = parse(SMALL)
    topk, add_scalar, add = (parsed.schemas[op] for op in ops("topk", "add.Scalar", "add.Tensor"))
    assert parsed.options.keys() == set(ops("topk", "add.Scalar"))
    assert parsed.options[topk.name].shape == "shapes.topk"
    assert topk.properties.ShapeCompute and topk.properties.LowerDeclOnly and topk.properties.CanBeReused
    assert [a.name for a in add_scalar.filtered_args(values=False)] == ["alpha"]
    assert [a.name for a in add.filtered_args(values=False)] == []


def test_non_native_nodes_have_their_own_defaults(parse: Parse) -> None:
    scalar, expand = parse(SMALL).non_native
    assert (scalar.node_name, scalar.opkind) == ("Scalar", "prim::Constant")
    assert scalar.properties.ShapeCompute and scalar.properties.TreatScalarsAsConstants
    assert (expand.node_name, expand.opkind) == ("Expand", "aten::expand")
    assert expand.properties.ShapeCache and expand.properties.CanBeReused and expand.properties.LowerDeclOnly


def test_the_backend_index_names_one_kernel_per_overload(parse: Parse) -> None:
    parsed = parse(SMALL + "use_out_as_primary: true\n")
    index = parsed.backend_indices[DispatchKey.Lazy]
    kernels = {str(op): metadata.kernel for op, metadata in index.index.items()}
    assert kernels == {
        "add.Tensor": "add_Tensor",
        "all": "all",
        "topk": "topk",
        "add.Scalar": "add_Scalar",
        "empty.memory_format": "empty_memory_format_symint",
        "selu": "selu",
    }
    assert {metadata.cpp_namespace for metadata in index.index.values()} == {"my::backend"}
    assert (index.use_out_as_primary, index.device_guard, index.external) == (True, False, True)
    assert list(parsed.backend_indices[DispatchKey.AutogradLazy].index) == list(ops("max_pool3d"))
    assert DispatchKey.Lazy not in load_native_functions().backend_indices


@pytest.mark.parametrize("backend", ["Lazy", "XLA", "PrivateUse1"])
def test_any_dispatch_key_can_be_a_backend(parse: Parse, backend: str) -> None:
    parsed = parse(f"{{backend: {backend}, namespace: mine, class_name: Mine, supported: [abs], symint: , autograd: }}")
    assert str(parsed.backend_key) == backend
    assert (parsed.class_name, parsed.autograd_key, parsed.autograd) == ("Mine", None, ())


def test_the_aten_prefix_may_be_written(parse: Parse) -> None:
    assert parse("{backend: XLA, namespace: n, full_codegen: ['aten::add.Tensor']}").full_codegen == ops("add.Tensor")


# Patterns and exclusions.


def test_a_pattern_takes_what_it_matches(parse: Parse) -> None:
    parsed = parse("{backend: XLA, namespace: n, full_codegen: ['_foreach_add*', abs]}")
    assert set(ops("_foreach_add.List", "_foreach_add_.Scalar", "_foreach_addcdiv.Tensor", "abs")) < set(
        parsed.full_codegen
    )
    assert len(parsed.full_codegen) == len(set(parsed.full_codegen))


def test_all_takes_every_operator_that_reaches_a_backend(parse: Parse) -> None:
    parsed = parse(
        """
        backend: XLA
        namespace: n
        full_codegen: all
        supported: [add.Tensor, "mul.*"]
        exclude:
          "set*": moves storages about
          record_stream: names a stream
          "sym_constrain_*": takes no tensor
          _assert_scalar: takes no tensor
          _print: takes no tensor
        """
    )
    functions = load_native_functions().functions
    reaching = {op for op, f in functions.items() if not f.has_composite_implicit_autograd_kernel}
    taken = {*parsed.full_codegen, *parsed.supported}
    assert taken | parsed.exclusions.keys() >= reaching
    assert not taken & parsed.exclusions.keys()
    assert taken <= reaching
    assert parsed.supported[0] == OperatorName.parse("add.Tensor")
    assert set(ops("mul.Tensor", "mul.Scalar_out")) <= set(parsed.supported)
    assert parsed.exclusions[OperatorName.parse("record_stream")] == "names a stream"
    assert parsed.exclusions[OperatorName.parse("set_.source_Tensor")] == "moves storages about"


def test_a_name_beats_a_pattern_and_an_exclusion_beats_its_equal(parse: Parse) -> None:
    parsed = parse(
        """
        backend: XLA
        namespace: n
        full_codegen: ["cumsum*", cumprod]
        ir_gen: ["cummax*"]
        exclude: {"cum*": slow, cumsum.out: writes}
        """
    )
    assert parsed.full_codegen == ops("cumprod")
    assert parsed.ir_gen == ()
    assert OperatorName.parse("cumprod") not in parsed.exclusions
    assert parsed.exclusions[OperatorName.parse("cumsum")] == "slow"
    assert parsed.exclusions[OperatorName.parse("cumsum.out")] == "writes"


def test_the_options_of_a_pattern_hold_where_the_argument_exists(parse: Parse) -> None:
    parsed = parse(
        """
        backend: XLA
        namespace: n
        full_codegen:
          - {op: "arange*", structure: [start, end, step]}
        symint: all
        """
    )
    assert parsed.schemas[OperatorName.parse("arange")].structure == {"end"}
    assert parsed.schemas[OperatorName.parse("arange.start_step")].structure == {"start", "end", "step"}
    assert parsed.symint == frozenset()


def test_ir_gen_adds_nothing_to_what_full_codegen_takes(parse: Parse) -> None:
    parsed = parse("{backend: XLA, namespace: n, full_codegen: [abs], ir_gen: [abs, neg]}")
    assert parsed.ir_gen == ops("neg")


def test_harmless_slips_are_warnings(parse: Parse) -> None:
    parsed = parse(
        """
        backend: XLA
        namespace: n
        supported:
          - abs
          - abs
        symint:
          - view
        """
    )
    assert [(w.line, w.text) for w in parsed.warnings] == [
        (5, 'abs is under "supported" twice; the entry on line 4 counts'),
        (7, 'view is under "symint" but under no other section, so nothing comes of it'),
    ]


# What can be wrong. HEAD is two lines long, so what a case adds starts on line 3.

HEAD = "backend: XLA\nnamespace: n\n"
CASES = {
    "not a mapping": ("- abs", ["1: the file must be a mapping with keys such as"]),
    "empty file": ("", ["1: the file must be a mapping with keys such as"]),
    "not YAML": (HEAD + "supported: [abs", ["4: not YAML: "]),
    "no backend": ("namespace: n\nsupported: [abs]", ['1: "backend" is missing or empty: name a dispatch key']),
    "empty backend": ("namespace: n\nbackend:\nsupported: [abs]", ['2: "backend" is missing or empty']),
    "backend is a list": ("namespace: n\nbackend: [XLA]\nsupported: [abs]", ['2: "backend" must be text, not a list']),
    "no namespace": ("backend: XLA\nsupported: [abs]", ['1: "namespace" is missing or empty: say where']),
    "blank namespace": ("backend: XLA\nnamespace: '  '\nsupported: [abs]", ['2: "namespace" is missing or empty']),
    "blank cpp_namespace": ("backend: XLA\ncpp_namespace: ' '\nsupported: [abs]", ['2: "cpp_namespace" is missing or']),
    "two namespaces": (HEAD + "cpp_namespace: m\nsupported: [abs]", ['3: "cpp_namespace" is another name for']),
    "class_name": (HEAD + "class_name: my class\nsupported: [abs]", ['3: "class_name" must be a Python identifier']),
    "use_out_as_primary": (
        HEAD + "supported: [abs]\nuse_out_as_primary: maybe",
        ["4: \"use_out_as_primary\" must be true or false, not 'maybe'"],
    ),
    "device_guard": (
        HEAD + "supported: [abs]\ndevice_guard: 1",
        ["4: \"device_guard\" must be true or false, not '1'"],
    ),
    "section is not a list": (
        HEAD + "supported: abs\nsymint: {}\nautograd: neg\nfull_codegen: 3\nir_gen: selu\nnon_native: x",
        [
            "3: \"supported\" must be a list of operators, not 'abs'",
            '4: "symint" must be a list of operators, not a mapping',
            "5: \"autograd\" must be a list of operators, not 'neg'",
            "6: \"full_codegen\" must be a list of operators, not '3'",
            "7: \"ir_gen\" must be a list of operators, not 'selu'",
            '8: "non_native" must be a list of mappings with func, opkind and properties',
        ],
    ),
    "unexpected key": (
        HEAD + "suported: [abs]\nsupported: [abs]",
        ['3: unexpected key "suported"; the keys are backend, namespace, .*; did you mean supported\\?$'],
    ),
    "key given twice": (
        HEAD + "supported: [abs]\nsupported: [neg]",
        ['4: "supported" is given twice, first on line 3'],
    ),
    "no such operator": (
        HEAD + "supported:\n  - abs\n  - sigmod",
        [r"5: there is no operator sigmod; did you mean sigmoid\?$"],
    ),
    "no such overload": (
        HEAD + "full_codegen:\n  - add\n  - add.tensr\nsymint: [vew]\nautograd: [max_pool3]\nir_gen: [sellu]",
        [
            r"4: there is no operator add; did you mean add.Tensor\?$",
            r"5: there is no operator add.tensr; did you mean add.Tensor\?$",
            r"6: there is no operator vew; did you mean view\?$",
            r"7: there is no operator max_pool3; did you mean max_pool3d\?$",
            r"8: there is no operator sellu; did you mean selu\?$",
        ],
    ),
    "nothing like it": (HEAD + "supported: [zzqqxx]", ["3: there is no operator zzqqxx$"]),
    "not an operator name": (
        HEAD + "supported: [abs, [neg]]",
        ['3: "supported" must name an operator here, not a list'],
    ),
    "pattern without a match": (
        HEAD + "full_codegen: ['_foreech_add*']",
        ['3: the pattern _foreech_add\\* matches no operator that "full_codegen" could take; did you mean _foreach'],
    ),
    "no such dispatch key": (
        "backend: xla\nnamespace: n\nsupported: [abs]",
        [r'1: "backend" must be a dispatch key, and xla is not one; did you mean XLA\?$'],
    ),
    "no autograd key": (
        "backend: Vulkan\nnamespace: n\nsupported: [abs]\nautograd: [max_pool3d]",
        ['4: the key for "autograd" must be a dispatch key, and AutogradVulkan is not one'],
    ),
    "a key torch has": (
        "backend: CPU\nnamespace: n\nsupported: [abs]",
        ['1: "backend" is CPU, which torch or another backend has already'],
    ),
    "one operator, two sections": (
        HEAD + "full_codegen: [abs]\nsupported: [abs]",
        ['4: abs under "supported" takes an operator that abs under "full_codegen" on line 3 takes too'],
    ),
    "two patterns, two sections": (
        HEAD + "full_codegen: ['ab*']\nsupported: ['abs*']",
        ['4: abs\\* under "supported" takes an operator that ab\\* under "full_codegen" on line 3 takes too'],
    ),
    "forms split between backend and autograd": (
        HEAD + "supported:\n  - abs\nautograd:\n  - abs_",
        [r'6: abs_ under "autograd" and abs under "supported" \(line 4\) are forms of one operator; list both under'],
    ),
    "nothing listed": (HEAD, ["1: nothing to generate: no operator under full_codegen, supported, autograd, ir_gen"]),
    "excluded without a reason": (
        HEAD + "full_codegen: ['abs*']\nexclude:\n  abs.out:\n  abs_: ''",
        ["5: abs.out is excluded without a reason", "6: abs_ is excluded without a reason"],
    ),
    "exclude is a list": (
        HEAD + "supported: [neg]\nexclude: [abs]",
        ['4: "exclude" must be a mapping from operator to'],
    ),
    "excluded and listed": (
        HEAD + "full_codegen: [abs]\nexclude: {abs: slow}",
        ['4: abs is excluded, but "full_codegen" lists it on line 3'],
    ),
    "exclusion of nothing": (
        HEAD + "supported: [neg]\nexclude: {asb: slow, 'zzz*': slow}",
        [r"4: there is no operator asb; did you mean abs\?$", "4: the pattern zzz\\* matches no operator"],
    ),
    "unknown option": (
        HEAD + "full_codegen:\n  - {op: abs, shap: f}",
        [r'4: unexpected key "shap"; the keys are op, properties, shape, structure, determ.*; did you mean shape\?$'],
    ),
    "option without an operator": (
        HEAD + "full_codegen:\n  - {shape: f}",
        ['4: "full_codegen" must name an operator here, not a mapping'],
    ),
    "options where nothing is generated": (
        HEAD + "supported:\n  - {op: abs, shape: f}",
        ['4: an operator under "supported" has no options'],
    ),
    "shape is not a function's name": (
        HEAD + "full_codegen: [{op: abs, shape: f()}]",
        [r'3: "shape" must name a Python function, not f\(\)'],
    ),
    "no such property": (
        HEAD + "full_codegen:\n  - op: abs\n    properties:\n      - Lower\n      - ShapeComputed",
        [r"7: there is no property ShapeComputed; did you mean ShapeCompute\?$"],
    ),
    "properties of one group": (
        HEAD + "full_codegen: [{op: abs, properties: [ShapeCompute, ShapeCache]}]",
        ["3: ShapeCompute and ShapeCache exclude each other"],
    ),
    "properties is not a list of names": (
        HEAD + "full_codegen: [{op: abs, properties: Lower}, {op: neg, properties: [[]]}]",
        [
            "3: \"properties\" must be a list of names, not 'Lower'",
            '3: "properties" must be a list of names, and a list',
        ],
    ),
    "no such argument": (
        HEAD + "full_codegen: [{op: add.Tensor, structure: [alhpa]}]",
        [r'3: "structure": add.Tensor has no argument alhpa; did you mean alpha\?$'],
    ),
    "structure is not a number": (
        HEAD + "full_codegen: [{op: add.Tensor, structure: [other]}]",
        ["3: add.Tensor cannot be generated: argument other of add.Tensor is a Tensor; only numbers"],
    ),
    "a type no node can hold": (
        HEAD + "full_codegen: [record_stream]\nir_gen: [set_.source_Storage]",
        [
            "3: record_stream cannot be generated: an argument of type Stream .*; write its kernel by hand$",
            "4: set_.source_Storage cannot be generated: an argument of type Storage",
        ],
    ),
    "no device to record on": (
        HEAD + "full_codegen: ['_assert_sca*']",
        ["3: _assert_scalar cannot be generated: no argument is a tensor or a device.*; exclude it, with a reason$"],
    ),
    "non_native entry is not a mapping": (
        HEAD + "non_native:\n  - scalar",
        ["4: \"non_native\" must have a mapping here, not 'scalar'"],
    ),
    "non_native without func": (
        HEAD + "non_native:\n  - {opkind: a}\n  - {func: '', opnd: a}",
        [
            '4: "func" is missing or empty: write the schema',
            r'5: unexpected key "opnd"; .*; did you mean opkind\?$',
            '5: "func" is missing',
        ],
    ),
    "non_native schema": (
        HEAD + "non_native:\n  - func: scalar(Scala value) -> Tensor\n  - func: f(Stream s) -> Tensor",
        [
            r"4: scalar\(Scala value\) -> Tensor is not a schema such as 'name\(Tensor self, int dim\) -> Tensor'",
            r"5: f\(Stream s\) -> Tensor cannot be a node: an argument of type Stream",
        ],
    ),
    "non_native generators": (
        HEAD + "non_native:\n  - func: f(Tensor x, *, Generator? a, Generator? b) -> Tensor",
        ["4: .* cannot be a node: f has more than one generator argument"],
    ),
    "non_native property": (
        HEAD + "non_native:\n  - func: f(Tensor x) -> Tensor\n    properties: [Lowr]",
        [r"5: there is no property Lowr; did you mean Lower\?$"],
    ),
    "non_native name twice": (
        HEAD + "non_native:\n  - func: f(Tensor x) -> Tensor\n  - func: f(Tensor y) -> Tensor",
        ["5: a non-native node called f was there already"],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_mistake_is_named_with_its_line(problems: Problems, case: str) -> None:
    text, expected = CASES[case]
    found = problems(text)
    assert len(found) == len(expected), found
    for message, pattern in zip(found, expected, strict=True):
        assert re.match(pattern, message), f"{message!r} does not match {pattern!r}"


def test_mistakes_of_every_kind_are_reported_together(problems: Problems) -> None:
    found = problems(
        """
        backend: Lasy
        namespace:
        device_guard: 2
        full_codegen:
          - abs
          - negg
        symint: view
        autograd: [abs_]
        non_native:
          - func: nonsense
        exclude: {neg: }
        """
    )
    assert [int(message.split(":")[0]) for message in found] == [1, 2, 3, 6, 7, 8, 10, 11]


def test_a_key_taken_by_another_backend_is_refused(parse: Parse, tmp_path: Path) -> None:
    first = parse(SMALL)
    second = tmp_path / "second.yaml"
    second.write_text(SMALL)
    with pytest.raises(CodegenErrors) as caught:
        parse_backend_yaml(second, first.backend_indices)
    assert [error.text for error in caught.value.errors] == [
        '"backend" is Lazy, which torch or another backend has already',
        'the key for "autograd" is AutogradLazy, which torch or another backend has already',
    ]


def test_a_file_that_cannot_be_read_is_an_error_without_a_line(tmp_path: Path) -> None:
    with pytest.raises(CodegenErrors, match=r"missing.yaml: the file cannot be read"):
        parse_backend_yaml(tmp_path / "missing.yaml")


# Hand-written kernels.

KERNELS = """
from elsewhere import max_pool3d
def empty_memory_format_symint(size, **options): ...
class LazyNativeFunctions:
    def selu(self): ...
class Another:
    def selu(self): ...
"""


def test_kernels_may_be_functions_methods_or_imports(parse: Parse, tmp_path: Path) -> None:
    impl = tmp_path / "kernels.py"
    impl.write_text(KERNELS)
    check_kernels(parse(SMALL), impl)


def test_each_missing_kernel_is_reported_at_its_entry(parse: Parse, tmp_path: Path) -> None:
    impl = tmp_path / "kernels.py"
    impl.write_text("def sellu(x): ...\ndef max_pool3d(x): ...\nmax_pool3d = 1\n")
    with pytest.raises(CodegenErrors) as caught:
        check_kernels(parse(SMALL), impl)
    empty, selu, pool = caught.value.errors
    assert [error.line for error in (empty, selu, pool)] == [12, 13, 17]
    assert empty.text.startswith(
        f"empty.memory_format needs one kernel empty_memory_format_symint in {impl}, which has 0"
    )
    assert str(selu).endswith("for selu(Tensor self) -> Tensor; did you mean sellu?")
    assert "which has 2" in pool.text and pool.suggestion is None


def test_a_file_of_kernels_that_cannot_be_used_says_why(parse: Parse, tmp_path: Path) -> None:
    with pytest.raises(CodegenErrors, match=r"none.py: the file of kernels cannot be read"):
        check_kernels(parse(SMALL), tmp_path / "none.py")
    (tmp_path / "bad.py").write_text("x = 1\ndef (")
    with pytest.raises(CodegenErrors, match=r"bad.py:2: the file of kernels is not Python"):
        check_kernels(parse(SMALL), tmp_path / "bad.py")


# Real backends, where their files are at hand.

needs_shared = pytest.mark.skipif(
    not SHARED.is_dir(), reason="the two real backend files are not beside the repository"
)


@needs_shared
@pytest.mark.parametrize(
    ("name", "backend", "counts"),
    [
        ("ts_native_functions.yaml", "Lazy", (166, 1, 25, 14, 1, 3)),
        ("xla_native_functions.yaml", "XLA", (95, 10, 289, 12, 5, 0)),
    ],
)
def test_the_files_of_real_backends_load_unchanged(name: str, backend: str, counts: tuple[int, ...]) -> None:
    p = parse_backend_yaml(SHARED / name)
    assert str(p.backend_key) == backend
    sections = (p.full_codegen, p.ir_gen, p.supported, p.symint, p.autograd, p.non_native)
    assert tuple(map(len, sections)) == counts
    assert p.warnings == ()
    assert p.schemas.keys() == {*p.full_codegen, *p.ir_gen}
    assert len(p.backend_indices[p.backend_key].index) == len(p.full_codegen) + len(p.supported)
