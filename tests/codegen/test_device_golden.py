"""The device's own kernels: regenerating them changes nothing, and every op of the installed torch has an answer.

After a wanted change, `LAZYTENSOR_UPDATE_GOLDEN=1 pytest tests/codegen/test_device_golden.py` writes the golden files.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from pathlib import Path

import pytest
import torch

from lazytensor.codegen.backend_yaml import ParsedExternalYaml, parse_backend_yaml
from lazytensor.codegen.generate import SOURCE, device_kernels
from lazytensor.codegen.kernels import Kernel
from lazytensor.codegen.natives import load_native_functions
from lazytensor.device.kernels import KERNELS

GOLDEN = Path(__file__).parent / "golden"
UPDATE = bool(os.environ.get("LAZYTENSOR_UPDATE_GOLDEN"))
VERSION = torch.__version__.partition("+")[0]
# Kept whole, so that a change of the generator shows as a diff of what it writes.
SAMPLES = (
    *("add.Tensor", "add_.Tensor", "add.out", "t", "split.Tensor", "topk", "cat", "native_layer_norm", "arange"),
    *("ones_like", "_foreach_add_.List", "index_put", "uniform_", "nonzero", "_fused_adam_", "linalg_eigvals.out"),
)


@pytest.fixture(scope="module")
def parsed() -> ParsedExternalYaml:
    return parse_backend_yaml(SOURCE)


@pytest.fixture(scope="module")
def kernels(parsed: ParsedExternalYaml) -> dict[str, Kernel]:
    return {kernel.name: kernel for kernel in device_kernels(parsed)[0]}


def summary(kernels: dict[str, Kernel]) -> str:
    """One line for each op: its kind and a hash of its source."""
    rows = {
        name: f"{kernel.kind.name} {hashlib.sha256(kernel.source().encode()).hexdigest()[:10]}"
        for name, kernel in sorted(kernels.items())
    }
    return json.dumps({"torch": VERSION, "kernels": rows}, indent=0) + "\n"


def compare(name: str, text: str) -> None:
    path = GOLDEN / name
    if UPDATE:
        path.write_text(text)
    before = path.read_text()
    diff = list(difflib.unified_diff(before.split("\n"), text.split("\n"), "golden", "generated now", "", "", 2, ""))
    assert not diff, f"{name} has changed; if that is wanted, set LAZYTENSOR_UPDATE_GOLDEN=1\n" + "\n".join(diff[:200])


def needs_golden_torch() -> None:
    golden = GOLDEN / "device.json"
    if not UPDATE and json.loads(golden.read_text())["torch"] != VERSION:
        pytest.skip(f"the golden files were made with another torch than {VERSION}")


def test_regenerating_sample_kernels_changes_nothing(kernels: dict[str, Kernel]) -> None:
    needs_golden_torch()
    compare("kernels.txt", "\n\n".join(kernels[name].source() for name in SAMPLES))


def test_regenerating_the_device_changes_nothing(kernels: dict[str, Kernel]) -> None:
    needs_golden_torch()
    compare("device.json", summary(kernels))


def test_kernels_with_a_lock_do_the_same_inside_it(kernels: dict[str, Kernel]) -> None:
    for kernel in kernels.values():
        assert "    with lock:\n" in kernel.source(locked=True)
        inner = [line.strip() for line in kernel.source(locked=True).split("\n") if line.strip() != "with lock:"]
        assert inner == [line.strip() for line in kernel.source().split("\n")]


def test_every_schema_has_a_kernel_a_decomposition_or_a_reason(parsed: ParsedExternalYaml) -> None:
    by_hand = {str(op) for op in parsed.supported}
    generated = {str(op) for op in parsed.full_codegen}
    reasons = {str(op): reason for op, reason in parsed.exclusions.items()}
    without = []
    for name, function in load_native_functions().by_text.items():
        if name in by_hand or name in generated or reasons.get(name):
            continue
        if not function.has_composite_implicit_autograd_kernel:
            without.append(name)
    assert without == [], f"{len(without)} ops have neither kernel, nor decomposition, nor a stated reason"
    assert not generated & by_hand
    assert not (generated | by_hand) & reasons.keys()


def test_what_the_dispatcher_has_beside_torchs_yaml_is_for_other_tensors() -> None:
    """Ops that are defined in C++ alone, without a schema in native_functions.yaml: their tensors are quantized."""
    known = load_native_functions().by_text
    names = [n.removeprefix("aten::") for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    beside = {
        name.partition(".")[0]
        for name in names
        if name not in known
        and not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
    }
    assert beside <= {"quantized_lstm", "quantized_gru"}


def test_every_kernel_by_hand_is_written_and_none_is_forgotten_in_the_yaml(parsed: ParsedExternalYaml) -> None:
    assert {str(op) for op in parsed.supported} == set(KERNELS)


def test_every_reason_is_a_sentence(parsed: ParsedExternalYaml) -> None:
    assert all(len(reason.split()) >= 3 for reason in parsed.exclusions.values())
