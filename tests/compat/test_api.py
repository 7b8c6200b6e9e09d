"""Every function of torch._lazy is there under its own name, and does what it says."""

from __future__ import annotations

import importlib
import io
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
import lazytensor.compat as lazy

NAMES = {
    "": "mark_step wait_device_ops sync_multi get_tensor_id to_cpu save add_step_closure run_step_closures",
    "closure": "ClosureHandler AsyncClosureHandler add_step_closure run_step_closures",
    "device_context": "DeviceContext get_device_context",
    "metrics": "reset counter_names counter_value metrics_report",
    "debug": "render_ir_graph dump_ir",
    "config": "get_force_fallback set_force_fallback set_reuse_ir",
    "ir_cache": "dump reset",
    "computation": "get_tensors_ts_device_data_node get_graph_hash run_cached_graph",
    "extract_compiled_graph": (
        "extract_compiled_graph GraphInputMatcher ReturnValueHandler force_lazy_device get_fallback_ops"
    ),
    "tensor_factory_functions": "tensor_factory_functions",
    "ts_backend": "init",
}


@pytest.mark.parametrize("module", NAMES)
def test_every_name_of_torch_lazy_is_there(module: str) -> None:
    ours = importlib.import_module("lazytensor.compat" + (f".{module}" if module else ""))
    theirs = importlib.import_module("torch._lazy" + (f".{module}" if module else ""))
    for name in NAMES[module].split():
        assert hasattr(theirs, name), f"torch._lazy has no {name}"
        assert hasattr(ours, name)


def test_init_may_be_called_again() -> None:
    lazy.ts_backend.init()
    lazy.ts_backend.init()
    assert lt.current_backend().name == "ts"


def test_a_script_for_torch_lazy_runs_with_its_import_changed() -> None:
    script = """
        import torch
        import torch.nn as nn
        import torch.nn.functional as F
        import torch._lazy as lazy
        import torch._lazy.metrics as metrics
        import torch._lazy.ts_backend

        torch._lazy.ts_backend.init()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)).to(device="lazy")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        data, target = torch.randn(5, 4).to("lazy"), torch.tensor([0, 1, 2, 0, 1], device="lazy")
        for step in range(3):
            optimizer.zero_grad(set_to_none=True)
            loss = F.nll_loss(F.log_softmax(model(data), dim=1), target)
            loss.backward()
            optimizer.step()
            lazy.mark_step()
        lazy.wait_device_ops()
        print(round(loss.item(), 4), metrics.counter_value("MarkStep"))
    """
    theirs = textwrap.dedent(script)
    ours = theirs.replace("import torch._lazy as lazy", "import lazytensor.compat as lazy")
    ours = ours.replace("import torch._lazy.metrics as metrics", "import lazytensor.compat.metrics as metrics")
    ours = ours.replace("import torch._lazy.ts_backend\n", "import lazytensor.compat.ts_backend\n")
    ours = ours.replace("torch._lazy.ts_backend.init()", "lazytensor.compat.ts_backend.init()").replace(
        "import torch\n", "import torch, lazytensor.compat\n", 1
    )
    printed = [
        subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True).stdout
        for text in (theirs, ours)
    ]
    assert printed[0] == printed[1] != ""


def test_mark_step_takes_lazy_devices_only() -> None:
    x = torch.ones(2, device="lazy") + 1
    lazy.mark_step("lazy:0", wait=True)
    lazy.mark_step("ltc")
    lazy.mark_step()
    assert x.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="'cpu' is none"):
        lazy.mark_step("cpu")


def test_the_name_lazy_means_ltc_where_a_device_is_an_argument(tmp_path: Path) -> None:
    assert torch.zeros(1, device="lazy").device.type == "ltc"
    assert torch.ones(1).to("lazy:1").device == torch.device("ltc", 1)
    assert torch.ones(1).to(torch.device("lazy")).device == torch.device("ltc", 0)
    assert torch.ones(1).to(device="lazy", dtype=torch.float64).dtype is torch.float64
    assert torch.nn.Linear(2, 2).to("lazy").weight.device.type == "ltc"
    assert torch.ones(1).new_zeros(2, device="lazy").device.type == "ltc"
    assert torch.zeros_like(torch.ones(1), device="lazy").device.type == "ltc"
    torch.save(torch.ones(2), tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt", map_location="lazy").device.type == "ltc"
    assert torch.ones(1).to(torch.float64).device.type == "cpu"


def test_sync_multi_ignores_other_devices_and_refuses_other_things() -> None:
    x = torch.ones(2, device="lazy") * 3
    lazy.sync_multi([x, torch.ones(1)], [])
    assert "aten::mul" not in lazy.debug.dump_ir([x], "text")
    with pytest.raises(TypeError):
        lazy.sync_multi([x, 3], [])  # type: ignore[list-item]


def test_tensor_ids() -> None:
    x, y = torch.ones(2, device="lazy"), torch.ones(2, device="lazy")
    assert lazy.get_tensor_id(x) == lazy.get_tensor_id(x) == lazy.get_tensor_id(x.detach())
    assert lazy.get_tensor_id(x) != lazy.get_tensor_id(y)
    with pytest.raises(TypeError):
        lazy.get_tensor_id(torch.ones(1))
    with pytest.raises(TypeError):
        lazy.get_tensor_id(3)  # type: ignore[arg-type]


def test_to_cpu_and_save_take_any_tree() -> None:
    model = torch.nn.Linear(2, 2).to("lazy")
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, device="lazy")).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "none": None}
    there = lazy.to_cpu(tree)
    assert there["epoch"] == 3
    assert all(v.device.type == "cpu" for v in there["model"].values())
    file = io.BytesIO()
    lazy.save(tree, file)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["model"]["weight"], there["model"]["weight"])
    assert loaded["optimizer"]["state"][0]["exp_avg"].device.type == "cpu"


