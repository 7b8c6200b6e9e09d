"""The compiled recorder does what the Python kernels do: the same values for the same calls, the rest left to them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from support import subprocess_run

import lazytensor as lt
from lazytensor import native
from lazytensor.backend import compiler
from lazytensor.backend.contract import Failure
from lazytensor.device import recorder
from lazytensor.device.registration import generated_kernels
from lazytensor.execute import cut
from lazytensor.inspect import names
from lazytensor.native import build
from lazytensor.trace import storage

needs_it = pytest.mark.skipif(
    compiler.find() is None or not lt.settings.compiled_recorder,
    reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
)


@pytest.fixture
def compiled() -> Iterator[Any]:
    """The extension, taking calls, whether or not an earlier test of this process started a second thread."""
    assert recorder.module is not None, "the tests' configuration builds it before lazytensor is imported"
    before = recorder.module.enable(True)
    yield recorder.module
    recorder.module.enable(before)


def tensors() -> dict[str, torch.Tensor]:
    """Fresh arguments, the same at every call."""
    made = {
        "x": torch.arange(1.0, 13.0).reshape(3, 4),
        "y": torch.arange(2.0, 14.0).reshape(3, 4),
        "i": torch.arange(12).reshape(3, 4),
        "w": torch.linspace(-1, 1, 20).reshape(5, 4),
        "image": torch.arange(32.0).reshape(1, 2, 4, 4),
    }
    return {name: tensor.to("ltc") for name, tensor in made.items()}


# One call for each kind of argument and result that a schema can have.
CALLS: dict[str, Callable[..., Any]] = {
    "one tensor": lambda x, **_: x.sin(),
    "two tensors": lambda x, y, **_: x + y,
    "a default number": lambda x, y, **_: torch.sub(x, y),
    "a number": lambda x, y, **_: torch.sub(x, y, alpha=3),
    "a number beside a tensor": lambda x, **_: x * 2.5,
    "an integer beside a tensor": lambda i, **_: i * 2,
    "a truth value beside a tensor": lambda i, **_: i * True,
    "a complex number beside a tensor": lambda x, **_: x * 2j,
    "a number that is not last": lambda x, **_: torch.nn.functional.elu(x, 1.0, False),
    "bounds, one of them none": lambda x, **_: x.clamp(max=5.0),
    "integers": lambda x, **_: x.sum((0,), keepdim=True),
    "a dtype": lambda i, **_: i.sum(dtype=torch.float64),
    "a memory format": lambda image, **_: image.contiguous(memory_format=torch.channels_last),
    "a layout that is not contiguous": lambda image, **_: image.contiguous(memory_format=torch.channels_last) + 1,
    "a string": lambda x, **_: torch.nn.functional.gelu(x, approximate="tanh"),
    "like another": lambda x, **_: torch.zeros_like(x),
    "new from another": lambda x, **_: x.new_ones((2, 2)),
    "an optional tensor": lambda x, w, **_: torch.nn.functional.linear(x, w),
    "lists of integers": lambda image, **_: torch.nn.functional.max_pool2d(image, 2),
    "several results": lambda x, **_: x.max(1),
    "a result that is none": lambda x, y, **_: torch.ops.aten.native_layer_norm_backward(
        x, y, [4], y.mean(1, keepdim=True), y.std(1, keepdim=True), None, None, [True, False, False]
    )[0],
    "a list of tensors": lambda x, y, **_: torch.cat([x, y]),
    "tensors and nones": lambda x, i, **_: x[:, i[0, :2]],
    "a list of results": lambda x, y, **_: torch._foreach_add([x, y], 1.0),
    "numbers in a list": lambda x, y, **_: torch._foreach_mul([x, y], [2.0, 3.0]),
    "in place": lambda x, y, **_: x.add_(y),
    "in place, twice": lambda x, y, **_: x.add_(y).mul_(2.0),
    "in place through a view": lambda x, **_: (x[0].add_(1), x)[1],
    "lists in place": lambda x, y, **_: (torch._foreach_mul_([x, y], 2.0), x, y)[1:],
    "a view": lambda x, **_: x.t(),
    "a view of a view": lambda x, **_: x.t()[1:].unsqueeze(0),
    "a view as it was": lambda x, **_: x.t().t(),
    "a view of other numbers": lambda x, **_: x.view(torch.int32),
    "a list of views": lambda x, **_: x.split(2),
    "a conjugate": lambda x, **_: torch.complex(x, x).conj() * 2,
    "a part of a conjugate": lambda x, **_: torch.complex(x, x).conj().imag,
    "an alias that PyTorch makes itself": lambda x, y, **_: x.detach() + y.data,
    "an alias of a view": lambda x, y, **_: x.t().detach() + y.t().data,
    "nothing in it": lambda x, **_: x[:0] * 2,
    "no dimensions": lambda x, **_: x.sum() * x,
    "another device": lambda x, **_: x.to("ltc:1") + 1,
    "a number on the CPU": lambda x, **_: x + torch.tensor(3.0),
}


def values_of(result: Any) -> list[Any]:
    return [storage.value_of(t) for t in (result if isinstance(result, tuple | list) else [result])]


def data_of(result: Any) -> list[Any]:
    results = result if isinstance(result, tuple | list) else [result]
    return [(t.cpu(), t.stride(), t.dtype, t._version) for t in results]


@needs_it
@pytest.mark.parametrize("name", CALLS)
def test_it_records_what_the_python_kernels_record(compiled: Any, name: str) -> None:
    seen = []
    for on in (False, True, True):
        compiled.enable(on)
        arguments = tensors()
        lt.sync()
        result = CALLS[name](**arguments)
        values = values_of(result)
        storage.flush_numbers()
        seen.append((values, list(storage.numbers), len(storage.leaf_data), data_of(result)))
    first = seen[0]
    for values, numbers, leaves, data in seen[1:]:
        assert all(a is b for a, b in zip(values, first[0], strict=True)), "the nodes differ"
        assert (numbers, leaves) == first[1:3]
        for (a, *about), (b, *expected) in zip(data, first[3], strict=True):
            assert torch.equal(a, b)
            assert about == expected


def python_kernels_called(call: Callable[[], Any]) -> list[str]:
    """The Python kernels that run when this does."""
    codes = {kernel.__code__: name for name, kernel in generated_kernels.items()}
    called = []

    def note(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code in codes:
            called.append(codes[frame.f_code])

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return called


@needs_it
def test_a_known_training_step_reaches_no_python_kernel(compiled: Any) -> None:
    torch.manual_seed(0)
    layers = (torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 2))
    model = torch.nn.Sequential(*layers).to("ltc")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 4).to("ltc"), torch.tensor([0, 1, 0, 1, 1, 0]).to("ltc")

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        lt.sync()

    for _ in range(3):
        step()
    assert python_kernels_called(step) == []
    compiled.enable(False)
    assert len(python_kernels_called(step)) > 20


@needs_it
def test_a_new_structure_is_left_to_the_python_kernel(compiled: Any) -> None:
    x = torch.ones(3, 7, 11).to("ltc")
    assert python_kernels_called(lambda: x.cosh()) == ["cosh"]
    assert python_kernels_called(lambda: x.cosh()) == []


@needs_it
def test_an_error_is_the_same(compiled: Any) -> None:
    x, y = torch.ones(3).to("ltc"), torch.ones(4).to("ltc")
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"The size of tensor a \(3\) must match the size of tensor b \(4\)"):
            x + y


@needs_it
def test_numbers_of_a_call_that_is_left_are_lifted_once(compiled: Any) -> None:
    x = torch.ones(5, 3).to("ltc")
    lt.sync()
    x.add(torch.ones(5, 3).to("ltc:0"), alpha=7)
    assert storage.numbers == [7]


RUN = """
import torch, lazytensor as lt
from lazytensor.device import recorder
{before}
torch.manual_seed(0)
model = torch.nn.Linear(3, 2).to("ltc")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(4, 3).to("ltc")
for _ in range(4):
    optimizer.zero_grad()
    loss = model(x).square().sum()
    loss.backward()
    optimizer.step()
    lt.sync()
