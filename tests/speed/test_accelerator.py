"""What an accelerator's graphs go through: upload, compilation, disk, runs on device data, download.

The path is that of CUDA with the kind of hardware "cpu": data of its own, AOTInductor's code, first tier by the
interpreter.  The last tests are for machines with CUDA.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.inductor.build import no_compiler

pytestmark = pytest.mark.skipif(no_compiler() is not None, reason="TorchInductor needs a C++ compiler")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no CUDA device")

START = """
import json, sys, torch, lazytensor as lt
from torch import nn
from lazytensor.backend.data import BackendData
from lazytensor.backend.inductor import InductorBackend
from lazytensor.backend.inductor.service import service
from lazytensor.trace.storage import state_of

class Elsewhere(InductorBackend):
    device_types = ("cpu",)
    host_types = ()
    uploads = 0

    def to_device(self, *arguments):
        Elsewhere.uploads += 1
        return super().to_device(*arguments)

lt.register_backend("elsewhere", Elsewhere)
"""

TRAINING = """
backend = lt.set_backend("elsewhere", wait=True)
places, uploads = [], []

def train(device, steps=5):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    losses = []
    for batch in torch.randn(steps, 12, 8):
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if device == "ltc":
            lt.sync()
            data = state_of(model[0].weight).data
            assert isinstance(data, BackendData)
            places.append(data.value.data_ptr())
            uploads.append(Elsewhere.uploads)
        losses.append(loss.detach())
    return [l.item() for l in losses], [p.detach().cpu() for p in model.parameters()]

