"""Graphs move from the first tier to compiled code, survive a restart on disk, and keep eager's results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import diskcache
from lazytensor.backend.inductor.build import no_compiler
from lazytensor.backend.inductor.tiers import Tiered

pytestmark = pytest.mark.skipif(no_compiler() is not None, reason="TorchInductor needs a C++ compiler")

PROGRAM = """
import json, sys, torch, lazytensor as lt
from torch import nn
from lazytensor.trace import shapes
lt.set_backend("inductor", wait=True)
asked, infer = [], shapes.infer
shapes.infer = lambda op, args: asked.append(op.name) or infer(op, args)

def train(device, steps=6):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    data = torch.randn(steps, 12, 8)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = model(batch.to(device)).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        if device == "ltc":
            lt.sync()
        losses.append(loss.detach())
    return [l.item() for l in losses], [p.detach().cpu() for p in model.parameters()]

ours, theirs = train("ltc"), train("cpu")
tiers = [(t.state, t.tier, t.runs, t.graph.replaces != {}) for t in lt.current_backend().graphs]
from lazytensor.backend.inductor.service import service
print(json.dumps({
    "losses": max(abs(a - b) for a, b in zip(ours[0], theirs[0])),
    "parameters": max((a - b).abs().max().item() for a, b in zip(ours[1], theirs[1])),
    "tiers": tiers,
    "first_tiers": sum(t._first is not None for t in lt.current_backend().graphs),
    "compiler_started": service._process is not None,
    "asked": asked,
}))
"""


def run(cache: Path, program: str = PROGRAM, **environment: str) -> dict:
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env=os.environ | {"LAZYTENSOR_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"} | environment,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result.stdout.strip().splitlines()[-1])
    found["log"] = result.stderr
    return found


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    cache = tmp_path_factory.mktemp("cache")
    return cache, run(cache)


@pytest.fixture(scope="module")
def restarted(trained: tuple[Path, dict]) -> dict:
    return run(trained[0])


def test_a_compiled_training_step_has_eagers_losses_and_parameters(trained: tuple[Path, dict]) -> None:
    _, found = trained
    assert found["losses"] < 1e-6
    assert found["parameters"] < 1e-5
    assert all(state == "ready" for state, *_ in found["tiers"])


def test_a_learning_rate_schedule_compiles_no_graph_again(trained: tuple[Path, dict]) -> None:
    assert len(trained[1]["tiers"]) == 2, "one graph with fresh optimizer state, one for every later step"


def test_parameters_are_updated_in_their_own_memory(trained: tuple[Path, dict]) -> None:
    assert trained[1]["tiers"][-1][3]


def test_a_restarted_program_starts_compiled_and_starts_no_compiler(
    trained: tuple[Path, dict], restarted: dict
) -> None:
    _, first = trained
    assert first["compiler_started"]
    assert not restarted["compiler_started"]
    assert [t[:2] for t in restarted["tiers"]] == [["ready", "inductor"]] * len(first["tiers"])
    assert restarted["losses"] == first["losses"]


def test_a_restarted_program_asks_about_no_operation_of_a_step_again(
    trained: tuple[Path, dict], restarted: dict
) -> None:
    assert len(trained[1]["asked"]) > 20
    assert len(restarted["asked"]) <= 3, restarted["asked"]  # those after the last graph was compiled


def test_no_code_of_the_first_tier_is_kept_beside_compiled_code(trained: tuple[Path, dict], restarted: dict) -> None:
    assert trained[1]["first_tiers"] == restarted["first_tiers"] == 0


def test_a_tampered_entry_is_ignored_with_one_line_and_compiled_again(
    trained: tuple[Path, dict], tmp_path: Path
) -> None:
    import shutil

    cache = tmp_path / "cache"
    shutil.copytree(trained[0], cache)
    source = next((cache / "graphs").glob("*/graph.cpp"))
    with open(source, "a") as file:
        file.write("# changed\n")
    found = run(cache)
    assert found["log"].count("is ignored: graph.cpp was changed") == 1
    assert found["compiler_started"]
    assert found["losses"] < 1e-6


def test_a_failed_compilation_is_reported_once_and_the_program_goes_on(tmp_path: Path) -> None:
    program = PROGRAM.replace(
        "import json, sys,",
        "import os; os.environ['CXX'] = '/bin/false'; os.environ['PATH'] = '/bin:/usr/bin'\nimport json, sys,",
    )
    found = run(tmp_path, program)
    assert {t[0] for t in found["tiers"]} == {"stays"}
    assert found["log"].count("stays on the first tier") == len(found["tiers"])
    assert found["losses"] < 1e-6


@pytest.mark.skipif(not lt.settings.compiled_recorder, reason="LAZYTENSOR_COMPILED_RECORDER=0")
def test_what_passed_its_checks_is_trusted_by_the_next_that_finds_it_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Tiered] = []
    run_and_look = Tiered._run
    monkeypatch.setattr(Tiered, "_run", lambda self, *args: (looked_at.append(self), run_and_look(self, *args))[1])

    def program(device: str) -> list[object]:
        rows: list[object] = []
        x = torch.arange(6.0).reshape(2, 3).to(device)
        for _ in range(3):
            x.mul_(2).add_(1)
            y = x.t().contiguous().t()
            lt.sync(wait=True)
            rows += [x.tolist(), y.tolist(), y.stride()]
        return rows

    def looks() -> int:
        """How many runs Python has looked at, of a program that knows nothing yet but what is on disk."""
        lt.clear_cache()
        looked_at.clear()
        assert program("ltc") == program("cpu")
        return len(looked_at)

    with lt.backend("inductor", wait=True):
        looks()
        tiered = lt.current_backend().graphs[-1]  # type: ignore[attr-defined]
        if tiered.passed_before is None:
            pytest.skip("the compiled runner has not been built")
        key = tiered.key
        assert looks() == 0
        for broken in ('{"copied": [99]}', '{"copied": [0.5]}', '{"copied": "0"}', "[", "2", ""):
            diskcache.note(key, broken)
            assert looks() == 1, broken
            assert looks() == 0, "what was looked at is kept"


NUMBERS = """
import json, torch, lazytensor as lt
lt.set_backend("inductor", wait=True)

