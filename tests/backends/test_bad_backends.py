"""A backend that breaks its promises: one clear error, nothing lost, and another backend can take the work."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import lazytensor as lt


def bad(wrong: str) -> type[lt.Backend]:
    """A backend with one fault."""

    class Bad(lt.Backend):
        def compile(self, graph: lt.Graph) -> Any:
            if wrong == "compile":
                raise ValueError("cannot do it")
            right = graph.to_fx()

            def run(*inputs: Any) -> Any:
                if wrong == "execute":
                    raise ValueError("died on the way")
                results = list(right(*inputs))
                if wrong == "count":
                    return results[:-1]
                if wrong == "none":
                    return None
                if wrong == "shape":
                    results[-1] = results[-1].unsqueeze(0)
                if wrong == "dtype":
                    results[-1] = results[-1].double()
                if wrong == "kind":
                    results[-1] = results[-1].tolist()
                return results

            return run

    return Bad


MESSAGES = {
    "compile": "it raised ValueError: cannot do it",
    "execute": "it raised ValueError: died on the way",
    "count": "it returned 1 results instead of 2",
    "none": "it returned a NoneType instead of a list of 2 results",
    "shape": r"result 1 is float32\[1, 3\] and was declared float32\[3\]",
    "dtype": r"result 1 is float64\[3\] and was declared float32\[3\]",
    "kind": "result 1 is a list instead of a Tensor",
}


@pytest.mark.parametrize("wrong", MESSAGES)
def test_one_clear_error_and_the_work_can_be_run_elsewhere(wrong: str) -> None:
    lt.register_backend("bad", bad(wrong))
    lt.set_backend("bad")
    x = torch.arange(3.0).to("ltc")
    x.add_(1)
    y = x * 2
    with pytest.raises(lt.errors.BackendFailed, match=MESSAGES[wrong]) as raised:
        lt.sync()
    text = str(raised.value)
    assert "'bad'" in text
    assert "Graph of 2 operations" in text
    assert "test_bad_backends.py" in text
    assert "still pending" in text
    with pytest.raises(lt.errors.BackendFailed):
        y.tolist()  # still pending, still failing
    lt.set_backend("reference")
    assert y.tolist() == [2, 4, 6]
    assert x.tolist() == [1, 2, 3]


@pytest.mark.parametrize("wrong", MESSAGES)
def test_a_setting_lets_another_backend_take_over_with_one_loud_line(
    wrong: str, caplog: pytest.LogCaptureFixture
) -> None:
    lt.register_backend("bad", bad(wrong))
    lt.set_backend("bad")
    x = torch.arange(3.0).to("ltc")
    with lt.settings.scope(on_backend_failure="reference"), caplog.at_level(logging.ERROR, "lazytensor"):
        for _ in range(3):
            y, z = x + 1, x * 2
            assert (y.tolist(), z.tolist()) == ([1, 2, 3], [0, 2, 4])
            del y, z
    loud = [r for r in caplog.records if r.levelno >= logging.ERROR]
    assert len(loud) == 1
    assert "'bad'" in loud[0].getMessage()
    assert "'reference' from now on" in loud[0].getMessage()


@pytest.mark.parametrize("backend", ["fx", "ts"])
def test_an_error_of_the_users_own_is_not_blamed_on_the_backend(backend: str) -> None:
    class Fx(lt.Backend):
        def compile(self, graph: lt.Graph) -> Any:
            return graph.to_fx()

    lt.register_backend("fx", Fx)
    lt.set_backend(backend)
    table = torch.randn(4, 2).to("ltc")
    for index in ([0, 1], [2, 3], [0, 3]):  # so that ts has built its function
        assert torch.embedding(table, torch.tensor(index).to("ltc")).shape == (2, 2)
        lt.sync()
    found = torch.embedding(table, torch.tensor([0, 9]).to("ltc"))
    other = table + 1
    with pytest.raises(IndexError, match="index out of range") as raised:
        lt.sync()
    assert "aten::embedding" in raised.value.__notes__[0]
    assert torch.equal(other.cpu(), table.cpu() + 1)
    with pytest.raises(lt.errors.ValueLost):
        found.cpu()
    assert (torch.ones(1, device="ltc") + 1).item() == 2


def test_results_in_the_wrong_layout_or_in_shared_memory_are_mended() -> None:
    class Careless(lt.Backend):
        def compile(self, graph: lt.Graph) -> Any:
            right = graph.to_fx()

            def run(*inputs: Any) -> Any:
                results = right(*inputs)
                together = torch.cat([r.t().reshape(-1) for r in results])  # one storage for all, and the wrong strides
                parts = together.split([r.numel() for r in results])
                return [p.view(r.t().shape).t() for p, r in zip(parts, results, strict=True)]

            return run

    lt.register_backend("careless", Careless)
    lt.set_backend("careless")
    x = torch.arange(6.0).view(2, 3).to("ltc")
    for _ in range(5):
        y, z = x + 1, x * 2
        lt.sync()
        assert y.stride() == z.stride() == (3, 1)
        assert (y.view(6).tolist(), z.view(6).tolist()) == ([1, 2, 3, 4, 5, 6], [0, 2, 4, 6, 8, 10])
        y.zero_()
        assert y.sum(1).tolist() == [0, 0]
        assert z.sum(1).tolist() == [6, 24]


def test_interrupting_a_run_loses_nothing() -> None:
    class Interrupted(lt.Backend):
        stop = True

        def compile(self, graph: lt.Graph) -> Any:
            right = graph.to_fx()

            def run(*inputs: Any) -> Any:
                if Interrupted.stop:
                    raise KeyboardInterrupt
                return right(*inputs)

            return run

    lt.register_backend("interrupted", Interrupted)
    lt.set_backend("interrupted")
    x = torch.ones(2, device="ltc") * 5
    with pytest.raises(KeyboardInterrupt):
        lt.sync()
    Interrupted.stop = False
    assert x.tolist() == [5, 5]