ours, theirs = train("ltc"), train("cpu")
print(json.dumps({
    "losses": max(abs(a - b) for a, b in zip(ours[0], theirs[0])),
    "parameters": max((a - b).abs().max().item() for a, b in zip(ours[1], theirs[1])),
    "tiers": [(t.state, t.tier, type(t.compiled).__name__) for t in backend.graphs],
    "first_tiers": sum(t._first is not None for t in backend.graphs),
    "places": places,
    "uploads": uploads,
    "in_background": backend.asynchronous,
    "compiler_started": service._process is not None,
}))
"""


def run(cache: Path, program: str) -> dict[str, Any]:
    result = subprocess.run(
        [sys.executable, "-c", START + textwrap.dedent(program)],
        env=os.environ | {"LAZYTENSOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.strip().splitlines()[-1])
    found["log"] = result.stderr
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    cache = tmp_path_factory.mktemp("cache")
    found = run(cache, TRAINING)
    found["entries"] = [sorted(p.name for p in so.parent.iterdir()) for so in (cache / "graphs").glob("*/graph.so")]
    return cache, found


def test_a_training_step_on_device_data_has_eagers_losses_and_parameters(trained: tuple[Path, dict[str, Any]]) -> None:
    found = trained[1]
    assert found["losses"] < 1e-6
    assert found["parameters"] < 1e-5
    assert not found["in_background"], "the device works behind the program's back as it is"


def test_a_schedule_compiles_no_graph_again_and_no_first_tier_is_kept(trained: tuple[Path, dict[str, Any]]) -> None:
    assert trained[1]["tiers"] == [["ready", "inductor", "Packaged"]] * 2
    assert trained[1]["first_tiers"] == 0


def test_parameters_are_uploaded_once_and_updated_in_their_own_memory(trained: tuple[Path, dict[str, Any]]) -> None:
    _, *later = trained[1]["places"]
    assert len(set(later[1:])) == 1  # each graph's first run, whose results are looked at, is on copies
    each = [b - a for a, b in zip(trained[1]["uploads"], trained[1]["uploads"][1:], strict=False)]
    assert each == [1, 1, 1, 1], "the batch"


def test_a_restarted_program_finds_its_code_on_disk_and_starts_no_compiler(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    cache, first = trained
    assert first["entries"] == [["call.json", "graph.cpp", "graph.so", "manifest.json"]] * 2
    restarted = run(cache, TRAINING)
    assert first["compiler_started"]
    assert not restarted["compiler_started"]
    assert restarted["tiers"] == first["tiers"]
    assert restarted["losses"] == first["losses"]


def test_nothing_waits_for_the_compiler_and_code_for_the_cpu_is_other_code(
    trained: tuple[Path, dict[str, Any]],
) -> None:
    found = run(
        trained[0],
        """
        import time
        x = torch.arange(6.0).to("ltc")
        tiers, states = [], {}
        for name, options in (("elsewhere", {}), ("inductor", {"device": "cpu"})):
            backend = lt.set_backend(name, **options)
            x = torch.arange(6.0).to("ltc")
            tiered = None
            for step in range(3000):
                x.mul_(1.5).sub_(x.mean())
                lt.sync()
                (tiered,) = backend.graphs
                tiers.append((name, tiered.tier))
                if tiered.tier == "inductor" and tiers.count((name, "inductor")) > 3:
                    break
                time.sleep(0.05)
            states[name] = tiered.key
        print(json.dumps({"first": tiers[0], "tiers": [list(t) for t in dict.fromkeys(tiers)], "keys": states}))
        """,
    )
    assert found["tiers"] == [[name, tier] for name in ("elsewhere", "inductor") for tier in ("first", "inductor")]
    assert found["keys"]["elsewhere"] != found["keys"]["inductor"]


def test_what_is_not_elementwise_runs_compiled_on_device_data_too(trained: tuple[Path, dict[str, Any]]) -> None:
    """Attention, indices, factories, and draws, which PyTorch's dispatcher is asked for by name."""
    found = run(
        trained[0],
        """
        backend = lt.set_backend("elsewhere", wait=True)

        def program(device):
            torch.manual_seed(0)
            x = torch.randn(2, 3, 6, 8).to(device).requires_grad_()
            y = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
            z = nn.functional.dropout(y, 0.25) + torch.arange(8, device=device)
            z = z.index_select(3, torch.tensor([0, 5, 1]).to(device)).clamp(-0.5, 3.5) % 2.5
            z = z + torch.bernoulli(y.sigmoid()).sum() + torch.full((3,), 0.5, device=device)
            z.square().mean().backward()
            return [t.detach().cpu() for t in (y, z, x.grad)]

        pairs = [*zip(program("ltc"), program("cpu"))]
        print(json.dumps({
            "right": [torch.allclose(a, b, atol=1e-5) and a.stride() == b.stride() for a, b in pairs],
            "tiers": [(t.tier, t.reason) for t in backend.graphs],
            "operators": [(t.compiled.operations) for t in backend.graphs],
        }))
        """,
    )
    assert found["right"] == [True, True, True]
    assert found["tiers"] == [["inductor", ""]]


def test_an_operator_of_the_cpu_alone_goes_through_the_host(trained: tuple[Path, dict[str, Any]]) -> None:
    found = run(
        trained[0],
        """
        backend = lt.set_backend("elsewhere", wait=True)

        def program(device):
            torch.manual_seed(0)
            layer, x = nn.LSTM(4, 4).to(device), torch.randn(3, 2, 4).to(device)
            layer(x)[0].square().sum().backward()
            return [p.grad.cpu() for p in layer.parameters()]

        pairs = [*zip(program("ltc"), program("cpu"))]
        print(json.dumps({
            "right": all(torch.allclose(a, b, atol=1e-6) for a, b in pairs),
            "reasons": [t.reason for t in backend.graphs],
        }))
        """,
    )
    assert found["right"]
    assert found["reasons"]
    assert all(reason.endswith("is computed on the CPU") for reason in found["reasons"])
    assert found["log"].count("stays on the first tier: Unsupported: aten::mkldnn_rnn_layer") == len(found["reasons"])


