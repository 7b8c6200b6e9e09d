"""Profiling, benchmarking, testing, compiling, and the device functions people call."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest
import torch
from support import bits, same

import lazytensor as lt
from lazytensor import errors
from lazytensor.execute import cut


def test_the_profiler_shows_the_ops() -> None:
    x = torch.randn(8, 8).to("ltc")
    with torch.profiler.profile(record_shapes=True) as profile:
        with torch.profiler.record_function("my block"):
            y = (x @ x).relu()
        y.cpu()
    names = {event.key for event in profile.key_averages()}
    assert {"aten::mm", "aten::relu", "my block"} <= names
    assert "aten::mm" in profile.key_averages().table(row_limit=50)


def test_the_profiler_with_the_devices_activity_and_a_schedule() -> None:
    seen = []
    with torch.profiler.profile(
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1),
        on_trace_ready=lambda p: seen.append({e.key for e in p.key_averages()}),
    ) as profile:
        for _ in range(2):
            torch.ones(3, device="ltc").exp().sum().item()
            profile.step()
    assert "aten::exp" in seen[0]


def test_benchmark_waits_for_the_device() -> None:
    import torch.utils.benchmark as benchmark

    x = torch.randn(4, 4).to("ltc")
    before = cut.hits + cut.misses
    measured = benchmark.Timer("y = x @ x", globals={"x": x}).timeit(3)
    assert measured.mean > 0
    assert cut.hits + cut.misses > before


def test_assert_close() -> None:
    x = torch.randn(3)
    torch.testing.assert_close(x.to("ltc"), x.to("ltc") + 0)
    torch.testing.assert_close(x.to("ltc"), x, check_device=False)
    with pytest.raises(AssertionError, match="The values for attribute 'device' do not match"):
        torch.testing.assert_close(x.to("ltc"), x)
    with pytest.raises(AssertionError, match=r"Mismatched elements: 3 / 3"):
        torch.testing.assert_close(x.to("ltc"), x.to("ltc") + 1)


def test_accelerator_functions() -> None:
    accelerator = torch.accelerator
    assert accelerator.is_available()
    assert accelerator.current_accelerator() == torch.device("ltc")
    assert accelerator.device_count() == lt.settings.devices
    assert accelerator.current_device_index() == 0
    x = torch.ones(3, device="ltc") + 1
    before = cut.hits + cut.misses
    accelerator.synchronize()
    assert cut.hits + cut.misses == before + 1
    assert x.tolist() == [2, 2, 2]
    accelerator.empty_cache()
    free, total = accelerator.get_memory_info()
    assert 0 < free < total
    assert torch.float32 in accelerator.get_device_capability()["supported_dtypes"]
    assert torch.get_device_module("ltc") is torch.get_device_module() is torch.ltc


@pytest.mark.parametrize("module", ["accelerator", "ltc"])
def test_memory_figures(module: str) -> None:
    functions: Any = getattr(torch, module)
    reset, allocated, most = (
        functions.reset_peak_memory_stats,
        functions.memory_allocated,
        functions.max_memory_allocated,
    )
    lt.sync()
    gc.collect()
    before = allocated()
    x = torch.ones(1000, device="ltc")
    assert allocated() == before, "what is pending holds nothing"
    lt.sync()
    assert allocated() == before + 4000
    reset()
    y = x.double()
    lt.sync()
    assert allocated() == before + 12000
    del y
    assert allocated() == before + 4000
    assert most() >= before + 12000
    reset()
    assert most() == before + 4000
    assert functions.memory_stats()["allocated_bytes.all.current"] == before + 4000
    assert functions.memory_reserved() >= before + 4000


def test_seeds() -> None:
    torch.ltc.manual_seed_all(3)  # type: ignore[attr-defined]
    a = torch.rand(3, device="ltc")
    torch.manual_seed(3)
    b = torch.rand(3)
    assert bits(a) == bits(b)
    state = torch.ltc.get_rng_state()  # type: ignore[attr-defined]
    c = torch.rand(3, device="ltc")
    torch.ltc.set_rng_state(state)  # type: ignore[attr-defined]
    assert bits(torch.rand(3, device="ltc")) == bits(c)
    with torch.random.fork_rng(devices=[0], device_type="ltc"):
        torch.rand(9, device="ltc")
    torch.ltc.set_rng_state_all([state, state])  # type: ignore[attr-defined]
    assert bits(torch.rand(3, device="ltc")) == bits(c)


def test_generators() -> None:
    def program(device: str) -> Any:
        generator = torch.Generator(device=device)
        generator.manual_seed(5)
        a = torch.rand(3, generator=generator, device=device)
        state = generator.get_state()
        b = torch.empty(3, device=device).normal_(generator=generator)
        generator.set_state(state)
        c = torch.empty(3, device=device).normal_(generator=generator)
        d = torch.randperm(4, generator=generator, device=device)
        e = torch.multinomial(torch.ones(5, device=device), 2, generator=generator)
        seed = generator.initial_seed()
        other = torch.rand(2, device=device)  # the default generator was not touched
        return a, b, c, d, e, seed, other

    same(program)
    assert torch.Generator(device="ltc").device == torch.device("ltc:0")
    assert isinstance(torch.Generator(device="ltc"), torch.Generator)
    assert isinstance(torch.default_generator, torch.Generator)
    assert torch.Generator().device.type == "cpu"
    assert torch.rand(2, generator=torch.Generator().manual_seed(1), device="ltc").device.type == "ltc"
    with pytest.raises(errors.NoSuchDevice):
        torch.Generator(device="ltc:9")


def test_numpy_gives_pytorchs_message() -> None:
    x = torch.ones(2, device="ltc")
    message = (
        r"can't convert ltc:0 device type tensor to numpy. Use Tensor.cpu\(\) to copy the tensor to host memory first"
    )
    for convert in (x.numpy, lambda: np.asarray(x)):
        with pytest.raises(TypeError, match=message):
            convert()
    assert np.asarray(x.cpu()).tolist() == [1, 1]
    assert x.tolist() == [1, 1]


def test_dlpack_is_refused() -> None:
    x = torch.ones(2, device="ltc")
    for export in (x.__dlpack__, lambda: torch.utils.dlpack.to_dlpack(x), lambda: torch.to_dlpack(x)):
        with pytest.raises(BufferError, match=r"Use Tensor.cpu\(\)"):
            export()
    for take in (torch.from_dlpack, np.from_dlpack):
        with pytest.raises((ValueError, BufferError)):
            take(x)
    assert torch.from_dlpack(x.cpu()).tolist() == [1, 1]


def test_a_compiled_function_is_recorded() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        y = x.sin() + 1
        return y * 2 if y.shape[0] == 3 else y

    x = torch.randn(3)
    ours, theirs = x.to("ltc").requires_grad_(), x.clone().requires_grad_()
    try:
        y = torch.compile(function)(ours)
        y.sum().backward()
    finally:
        torch._dynamo.reset()
    expected = function(theirs)
    expected.sum().backward()
    assert bits(y) == bits(expected)
    assert bits(ours.grad) == bits(theirs.grad)  # type: ignore[arg-type]


def test_the_default_device() -> None:
    with torch.device("ltc"):
        x = torch.ones(2)
        layer = torch.nn.Linear(2, 2)
    assert x.device == layer.weight.device == torch.device("ltc:0")
    torch.set_default_device("ltc")
    try:
        assert (torch.arange(3) + torch.zeros(3)).device.type == "ltc"
    finally:
        torch.set_default_device(None)


def test_the_current_device() -> None:
    if lt.settings.devices < 2:
        pytest.skip("there is only one device")
    ltc: Any = torch.ltc  # type: ignore[attr-defined]
    with ltc.device(1):
        assert ltc.current_device() == torch.accelerator.current_device_index() == 1
        assert torch.ones(2, device="ltc").device.index == 1
        assert torch.ones(2).to("ltc").device.index == 1
        assert torch.ones(2).ltc().device.index == 1  # type: ignore[attr-defined]
        assert torch.nn.Linear(2, 2).to("ltc").weight.device.index == 1
        assert torch.ones(2, device="ltc:0").device.index == 0
        with torch.accelerator.device_index(0):
            assert torch.tensor([1.0], device="ltc").device.index == 0
        assert torch.tensor([1.0], device="ltc").device.index == 1
    assert torch.ones(2, device="ltc").device.index == 0
    torch.accelerator.set_device_index(1)
    elsewhere: list[int] = []
    thread = threading.Thread(target=lambda: elsewhere.append(ltc.current_device()))
    thread.start()
    thread.join()
    assert elsewhere == [0], "each thread has its own"
    ltc.set_device("ltc:0")
    assert torch.ones(2, device="ltc").device.index == 0
    with ltc.device_of(torch.ones(1, device="ltc:1")):
        assert ltc.current_device() == 1
    with pytest.raises(errors.NoSuchDevice):
        ltc.set_device(99)
    assert ltc.get_device_properties(0).total_memory > 0
    assert "ltc:1" in ltc.get_device_name(1)