def test_metrics() -> None:
    x = torch.ones(3, device="lazy")
    y = x + 1
    assert x.nonzero().shape == (3, 1)
    lazy.mark_step()
    assert lazy.metrics.counter_value("MarkStep") == 1
    assert lazy.metrics.counter_value("aten::nonzero") == 1
    assert lazy.metrics.counter_value("lazy::add") == 1
    assert lazy.metrics.counter_value("no such counter") is None
    assert y.tolist() == [2, 2, 2]
    assert "Counter: MarkStep" in lazy.metrics.metrics_report()
    lazy.metrics.reset()
    assert "MarkStep" not in lazy.metrics.counter_names()


def test_dumps() -> None:
    x = torch.ones(3).to("lazy")
    y = x + 1
    assert lazy.debug.render_ir_graph([y]).startswith("digraph")
    assert "aten::add" in lazy.debug.dump_ir([y], "text")
    assert "graph(" in lazy.debug.dump_ir([y], "backend")
    with pytest.raises(RuntimeError, match="Unrecognized IR format: hash"):
        lazy.debug.dump_ir([y], "hash")


def test_any_number_of_ops_can_be_forced_to_fall_back() -> None:
    x = torch.ones(3).to("lazy")

    def step() -> None:
        y = x.clone().sub_(0.5)
        assert ((x - 1) * (x + 1) + y).sum().item() == 1.5

    step()
    assert lazy.metrics.counter_value("aten::sub.Tensor") is None
    lazy.config.set_force_fallback("aten::sub, aten::mul")
    assert lazy.config.get_force_fallback() == "aten::mul,aten::sub"
    step()
    assert lazy.metrics.counter_value("aten::sub.Tensor") == 1
    assert lazy.metrics.counter_value("aten::sub_.Tensor") == 1
    assert lazy.metrics.counter_value("aten::mul.Tensor") == 1
    lazy.config.set_force_fallback(["aten::add"])
    lazy.metrics.reset()
    step()
    assert lazy.metrics.counter_value("aten::sub.Tensor") is None
    assert lazy.metrics.counter_value("aten::add.Tensor") == 2
    lazy.config.set_force_fallback("")
    lazy.metrics.reset()
    step()
    assert lazy.metrics.counter_value("aten::add.Tensor") is None


def test_the_node_cache_is_written_and_emptied(tmp_path: Path) -> None:
    x = torch.ones(3).to("lazy")
    (x.exp() + x).sum().item()
    lazy.ir_cache.dump(str(tmp_path / "cache.dot"))
    assert "aten::exp" in (tmp_path / "cache.dot").read_text()
    pending = x * 4
    lazy.ir_cache.reset()
    assert lt.cache_info()["size"] == 0
    assert pending.tolist() == [4, 4, 4]


def test_a_graph_is_run_again_by_its_hash() -> None:
    x = torch.arange(3.0).to("lazy")
    w = torch.full((3,), 2.0).to("lazy")
    y = x * w + 0.5
    key = lazy.computation.get_graph_hash([y])
    assert len(key) == 16
    ids, values = lazy.computation.get_tensors_ts_device_data_node([y])
    assert lazy.get_tensor_id(x) in ids
    assert lazy.get_tensor_id(w) in ids
    assert lazy.computation.run_cached_graph(key, values)[0].tolist() == [0.5, 2.5, 4.5]
    place = ids.index(lazy.get_tensor_id(x))
    values[place] = torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]])[:, 0]  # other strides
    for _ in range(3):
        assert lazy.computation.run_cached_graph(key, values)[0].tolist() == [2.5, 4.5, 6.5]
    other = lazy.computation.get_graph_hash([x * w])
    assert other != key
    assert lazy.computation.get_graph_hash([x * w + 7.0]) == key  # a number is not structure
    with pytest.raises(RuntimeError, match="kicked out of the LRU cache"):
        lazy.computation.run_cached_graph(b"0" * 16, values)
    with pytest.raises(RuntimeError, match="inputs"):
        lazy.computation.run_cached_graph(key, values[:1])
    values[place] = torch.zeros(9)
    with pytest.raises(RuntimeError, match="the graph takes"):
        lazy.computation.run_cached_graph(key, values)


def test_device_contexts_are_one_per_device() -> None:
    assert lazy.device_context.get_device_context() is lazy.device_context.get_device_context()
    assert lazy.device_context.get_device_context("A") is not lazy.device_context.get_device_context("B")


def test_an_async_handler_of_ones_own() -> None:
    handler = lazy.closure.AsyncClosureHandler(max_queue_size=2)
    done: list[Any] = []
    here = threading.current_thread()
    handler([lambda: done.append(threading.current_thread() is here)])
    handler.join()
    assert done == [False]
    lazy.closure.ClosureHandler()([lambda: done.append("inline")])
    assert done == [False, "inline"]
