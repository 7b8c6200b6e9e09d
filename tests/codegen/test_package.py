"""The package that comes out of a YAML: its files, that they are clean, and what its kernels and nodes do."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import lazytensor as lt
from lazytensor.codegen.lowering import lower_graph
from lazytensor.codegen.node import LazyNode
from lazytensor.codegen.package import Result
from lazytensor.codegen.runtime import force_fallback
from lazytensor.device import threads
from lazytensor.trace.storage import value_of

sys.path.insert(0, str(Path(__file__).parent))
import packages

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"

# One op of each kind: functional, in-place, out=, view, tuple, list of views, optional and list operands, a random one,
# one without a shape rule, one that takes no tensor, and one for each option.
YAML = """
    backend: Lazy
    cpp_namespace: kinds
    full_codegen:
      - add.Tensor
      - add_.Tensor
      - add.out
      - addcmul_
      - t
      - topk
      - split.Tensor
      - cat
      - clamp
      - native_layer_norm
      - index_put
      - nonzero
      - uniform_
      - arange
      - {op: mul.Tensor, properties: [CanBeReusedDeclOnly]}
      - {op: sub.Tensor, structure: [alpha]}
      - {op: tanh, properties: [LowerDeclOnly]}
      - {op: exp, properties: [CreateFnDeclOnly]}
      - {op: flip, shape: flipped}
      - equal
    supported:
      - relu
    ir_gen:
      - selu
    autograd:
      - max_pool3d
    non_native:
      - func: scaled(Tensor input, float by=2.0, *, Scalar? shift=None) -> Tensor
      - func: fixed(Scalar value, ScalarType type) -> Tensor
        opkind: prim::Constant
        properties: [ShapeCompute, TreatScalarsAsConstants]
    """
KERNELS = """
    import torch

    from lazytensor.trace.storage import value_of

    asked = []

    class LazyNativeFunctions:
        @staticmethod
        def wrong(): ...

    def relu(self):
        from kinds import non_native

        return non_native.Scaled.create(value_of(self.clamp(0)), 1.0).tensors()

    def max_pool3d(self, kernel_size, stride=(), padding=0, dilation=1, ceil_mode=False):
        return self

    def can_be_reused_mul_Tensor(node, self, other):
        asked.append(node)
        return len(asked) % 2 == 1

    def create_exp(self_):
        from kinds import nodes

        return nodes.Tanh.create(self_)

    def lower_tanh(self):
        return torch.sinh(self) / torch.cosh(self)

    def lower_scaled(input, by, *, shift=None):
        return input * by + (0 if shift is None else shift)

    def lower_fixed(value, type):
        return torch.tensor(value, dtype=type)
    """
SHAPES = """
    import torch

    calls = []

    def flipped(self, dims):
        calls.append(tuple(dims))
        return self.new_empty(self.shape)

    def compute_shape_scaled(input, by, *, shift=None):
        return torch.empty_like(input)

    def compute_shape_nonzero(self):
        raise NotImplementedError("as many as there are")
    """


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("made")
    return folder, packages.generate(folder, YAML, name="kinds", kernels=KERNELS, shapes=SHAPES)


@pytest.fixture(scope="module")
def kinds(made: tuple[Path, Result]) -> Iterator[ModuleType]:
    """The package, imported and in force."""
    package = packages.load(made[0], "kinds")
    package.register()
    yield package
    package.unregister()


def tensor(*size: int) -> torch.Tensor:
    return torch.arange(1.0, 1 + torch.Size(size).numel()).reshape(size)


# The files.


def test_it_says_what_it_wrote_with_counts(made: tuple[Path, Result]) -> None:
    folder, result = made
    assert result.counts == {
        "node classes": 18,
        "non-native nodes": 2,
        "generated kernels": 20,
        "hand-written kernels": 2,
        "excluded ops": 0,
    }
    lines = list(result.summary())
    assert lines[0] == "18 node classes, 2 non-native nodes, 20 generated kernels, 2 hand-written kernels"
    written = {path.name for path in (folder / "kinds").iterdir() if path.suffix in (".py", ".json")}
    assert written == {file.path.name for file in result.files}
    assert len(lines) == 1 + len(written)


def test_a_second_run_changes_nothing_and_says_so(tmp_path: Path) -> None:
    yaml = "backend: Lazy\nnamespace: again\nfull_codegen: [add.Tensor]\n"
    first = packages.generate(tmp_path, yaml, name="again")
    before = {f.path: f.path.read_text() for f in first.files}
    second = packages.generate(tmp_path, yaml, name="again")
    assert {f.state for f in first.files} == {"written"}
    assert second.unchanged
    assert list(second.summary())[-1] == "unchanged"
    assert {f.path: f.path.read_text() for f in second.files} == before


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    yaml = "backend: Lazy\nnamespace: dry\nfull_codegen: [add.Tensor]\n"
    result = packages.generate(tmp_path, yaml, name="dry", dry_run=True)
    assert {f.state for f in result.files} == {"planned"}
    assert list(result.summary())[-1] == "nothing was written"
    assert not (tmp_path / "dry").exists()


def test_generated_code_is_clean_for_ruff_and_formatted(made: tuple[Path, Result]) -> None:
    for command in (["check"], ["format", "--check", "--diff"]):
        config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *command, *config, str(made[0] / "kinds")], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_generated_code_is_clean_for_mypy(made: tuple[Path, Result]) -> None:
    # torch's own types are left out: reading them takes a minute on a slow machine.
    config = packages.write(
        made[0],
        "mypy.ini",
        """
        [mypy]
        strict = true
        [mypy-torch.*]
        follow_imports = skip
        [mypy-lazytensor.*]
        follow_imports = silent
        """,
    )
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "mypy",
            "--config-file",
            str(config),
            "--cache-dir",
            str(made[0] / "cache"),
            "-p",
            "kinds",
        ],
        capture_output=True,
        text=True,
        cwd=made[0],
        env=os.environ | {"MYPYPATH": str(ROOT)},
    )
    assert "Success: no issues found" in done.stdout, done.stdout + done.stderr


def test_no_op_is_mentioned_twice(made: tuple[Path, Result]) -> None:
    text = "\n".join(f.path.read_text() for f in made[1].files if f.path.suffix == ".py")
    names = Counter(re.findall(r'"((?:aten|kinds)::[\w.]+)"', text))
    assert {name: n for name, n in names.items() if n > 1} == {}
    assert Counter(re.findall(r"(?m)^def (\w+)", text)).most_common(1)[0][1] == 1


def test_the_table_lists_every_op(made: tuple[Path, Result]) -> None:
    table = json.loads((made[0] / "kinds" / "ops.json").read_text())
    rows = {row["op"]: row for row in table["ops"]}
    assert len(rows) == len(table["ops"]) == 25
    add, equal = rows["aten::add.Tensor"], rows["aten::equal"]
    assert (add["kind"], add["shape"], add["counter"]) == ("functional", "structured", "kinds.add_Tensor")
    assert (equal["kind"], equal["shape"]) == ("fallback", "none: it returns a bool")
    assert rows["aten::flip"]["shape"] == "flipped, by hand"
    assert rows["aten::index_put"]["shape"] in ("meta kernel", "composite")
    assert rows["aten::relu"]["kind"] == "by hand"
    assert rows["kinds::scaled"]["section"] == "non_native"


def test_each_node_class_is_there_once_although_three_ops_record_it(kinds: ModuleType) -> None:
    text = Path(kinds.nodes.__file__).read_text()
    assert text.count("class AddTensor(") == 1
    assert kinds.nodes.Selu.op.name == "aten::selu"


# What is registered.


def test_importing_registers_nothing_and_unregistering_gives_the_ops_back(kinds: ModuleType) -> None:
    x = tensor(3).to("ltc")
    calls = "kinds.add_Tensor"
    before = lt.metrics.counter_value(calls) or 0
    kinds.unregister()
    assert (x + x).tolist() == [2, 4, 6]
    assert (lt.metrics.counter_value(calls) or 0) == before
    kinds.register()
    kinds.register()
    assert (x + x).tolist() == [2, 4, 6]
    assert lt.metrics.counter_value(calls) == before + 1


def test_a_backend_without_its_handwritten_kernels_is_not_registered(tmp_path: Path) -> None:
    packages.generate(tmp_path, "backend: Lazy\nnamespace: lacking\nsupported: [relu]\n", name="lacking")
    package = packages.load(tmp_path, "lacking")
    with pytest.raises(NotImplementedError, match="relu must be written by hand"):
        package.register()
    assert tensor(2).to("ltc").relu().tolist() == [1, 2]


def test_the_autograd_kernel_is_registered_for_the_autograd_key(kinds: ModuleType) -> None:
    x = tensor(1, 1, 2, 2, 2).to("ltc")
    assert torch.nn.functional.max_pool3d(x, 2).shape == x.shape


# What kernels do.


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x + x,
        lambda x: torch.add(x, 1.5, alpha=2),
        lambda x: x.clone().add_(x, alpha=3),
        lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
        lambda x: x.clone().addcmul_(x, x, value=0.5),
        lambda x: x.clone().t().add_(1),
        lambda x: list(x.topk(1)),
        lambda x: [part.add_(1) for part in x.clone().split(1)],
        lambda x: torch.cat([x, x.t()], 1),
        lambda x: x.clamp(max=2.5),
        lambda x: x.clamp(2, 3),
        lambda x: list(torch.native_layer_norm(x, (2,), None, x[0], 1e-5)),
        lambda x: x.index_put((torch.tensor([1], device=x.device), torch.tensor([0], device=x.device)), x[0, 0]),
        lambda x: x.nonzero(),
        lambda x: torch.arange(2.0, device=x.device) + x,
        lambda x: x.sub(x, alpha=0.5),
        lambda x: x.tanh(),
        lambda x: x.flip(0),
        lambda x: torch.equal(x, x),
        lambda x: (x - 2).relu(),
        lambda x: torch.empty_like(x).uniform_(generator=torch.Generator().manual_seed(3)),
    ],
)
def test_a_generated_kernel_gives_what_eager_gives(kinds: ModuleType, program) -> None:
    x = tensor(2, 2)
    expected, got = program(x), program(x.to("ltc"))
    again = program(x.to("ltc"))
    for result in (got, again):
        torch.testing.assert_close(
            [t.cpu() for t in result] if isinstance(result, list) else getattr(result, "cpu", lambda r=result: r)(),
            expected,
        )


def test_a_forced_op_runs_eagerly(kinds: ModuleType) -> None:
    x = tensor(2, 2).to("ltc")
    with force_fallback("add.Tensor", "aten::add_.Tensor"):
        assert (x + x).tolist() == [[2, 4], [6, 8]]
        assert lt.metrics.counter_value("aten::add.Tensor") == 1
        y = x.clone()
        y.add_(1)
        assert y.tolist() == [[2, 3], [4, 5]]
    assert (x + x).tolist() == [[2, 4], [6, 8]]
    assert lt.metrics.counter_value("aten::add.Tensor") == 1


def test_a_shape_function_is_asked_for_new_structure_only(kinds: ModuleType) -> None:
    x = tensor(2, 3).to("ltc")
    x.flip(1)
    asked = sys.modules["kinds"].handwritten.shapes.find("flipped").__globals__["calls"]
    count = len(asked)
    assert count > 0
    x.flip(1)
    assert len(asked) == count


def test_reuse_that_is_written_by_hand_decides(kinds: ModuleType) -> None:
    x = tensor(2).to("ltc")
    first, second, third = (value_of(x * x) for _ in range(3))
    assert second is first
    assert third is not second


def test_what_the_device_recorded_before_does_not_stand_for_what_the_backend_would(kinds: ModuleType) -> None:
    kinds.unregister()
    x = tensor(2).to("ltc")
    assert value_of(x.exp()).node.op.name == "aten::exp"
    kinds.register()
    assert value_of(x.exp()).node.op.name == "kinds::tanh"


def test_a_create_function_written_by_hand_makes_the_node(kinds: ModuleType) -> None:
    value = value_of(tensor(2).to("ltc").exp())
    assert value.node.op.name == "kinds::tanh"


# What nodes are.


def test_a_node_knows_its_operands_and_attributes_by_name(kinds: ModuleType) -> None:
    x, y = tensor(2).to("ltc"), tensor(2).to("ltc")
    node = LazyNode.wrap(value_of(torch.sub(x, y, alpha=2)).node)
    assert isinstance(node, kinds.nodes.SubTensor)
    assert (node.self_, node.other) == (value_of(x), value_of(y))
    assert node.attributes == {"alpha": 2}
    assert node.operands == (value_of(x), value_of(y))
    assert str(node) == f"[float32[2]] aten::sub.Tensor, self_={node.self_.name}, other={node.other.name}, alpha=2"


def test_optional_and_list_operands_show(kinds: ModuleType) -> None:
    x = tensor(2).to("ltc")
    clamp = LazyNode.wrap(value_of(x.clamp(max=1.0)).node)
    assert clamp.min is None
    assert "min=null" in str(clamp)
    cat = LazyNode.wrap(value_of(torch.cat([x, x])).node)
    assert cat.tensors_ == (value_of(x), value_of(x))
    assert len(cat.operands) == 2


def test_create_gives_the_node_there_is(kinds: ModuleType) -> None:
    x = tensor(2).to("ltc")
    recorded = value_of(x + x)
    node = kinds.nodes.AddTensor.create(value_of(x), value_of(x))
    assert node.node is recorded.node
    assert node.can_be_reused(value_of(x), value_of(x), 1)
    assert not node.can_be_reused(value_of(x), recorded, 1)
    assert node.tensors().tolist() == [2, 4]


def test_a_number_given_to_create_is_lifted(kinds: ModuleType) -> None:
    x = tensor(2).to("ltc")
    node = kinds.nodes.AddTensor.create(value_of(x), value_of(x), 2.5)
    assert node.alpha.kind is float
    assert node.tensors().tolist() == [3.5, 7]


def test_a_non_native_op_is_recorded_as_one_node(kinds: ModuleType) -> None:
    x = tensor(2).to("ltc")
    result = torch.ops.kinds.scaled(x, 3.0, shift=1)
    node = LazyNode.wrap(value_of(result).node)
    assert isinstance(node, kinds.non_native.Scaled)
    assert result.tolist() == [4, 7]
    assert kinds.non_native.Fixed.opkind == "prim::Constant"


def test_every_kind_of_node_is_lowered_to_torchscript(kinds: ModuleType) -> None:
    class Lowering(lt.Backend):
        def compile(self, graph):
            return lower_graph(graph)

    def program(x):
        a, b = (x.tanh() + 1.5).split(1)
        top, index = torch.cat([a, b.clamp(max=2)], 0).topk(1)
        return [top, index, x.t().sub(x, alpha=2), torch.ops.kinds.scaled(x, 0.5)]

    x = tensor(2, 2).to("ltc")
    expected = [t.tolist() for t in program(x)]
    lt.register_backend("kinds-lowering", Lowering)
    lt.set_backend("kinds-lowering")
    try:
        results = program(x)
        assert [t.tolist() for t in results] == expected
    finally:
        lt.set_backend("reference")


def test_nodes_may_have_another_base_and_no_lowering(tmp_path: Path) -> None:
    packages.write(
        tmp_path,
        "based_nodes.py",
        """
        from lazytensor.codegen.node import LazyNode

        class Mine(LazyNode):
            pass
        """,
    )
    packages.generate(
        tmp_path,
        "backend: Lazy\nnamespace: based\nfull_codegen: [add.Tensor]\n",
        name="based",
        node_base="based_nodes.Mine",
        backend_name="Based",
        gen_ts_lowerings=False,
    )
    sys.path.insert(0, str(tmp_path))
    package = packages.load(tmp_path, "based")
    sys.path.remove(str(tmp_path))
    assert package.nodes.AddTensor.__mro__[1].__name__ == "Mine"
    assert not hasattr(package.nodes.AddTensor, "lower")
    assert package.registration.registration.name == "Based"


# The YAMLs of two real backends.


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("ts", {"generated kernels": 166, "hand-written kernels": 26, "non-native nodes": 3}),
        ("xla", {"generated kernels": 95, "hand-written kernels": 294, "non-native nodes": 0}),
    ],
)
def test_the_yaml_of_a_real_backend_generates(tmp_path: Path, name: str, counts: dict[str, int]) -> None:
    source = SHARED / f"{name}_native_functions.yaml"
    if not source.is_file():
        pytest.skip(f"{source} is not at hand")
    from lazytensor.codegen import run

    result = run(source, tmp_path / "out")
    assert {k: v for k, v in result.counts.items() if k in counts} == counts
    for file in result.files:
        if file.path.suffix == ".py":
            compile(file.path.read_text(), str(file.path), "exec")


def test_kernels_take_the_lock_once_there_is_a_second_thread(kinds: ModuleType) -> None:
    before = lt.metrics.counter_value("kinds.add_Tensor") or 0
    x = torch.ones(64).to("ltc")
    sums: list[float] = []

    def work() -> None:
        y = x
        for _ in range(50):
            y = y + x
        sums.append(y.sum().item())

    workers = [threading.Thread(target=work) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert threads.locked
    assert sums == [51 * 64] * 3
    assert lt.metrics.counter_value("kinds.add_Tensor") == before + 150
