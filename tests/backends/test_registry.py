"""Backends are found by name, switched without losing anything, and say why they cannot be loaded."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import registry
from lazytensor.execute import cut


class Fx(lt.Backend):
    def __init__(self, level: int = 0) -> None:
        super().__init__()
        self.level = level
        self.life: list[str] = []

    def prepare(self) -> None:
        self.life.append("prepare")

    def close(self) -> None:
        self.life.append("close")

    def compile(self, graph: lt.Graph) -> Any:
        return graph.to_fx()


def test_known_backends_are_listed() -> None:
    lt.register_backend("fx", Fx)
    assert {"reference", "ts", "fx"} <= set(lt.backends())


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(lt.errors.UnknownBackend, match=r"no backend 'nonsense'.*reference.*ts"):
        lt.set_backend("nonsense")
    assert lt.current_backend().name == "reference"


def test_options_reach_the_class_and_make_another_instance() -> None:
    lt.register_backend("fx", Fx)
    assert lt.set_backend("fx", level=3).level == 3  # type: ignore[attr-defined]
    assert lt.set_backend("fx") is not lt.set_backend("fx", level=3)
    assert lt.set_backend("fx", level=3) is lt.current_backend()


def test_a_wrong_option_leaves_the_old_backend_in_place() -> None:
    lt.register_backend("fx", Fx)
    with pytest.raises(lt.errors.BackendNotLoaded, match="unexpected keyword argument 'speed'"):
        lt.set_backend("fx", speed=1)
    assert lt.current_backend().name == "reference"


def test_a_backend_that_cannot_get_ready_says_why_and_leaves_the_old_one_in_place() -> None:
    class Broken(Fx):
        def prepare(self) -> None:
            raise OSError("no accelerator found")

    lt.register_backend("broken", Broken)
    x = torch.ones(2, device="ltc") + 1
    with pytest.raises(lt.errors.BackendNotLoaded, match="'broken' could not be loaded: OSError: no accelerator found"):
        lt.set_backend("broken")
    assert lt.current_backend().name == "reference"
    assert x.tolist() == [2, 2]


def test_something_else_than_a_backend_is_refused() -> None:
    lt.register_backend("odd", lambda: 3)  # type: ignore[arg-type,return-value]
    with pytest.raises(lt.errors.BackendNotLoaded, match="it is a int"):
        lt.set_backend("odd")


def test_life_prepare_when_chosen_close_when_replaced() -> None:
    lt.register_backend("fx", Fx)
    backend = lt.set_backend("fx")
    assert backend.life == ["prepare"]  # type: ignore[attr-defined]
    with lt.backend("ts"):
        assert backend.life == ["prepare"]  # type: ignore[attr-defined]
    lt.set_backend("reference")
    assert backend.life == ["prepare", "close"]  # type: ignore[attr-defined]


def test_close_is_called_at_exit() -> None:
    script = """
        import torch, lazytensor as lt
        class Mine(lt.Backend):
            def compile(self, graph): return graph.to_fx()
            def close(self): print("closed")
        lt.register_backend("mine", Mine)
        lt.set_backend("mine")
        print((torch.ones(1, device="ltc") + 1).item())
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2.0", "closed"]


def test_switching_keeps_pending_work_pending() -> None:
    lt.register_backend("fx", Fx)
    x = torch.ones(3, device="ltc") * 2
    lt.set_backend("fx")
    y = x + 1
    lt.set_backend("ts")
    assert y.tolist() == [3, 3, 3]


def test_switching_back_finds_what_was_compiled() -> None:
    x = torch.ones(3, device="ltc")
    lt.sync()

    def step() -> None:
        assert (x * 3).sum().item() == 9

    step()
    misses = lt.cache_info()["misses"]
    with lt.backend("ts"):
        step()
    step()
    assert lt.cache_info()["misses"] == misses + 1


def test_a_scope_ends_with_the_backend_before_also_after_an_error() -> None:
    with pytest.raises(KeyError), lt.backend("ts"):
        assert lt.current_backend().name == "ts"
        raise KeyError
    assert lt.current_backend().name == "reference"


def test_environment_chooses_the_backend() -> None:
    script = "import lazytensor as lt; print(lt.current_backend().name)"
    environment = {**os.environ, "LAZYTENSOR_BACKEND": "ts"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ts"


def test_an_installed_package_announces_its_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "thirdparty.py").write_text(
        "import lazytensor as lt\nclass Third(lt.Backend):\n    version = '9'\n"
        "    def compile(self, graph): return graph.to_fx()\n"
    )
    info = tmp_path / "thirdparty-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thirdparty\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[lazytensor.backends]\nthird = thirdparty:Third\nbad = thirdparty:Missing\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert {"third", "bad"} <= set(lt.backends())
    lt.set_backend("third")
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2, 2]
    with pytest.raises(lt.errors.BackendNotLoaded, match="Missing"):
        lt.set_backend("bad")
    assert lt.current_backend().name == "third"
    described = registry.describe("third")
    assert (described.version, described.problem) == ("9", "")
    assert "Missing" in registry.describe("bad").problem


def test_a_backend_whose_computations_die_with_it_loses_them() -> None:
    class Forgetful(Fx):
        keeps_computations = False

    lt.register_backend("forgetful", Forgetful)
    backend = lt.set_backend("forgetful")
    (torch.ones(4, device="ltc") - 1).sum().item()
    assert any(key[0] is backend for key in cut.computations)
    lt.set_backend("reference")
    assert not any(key[0] is backend for key in cut.computations)
