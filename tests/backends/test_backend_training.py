"""Built-in and example backends train an MLP, a residual network and a small GPT to the CPU's losses."""

from __future__ import annotations

import functools
import importlib.util

import pytest
from models import MODELS, losses

import lazytensor as lt


@functools.cache
def on_cpu(name: str) -> list[float]:
    return losses(name, "cpu")


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("backend", ["reference", "ts", "python", "onnxruntime"])
def test_losses_are_those_of_the_cpu(backend: str, model: str) -> None:
    if backend == "python":
        import python_backend

        lt.register_backend("python", python_backend.PythonBackend)
    if backend == "onnxruntime":
        if importlib.util.find_spec("onnxruntime") is None:
            pytest.skip("onnxruntime is not installed (pip install lazytensor[test])")
        from lazytensor_onnxruntime import OnnxRuntimeBackend

        lt.register_backend("onnxruntime", OnnxRuntimeBackend)
    lt.set_backend(backend)
    close = 1e-4 if backend == "onnxruntime" else 1e-6
    assert losses(model, "ltc") == pytest.approx(on_cpu(model), abs=close)
    assert lt.cache_info()["hits"] > 0


def test_the_smallest_example_stays_small() -> None:
    import python_backend

    with open(python_backend.__file__) as file:
        assert len(file.readlines()) <= 40


def test_onnxruntime_takes_nearly_everything_of_an_mlp_and_a_residual_network() -> None:
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed (pip install lazytensor[test])")
    from lazytensor_onnxruntime import OnnxRuntimeBackend

    from lazytensor.execute import cut

    lt.register_backend("onnxruntime", OnnxRuntimeBackend)
    backend = lt.set_backend("onnxruntime")
    losses("mlp", "ltc")
    losses("resnet", "ltc")
    made = [c.compiled for k, c in cut.computations.items() if k[0] is backend]
    assert made
    assert {name for c in made for name in c.interpreted} == set()
    assert any(c.decomposed for c in made)
