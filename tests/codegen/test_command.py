"""`lazytensor codegen` and its errors: everything wrong is said together, and then nothing is written."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lazytensor.codegen.command import app
from lazytensor.codegen.show import show
from lazytensor.codegen.yaml_document import CodegenErrors

sys.path.insert(0, str(Path(__file__).parent))
import packages

YAML = """
    backend: Lazy
    namespace: told
    full_codegen:
      - add.Tensor
      - nonzero
      - {op: flip, shape: flipped}
    supported:
      - relu
      - selu
    non_native:
      - func: scaled(Tensor input, float by) -> Tensor
    """


def call(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    return result.exit_code, result.stdout, result.stderr


def problems(folder: Path, yaml: str, **options) -> list[str]:
    with pytest.raises(CodegenErrors) as caught:
        packages.generate(folder, yaml, name="told", **options)
    assert not (folder / "told").exists(), "nothing is written when anything is wrong"
    return [str(error).replace(f"{folder}/", "") for error in caught.value.errors]


def test_it_prints_what_it_wrote_and_then_unchanged(tmp_path: Path) -> None:
    source = packages.write(tmp_path, "one.yaml", "backend: Lazy\nnamespace: one\nfull_codegen: [add.Tensor]\n")
    code, out, _ = call("--source-yaml", source, "--output-dir", tmp_path / "one")
    assert code == 0
    assert out.startswith("1 node classes, 1 generated kernels\n")
    assert "written  " in out
    code, out, _ = call("--source-yaml", source, "--output-dir", tmp_path / "one")
    assert code == 0
    assert out.endswith("unchanged\n")


def test_wrong_yaml_is_told_line_by_line(tmp_path: Path) -> None:
    source = packages.write(tmp_path, "bad.yaml", "backend: Lzy\nnamespace: bad\nfull_codegen: [ad.Tensor]\n")
    code, out, err = call("--source-yaml", source, "--output-dir", tmp_path / "bad")
    assert (code, out) == (1, "")
    assert "bad.yaml:1:" in err
    assert "did you mean Lazy?" in err
    assert "bad.yaml:3: there is no operator ad.Tensor; did you mean add.Tensor?" in err
    assert "2 error(s); nothing was written" in err
    assert not (tmp_path / "bad").exists()


def test_missing_options_are_asked_for() -> None:
    code, _, err = call("--dry-run")
    assert code == 2
    assert "--source-yaml" in err


def test_handwritten_functions_that_are_missing_are_told_together(tmp_path: Path) -> None:
    kernels = "def rellu(self): ...\ndef selu(self): ...\ndef selu(self): ...\n"
    told = problems(tmp_path, YAML, kernels=kernels)
    path = tmp_path / "told_kernels.py"
    assert any(
        "told.yaml:8: relu needs one kernel relu in told_kernels.py, which has 0" in line and "mean rellu?" in line
        for line in told
    ), told
    assert any("told.yaml:9: selu needs one kernel selu in told_kernels.py, which has 2" in line for line in told)
    assert any("scaled needs one function lower_scaled in told_kernels.py, which has 0" in line for line in told)
    assert any("missing shape inference function" in line for line in told)
    assert len(told) == 4
    assert path.exists()


def test_a_missing_shape_function_lists_exactly_what_to_add(tmp_path: Path) -> None:
    (told,) = problems(tmp_path, YAML, shapes="def flippd(self, dims): ...\n")
    assert told.startswith("told.yaml:5: missing shape inference function; add to told_shapes.py:\n")
    assert told.split("\n")[1:] == [
        "    def compute_shape_nonzero(self: torch.Tensor) -> torch.Tensor: ...",
        "    def flipped(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor: ...",
    ] or told.split("\n")[1:] == [
        "    def compute_shape_nonzero(self: torch.Tensor) -> torch.Tensor: ...",
        "    def flipped(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor: ...; did you mean flippd?",
    ]


def test_the_declarations_are_enough(tmp_path: Path) -> None:
    shapes = """
        from collections.abc import Sequence

        import torch

        def compute_shape_nonzero(self: torch.Tensor) -> torch.Tensor: ...
        def flipped(self: torch.Tensor, dims: Sequence[int]) -> torch.Tensor: ...
        """
    result = packages.generate(tmp_path, YAML, name="told", shapes=shapes)
    assert not any(file.path.name == "shape_stubs.py" for file in result.files)
    assert '"compute_shape_nonzero"' in (tmp_path / "told" / "registration.py").read_text()


def test_without_a_file_of_shape_functions_what_lacks_one_falls_back_with_a_stub(tmp_path: Path) -> None:
    yaml = "backend: Lazy\nnamespace: told\nfull_codegen: [nonzero]\n"
    result = packages.generate(tmp_path, yaml, name="told")
    assert [w.text for w in result.warnings] == ["nonzero has no shape rule, so it falls back; see shape_stubs.py"]
    assert (
        "def compute_shape_nonzero(self: torch.Tensor) -> torch.Tensor:"
        in (tmp_path / "told" / "shape_stubs.py").read_text()
    )


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"impl_path": "nowhere.py"}, "the file of kernels cannot be read"),
        ({"shape_inference": "nowhere.py"}, "the file of shape functions cannot be read"),
        ({"kernels": "def relu(:\n"}, "the file of kernels is not Python"),
        ({"shapes": "def flipped(:\n"}, "the file of shape functions is not Python"),
        ({"node_base": "Mine"}, "--node-base must name a class with its module"),
        ({"node_base": "a.b-c"}, "--node-base must name a class with its module"),
        ({"backend_name": "my backend"}, "--backend-name must be a Python identifier"),
    ],
)
def test_each_wrong_option_is_told(tmp_path: Path, options: dict[str, str], expected: str) -> None:
    assert any(expected in line for line in problems(tmp_path, YAML, **options))


def test_a_wrong_yaml_and_an_unreadable_file_are_told_together(tmp_path: Path) -> None:
    told = problems(tmp_path, "backend: Lazy\nnamespace: told\nfull_codegen: [ad.Tensor]\n", impl_path="nowhere.py")
    assert len(told) == 2
    assert any("there is no operator ad.Tensor" in line for line in told)
    assert any("nowhere.py: the file of kernels cannot be read" in line for line in told)


def test_show_follows_an_op_of_the_device_from_yaml_to_lowering() -> None:
    text = show("aten::add.Tensor")
    titles = [line for line in text.split("\n") if line and not line.startswith(" ")]
    assert titles == ["schema", "YAML", "node", "kernel", "shape rule", "lowering"]
    assert "class AddTensor(TSNode):" in text
    assert "def add_Tensor(self: LazyTensor, other: LazyTensor, alpha: Scalar = _c0) -> torch.Tensor:" in text
    assert "  structured\n" in text
    assert "context.builtin(self.op.name" in text


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("detach", "excluded: nn.Parameter(t) fails"),
        ("copy_", "copy_, written by hand"),
        ("dropout", "not needed: PyTorch composes it of other ops"),
        ("uniform_", "def uniform_(*args: Any, **kwargs: Any) -> Any:"),
    ],
)
def test_show_says_what_becomes_of_other_ops(name: str, expected: str) -> None:
    assert expected in show(name)


def test_show_of_a_backends_op_shows_its_own_kernel(tmp_path: Path) -> None:
    source = packages.write(tmp_path, "mine.yaml", "backend: Lazy\nnamespace: mine\nfull_codegen: [add.Tensor]\n")
    code, out, _ = call("--source-yaml", source, "--show", "add.Tensor")
    assert code == 0
    assert 'count("mine.add_Tensor")' in out
    assert "not in this YAML" in show("mm", source)


def test_show_of_an_unknown_op_names_the_nearest() -> None:
    code, _, err = call("--show", "aten::ad.Tensor")
    assert code == 1
    assert "did you mean add.Tensor?" in err