def test_an_error_is_the_users_and_leaves_every_tensor_as_it_was(trained: tuple[Path, dict[str, Any]]) -> None:
    found = run(
        trained[0],
        """
        backend = lt.set_backend("elsewhere", wait=True)
        table, total = torch.arange(8.0).reshape(4, 2).to("ltc"), torch.zeros(2).to("ltc")
        told = []
        for row in (1, 3, 2, 9, 0):
            total.mul_(2).add_(table[torch.tensor([row]).to("ltc")].sum(0))
            try:
                lt.sync()
            except Exception as error:
                told.append([type(error).__name__, *getattr(error, "__notes__", [])])
        lt.set_backend("reference")  # what is on the device is carried over
        print(json.dumps({"told": told, "total": total.tolist(), "table": (table + 0).tolist(),
                          "tiers": [t.tier for t in backend.graphs]}))
        """,
    )
    ((kind, note),) = found["told"]
    assert kind == "IndexError"
    assert "recorded at" in note
    assert found["tiers"][0] == "inductor"
    total = torch.zeros(2)
    for row in (1, 3, 2, 0):
        total = total * 2 + torch.arange(8.0).reshape(4, 2)[row]
    assert found["total"] == total.tolist()
    assert found["table"] == torch.arange(8.0).reshape(4, 2).tolist()


def test_a_machine_without_a_compiler_stays_on_the_first_tier_and_says_so(tmp_path: Path) -> None:
    found = run(
        tmp_path,
        """
        import os
        os.environ["CXX"], os.environ["PATH"] = "", "/nowhere"
        backend = lt.set_backend("elsewhere")
        x = torch.ones(3).to("ltc")
        for _ in range(3):
            x.add_(0.5)
            lt.sync()
        print(json.dumps({"x": x.tolist(), "data": type(state_of(x).data).__name__, "graphs": len(backend.graphs)}))
        """,
    )
    assert found == {"x": [2.5] * 3, "data": "BackendData", "graphs": 0, "log": found["log"]}
    assert "graphs stay on the 'reference' backend" in found["log"]


# --- on CUDA ----------------------------------------------------------------------------------------------------------


def trained_on(device: str) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    data = torch.randn(5, 12, 8)
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        if device == "ltc":
            lt.sync()
        losses.append(loss.detach())
    return [loss.item() for loss in losses], [p.detach().cpu() for p in model.parameters()]


@needs_cuda
@pytest.mark.parametrize("name", ["inductor", "auto", "ts"])
def test_training_on_cuda_has_eager_cudas_losses_and_parameters(name: str) -> None:
    with lt.backend(name, device="cuda") as backend:
        ours = trained_on("ltc")
        assert str(backend.devices()[0]) == "CUDA0"
    theirs = trained_on("cuda")
    assert ours[0] == pytest.approx(theirs[0], abs=1e-5)
    for a, b in zip(ours[1], theirs[1], strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@needs_cuda
def test_code_for_cuda_is_compiled_and_found_again() -> None:
    with lt.backend("inductor", device="cuda", wait=True) as backend:
        ours = trained_on("ltc")
        assert {t.tier for t in backend.graphs} == {"inductor"}  # type: ignore[attr-defined]
        lt.clear_cache()
        again = trained_on("ltc")
        assert {t.seconds for t in backend.graphs[2:]} == {0.0}, "from disk"  # type: ignore[attr-defined]
    assert ours[0] == pytest.approx(trained_on("cuda")[0], abs=1e-5)
    assert again[0] == pytest.approx(ours[0], abs=1e-6)


@needs_cuda
def test_data_stay_on_cuda_from_step_to_step() -> None:
    from lazytensor.trace.storage import state_of

    with lt.backend("inductor", device="cuda", wait=True):
        x = torch.ones(3).to("ltc")
        for _ in range(3):
            x.mul_(2)
            lt.sync()
            assert state_of(x).data.value.is_cuda
        assert x.tolist() == [8.0] * 3
