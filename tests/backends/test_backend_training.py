"""Built-in and example backends train an MLP, a residual network and a small GPT to the CPU's losses."""

from __future__ import annotations

import functools
import importlib.util
import tomllib
from pathlib import Path

import pytest
from models import MODELS, losses

import lazytensor as lt
from lazytensor.execute import cut

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "onnxruntime_backend"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example package as pip would have installed it: its folder on the path, its entry points in its metadata."""
    if importlib.util.find_spec("onnxruntime") is None:
        pytest.skip("onnxruntime is not installed (pip install lazytensor[test])")
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = tmp_path / "lazytensor_onnxruntime-0.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    groups = project["entry-points"].items()
    lines = [f"[{group}]\n{name} = {value}\n" for group, points in groups for name, value in points.items()]
    (info / "entry_points.txt").write_text("".join(lines))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))


@functools.cache
def on_cpu(name: str) -> list[float]:
    return losses(name, "cpu")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["reference", "ts", "python", "onnxruntime"])
def test_losses_are_those_of_the_cpu(backend: str, model: str, request: pytest.FixtureRequest) -> None:
    if backend == "python":
        import python_backend

        lt.register_backend("python", python_backend.PythonBackend)
    if backend == "onnxruntime":
        request.getfixturevalue("installed")
    lt.set_backend(backend)
    close = 1e-4 if backend == "onnxruntime" else 1e-6
    assert losses(model, "ltc") == pytest.approx(on_cpu(model), abs=close)
    assert lt.cache_info()["hits"] > 0


def test_the_smallest_example_stays_small() -> None:
    import python_backend

    with open(python_backend.__file__) as file:
        assert len(file.readlines()) <= 40


@pytest.mark.usefixtures("installed")
def test_onnxruntime_takes_everything_of_an_mlp_and_a_residual_network() -> None:
    backend = lt.set_backend("onnxruntime")
    losses("mlp", "ltc")
    losses("resnet", "ltc")
    made = [c.compiled for k, c in cut.computations.items() if k[0] is backend]
    assert made
    assert {name for c in made for name in c.interpreted} == set()
    assert any(c.decomposed for c in made)