def program(device):
    made = []
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.bool, torch.complex64):
        for shape in ((), (3,)):
            x = torch.ones(shape, dtype=dtype).to(device)
            made += [x + 0.1, x * 2, x * torch.tensor(2.0).to(device) + 1.5]
    return [t.cpu() for t in made]

pairs = list(zip(program("ltc"), program("cpu")))
print(json.dumps({
    "dtypes": all(a.dtype is b.dtype for a, b in pairs),
    "values": all(torch.allclose(a.to(torch.complex64), b.to(torch.complex64), rtol=1e-2) for a, b in pairs),
    "tiers": [t.state for t in lt.current_backend().graphs],
}))
"""


AS_EAGER = """
import json, torch, lazytensor as lt
lt.set_backend("inductor", wait=True)

def bytes_(x):
    y = x.to(torch.uint8)
    y.add_(3 + y.any(0).square())
    return [y, x.to(torch.uint8).all()]

def rest(x):
    return [x % float("inf"), x % -1.5, torch.remainder(5.0, x), x.int() % 3]

def reinterpreted(x):
    y = x.logsumexp(-1)
    y.view(torch.int32).relu_()
    return [y]

def nothing(x):
    return [torch.full([2, 3, 0], 7, device=x.device) + 1]

def masked(x):
    y = x * 1
    mask = y > 0
    lt.sync()
    bool((x == 0).any())
    return [y[mask]]

def places_changed(x):
    a, b = x * 1, x * 2
    c, d = (t.expand(3, 3).contiguous() for t in (a, b))
    for _ in range(3):
        lt.sync()
        a_before, c_before = a.clone(), c.t().clone()
        a.copy_(b)
        b.copy_(a_before)
        c.copy_(d.t().contiguous())
        d.copy_(c_before)
    return [a, b, c, d]

def program(function, device):
    return [(t.cpu(), t.stride()) for t in function(torch.tensor([-2.5, 1.0, 4.0]).to(device))]

answer = {}
for function in (bytes_, rest, reinterpreted, nothing, masked, places_changed):
    pairs = list(zip(program(function, "ltc"), program(function, "cpu")))
    answer[function.__name__] = all(
        torch.allclose(a, b, equal_nan=True) and a.dtype is b.dtype and s == r for (a, s), (b, r) in pairs
    )
answer["tiers"] = sorted({t.state for t in lt.current_backend().graphs})
print(json.dumps(answer))
"""


def test_what_inductor_computes_otherwise_is_computed_as_in_eager(tmp_path: Path) -> None:
    found = run(tmp_path, AS_EAGER)
    assert "reinterpreted numbers by explicit geometry" in found.pop("log")
    right = dict.fromkeys(("bytes_", "rest", "reinterpreted", "nothing", "masked", "places_changed"), True)
    assert found == right | {"tiers": ["ready", "stays"]}


def test_numbers_promote_in_compiled_code_as_in_eager(tmp_path: Path) -> None:
    found = run(tmp_path, NUMBERS)
    assert found["dtypes"]
    assert found["values"]
    assert found["tiers"] == ["ready"]


GELU = """
import json, torch, lazytensor as lt
lt.set_backend("inductor", wait=True)

def slope(device):
    torch.manual_seed(0)
    x = torch.randn(64, 64).to(device).requires_grad_()
    y = x
    for _ in range(2):
        y = y + torch.nn.functional.gelu(torch.nn.functional.layer_norm(y, (64,)))
    y.square().mean().backward()
    return x.grad.cpu()

print(json.dumps({"difference": (slope("ltc") - slope("cpu")).abs().max().item()}))
"""


def test_what_a_costly_function_gave_is_kept_for_its_other_uses(tmp_path: Path) -> None:
    assert run(tmp_path, GELU)["difference"] < 1e-5
    (source,) = (tmp_path / "graphs").glob("*/graph.cpp")
    assert source.read_text().count(".erf()") <= 3, "five where each use computes its own"