print(recorder.in_use(), loss.item().hex())
"""


def run(environment: dict[str, str], before: str = "") -> tuple[list[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN.format(before=before)],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split(), done.stderr


@needs_it
def test_a_program_runs_the_same_with_it_without_it_and_when_it_is_turned_off(tmp_path: Path) -> None:
    with_it, _ = run({})
    without, _ = run({"LAZYTENSOR_CACHE_DIR": str(tmp_path)})
    off, _ = run({"LAZYTENSOR_COMPILED_RECORDER": "0"})
    assert [with_it[0], without[0], off[0]] == ["True", "False", "False"]
    assert with_it[1] == without[1] == off[1]


@needs_it
def test_a_damaged_one_is_ignored_with_one_line(tmp_path: Path) -> None:
    entry = tmp_path / "graphs" / native.key()
    entry.mkdir(parents=True)
    (entry / native.LIBRARY).write_bytes((build.build() / native.LIBRARY).read_bytes()[:1000])
    output, complaint = run({"LAZYTENSOR_CACHE_DIR": str(tmp_path)})
    assert output[0] == "False"
    assert complaint.count("is ignored") == 1


@needs_it
def test_with_a_second_thread_the_kernels_with_the_lock_record() -> None:
    before = "import threading; thread = threading.Thread(target=print); thread.start(); thread.join()"
    known, _ = run({})
    threaded, _ = run({}, before)
    assert [known[0], *threaded[-2:]] == ["True", "False", known[1]]


def test_without_a_compiler_building_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(RuntimeError, match="no C\\+\\+ compiler was found"):
        build.command(tmp_path / "recorder.so")


def test_random_programs_agree_with_the_python_kernels_too() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lazytensor_cli", "fuzz", "--programs", "60", "--seed", "77000", "--json"],
        env=os.environ | {"LAZYTENSOR_COMPILED_RECORDER": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs_it
def test_a_cut_collects_and_forgets_what_python_does(compiled: Any) -> None:
    lt.wait()
    kept = tensors()
    kept["written"] = kept["x"].add_(1)
    kept["view"] = kept["w"][1:]
    kept["part"] = kept["view"].t()
    kept["new"] = kept["part"] @ kept["view"]
    kept["y"].sin()  # nobody holds it
    for tensor in kept.values():
        storage.state_of(tensor)  # the views are made known to Python
    storage.adopt()
    storage.sweep()
    ours, theirs = compiled.collect(), cut.collect()
    assert ours == theirs and len(ours[0]) >= 2 and len(ours[1]) >= 2
    assert all(a is b for mine, other in zip(ours, theirs, strict=True) for a, b in zip(mine, other, strict=True))
    del ours, theirs
    lt.sync(wait=True)
    assert not (storage.live or storage.leaf_data or storage.leaf_states or storage.numbers or storage.effects)
    assert all(storage.state_of(t).value is None for t in kept.values())
    assert storage.state_of(kept["x"]).number is None
    torch.testing.assert_close(kept["new"].cpu(), kept["w"].cpu()[1:].t() @ kept["w"].cpu()[1:])


@needs_it
@pytest.mark.parametrize("kind", [list, tuple])
def test_results_are_given_out_unless_one_is_a_failure(compiled: Any, kind: type) -> None:
    lt.wait()
    x = torch.ones(3, device="ltc") + 1
    y = x * 2
    storage.adopt()
    storage.sweep()
    states, _, values, _ = compiled.collect()
    failure = Failure(RuntimeError("no"), values[0].node)
    made = [torch.full((3,), 2.0), torch.full((3,), 4.0)]
    assert len(states) == 2 and not compiled.install_results(states, kind([made[0], failure]))
    assert not compiled.install_results(states, kind(made[:1]))
    assert [state.value for state in states] == values, "nothing was done"
    assert compiled.install_results(states, kind(made))
    assert [state.data for state in states] == made and states[0].value is None
    cut.renumber([])
    assert y.tolist() == [4, 4, 4]


@needs_it
def test_reading_a_number_does_not_enter_the_python_kernel() -> None:
    """In a process of its own: where a second thread was started, the Python kernels, which take a lock, read."""
    done = subprocess_run("""
        import sys, torch, lazytensor
        x = torch.tensor([3.5, -2.0]).to("ltc")
        z = torch.tensor([1 + 2j]).to("ltc")
        called = []
        sys.setprofile(lambda frame, event, argument: event == "call" and called.append(frame.f_code.co_name))
        read = [x.sum().item(), (x > 0)[0].item(), x.to(torch.int64)[1].item(), z.conj()[0].item(), float(x[0])]
        sys.setprofile(None)
        print(read, called.count("data_of"), called.count("local_scalar_dense"))
        try:
            x.item()
        except RuntimeError as error:
            print(error)
    """)
    assert done.returncode == 0, done.stderr[-3000:]
    read, refused = done.stdout.splitlines()
    assert read == "[1.5, True, -2, (1-2j), 3.5] 5 0"
    assert "a Tensor with 2 elements cannot be converted to Scalar" in refused


DTYPES = (None, torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16)
DTYPES += (torch.bfloat16, torch.float32, torch.float64, torch.complex64)
FORMATS = (torch.contiguous_format, torch.preserve_format, torch.channels_last)


@needs_it
@pytest.mark.parametrize("first", range(len(DTYPES)))
def test_every_choice_of_dtype_and_layout_is_a_call_of_its_own(compiled: Any, first: int) -> None:
    """Whichever comes first: ``zeros_like(x, dtype=torch.int8)`` once gave the float32 of ``zeros_like(x)``."""
    x, image = torch.ones(3, device="ltc"), torch.ones(1, 2, 3, 3, device="ltc")
    dtypes = DTYPES[first:] + DTYPES[:first]
    for _ in range(3):
        for dtype in dtypes:
            assert torch.zeros_like(x, dtype=dtype).dtype == (dtype or torch.float32)
            assert torch.sum(x, dtype=dtype).dtype == (dtype or torch.float32)
            assert torch.ones_like(x, dtype=dtype).dtype == (dtype or torch.float32)
        for form in FORMATS[first % 3 :] + FORMATS[: first % 3]:
            assert image.clone(memory_format=form).stride() == torch.ones(1, 2, 3, 3).clone(memory_format=form).stride()
            assert torch.empty_like(image).stride() == (18, 9, 3, 1)
        lt.sync()


@needs_it
def test_states_behind_objects_are_found_as_in_python(compiled: Any) -> None:
    x = torch.ones(3, 4).to("ltc")
    objects = (x, x[1:], torch.ones(2), 3, None, x.to_sparse(), torch.nn.Parameter(x), torch.empty(0, device="ltc"))
    lt.sync()
    assert names.states_in(objects) == names._states_in(objects)
    assert names.states_in(objects)[0] is storage.state_of(x)
