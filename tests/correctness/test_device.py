"""The device: factories, moves, device numbers, CPU scalars, and the errors of mixing devices."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch
from support import bits, same, subprocess_run
from torch import nn

import lazytensor as lt

FACTORIES = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, dtype=torch.int16, device=d),
    "full": lambda d: torch.full((2,), 1.5, device=d),
    "full_int": lambda d: torch.full((2,), 7, device=d),
    "full_bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange_float": lambda d: torch.arange(0, 1, 0.25, device=d),
    "range": lambda d: torch.arange(10, 2, -3, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "logspace": lambda d: torch.logspace(0, 2, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor_float": lambda d: torch.tensor(2.5, device=d),
    "tensor_complex": lambda d: torch.tensor([1 + 2j], device=d),
    "tensor_of_tensors": lambda d: torch.tensor([torch.tensor(1.0, device=d), torch.tensor(2.0, device=d)], device=d),
    "as_tensor": lambda d: torch.as_tensor([1.0, 2.0], device=d),
    "asarray": lambda d: torch.asarray([1, 2], device=d),
    "rand": lambda d: torch.rand(3, device=d),
    "randn": lambda d: torch.randn(3, dtype=torch.float64, device=d),
    "randint": lambda d: torch.randint(0, 10, (5,), device=d),
    "randperm": lambda d: torch.randperm(6, device=d),
    "normal": lambda d: torch.normal(0.0, 1.0, (3,), device=d),
    "empty_filled": lambda d: torch.empty(3, device=d).fill_(2),
    "empty_strided": lambda d: torch.empty_strided((2, 3), (1, 2), device=d).zero_(),
    "empty_permuted": lambda d: torch.empty_permuted((2, 3, 4), (2, 0, 1), device=d).zero_(),
    "empty_channels_last": lambda d: torch.empty(1, 2, 3, 4, device=d, memory_format=torch.channels_last).zero_(),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d)),
    "ones_like_dtype": lambda d: torch.ones_like(torch.ones(2, 3, device=d), dtype=torch.int8),
    "full_like": lambda d: torch.full_like(torch.ones(2, 3, device=d), 4),
    "rand_like": lambda d: torch.rand_like(torch.ones(2, 3, device=d)),
    "randn_like": lambda d: torch.randn_like(torch.ones(2, 3, device=d)),
    "randint_like": lambda d: torch.randint_like(torch.ones(2, 3, device=d), 5),
    "new_zeros": lambda d: torch.ones(2, device=d).new_zeros(3),
    "new_ones": lambda d: torch.ones(2, device=d).new_ones(3, dtype=torch.int32),
    "new_full": lambda d: torch.ones(2, device=d).new_full((3,), 3),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([3, 4]),
    "new_empty": lambda d: torch.ones(2, device=d).new_empty(3).fill_(1),
    "tril_indices": lambda d: torch.tril_indices(3, 3, device=d),
    "triu_indices": lambda d: torch.triu_indices(3, 4, 1, device=d),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
    "polar": lambda d: torch.polar(torch.ones(2, device=d), torch.ones(2, device=d)),
    "heaviside": lambda d: torch.heaviside(torch.arange(-1.0, 2, device=d), torch.tensor([0.5], device=d)),
    "hann_window": lambda d: torch.hann_window(5, device=d),
    "blackman_window": lambda d: torch.blackman_window(6, device=d),
    "kaiser_window": lambda d: torch.kaiser_window(6, device=d),
    "fftfreq": lambda d: torch.fft.fftfreq(5, device=d),
    "meshgrid": lambda d: torch.meshgrid(torch.arange(2, device=d), torch.arange(3, device=d), indexing="ij"),
    "cartesian_prod": lambda d: torch.cartesian_prod(torch.arange(2, device=d), torch.arange(3, device=d)),
    "scalar_tensor": lambda d: torch.scalar_tensor(3, device=d),
    "requires_grad": lambda d: torch.ones(2, device=d, requires_grad=True),
    "bartlett_window": lambda d: torch.bartlett_window(5, device=d),
    "vander": lambda d: torch.vander(torch.arange(3, device=d)),
    "one_hot": lambda d: nn.functional.one_hot(torch.tensor([0, 2], device=d), 3).clone(),
    "frombuffer": lambda d: torch.frombuffer(bytearray(b"12345678"), dtype=torch.int32).to(d),
    "from_numpy": lambda d: torch.from_numpy(__import__("numpy").arange(4.0)).to(d),
}


@pytest.mark.parametrize("name", FACTORIES)
def test_factory(name):
    factory = FACTORIES[name]

    def program(device):
        made = factory(device)
        again = factory(device)

    same(program)


def test_default_device_takes_every_factory():
    torch.manual_seed(0)
    expected = [torch.randn(3), torch.arange(4), torch.tensor([1.0]), nn.Linear(2, 2).weight]
    torch.manual_seed(0)
    with torch.device("ltc"):
        assert torch.empty(1).device.type == "ltc"
        got = [torch.randn(3), torch.arange(4), torch.tensor([1.0]), nn.Linear(2, 2).weight]
    try:
        torch.set_default_device("ltc")
        assert torch.get_default_device().type == "ltc"
        assert torch.zeros(2).device == torch.device("ltc", 0)
        assert (torch.tensor([1, 2]) + torch.ones(2)).tolist() == [2, 3]
    finally:
        torch.set_default_device(None)
    assert [t.device.type for t in got] == ["ltc"] * 4
    assert [bits(t) for t in got] == [bits(t) for t in expected]
    assert torch.zeros(2).device.type == "cpu"


def test_moves_there_and_back():
    def program(device):
        x = torch.randn(3, 4)
        a = x.to(device, copy=True)
        x.add_(1)  # what was moved must not change with its source
        d, f, j = a.to(torch.float64), a.to("cpu", torch.float16), a.type(torch.int32)
        g = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last).to(device, copy=True)
        h = torch.randn(4, 3).t().to(device, copy=True)
        i = torch.randn(6)[2:4].to(device, copy=True)
        m = torch.zeros(2, device=device).to(d)
        n = torch.complex(torch.ones(2), torch.ones(2)).conj().to(device, copy=True)
        o = torch.empty(3, 2, device=device).copy_(torch.arange(6).reshape(2, 3).t())
        p = torch.empty(2, 2, device=device, dtype=torch.bool).copy_(torch.tensor([[0.0, 2.0]]))

    same(program)


def test_to_the_same_device_is_the_same_tensor():
    x = torch.ones(2, device="ltc")
    assert x.to("ltc") is x and x.to("ltc:0") is x and x.to(x.device) is x
    assert x.to("ltc", copy=True) is not x
    assert x.device == torch.device("ltc:0") and x.get_device() == 0


def test_the_source_may_change_after_a_move_in_either_direction():
    source = torch.zeros(3)
    moved = source.to("ltc")
    copied = torch.empty(3, device="ltc")
    copied.copy_(source)
    source.fill_(5)
    assert moved.tolist() == copied.tolist() == [0, 0, 0]
    back = moved.cpu()
    back.fill_(9)
    moved.add_(1)
    target = torch.empty(3)
    target.copy_(moved)
    moved.add_(1)
    assert moved.tolist() == [2, 2, 2] and target.tolist() == [1, 1, 1] and back.tolist() == [9, 9, 9]


def test_what_was_read_may_be_written():
    x = torch.zeros(3, device="ltc") + 1
    read = x.cpu()
    read.fill_(7)
    numpy = x.cpu().numpy()
    numpy[:] = 8
    assert x.tolist() == [1, 1, 1]


def test_module_to_and_back():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    expected = {k: bits(v) for k, v in model.state_dict().items()}
    parameters = list(model.parameters())
    model.to("ltc")
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert {t.device.type for t in model.state_dict().values()} == {"ltc"}
    assert {k: bits(v) for k, v in model.state_dict().items()} == expected
    model.double().to("ltc:1")
    assert {str(t.device) for t in model.state_dict().values()} == {"ltc:1"}
    model.float().cpu()
    assert {k: bits(v) for k, v in model.state_dict().items()} == expected
    meta = nn.Linear(3, 3, device="meta").to_empty(device="ltc")
    assert meta.weight.device.type == "ltc"


# --- device numbers -------------------------------------------------------------------------------------------------


def test_two_devices():
    a, b = torch.arange(3.0, device="ltc:0"), torch.arange(3.0, device=torch.device("ltc", 1))
    assert (str(a.device), str(b.device)) == ("ltc:0", "ltc:1")
    c = b * 2 + 1
    assert c.device.index == 1 and c.tolist() == [1, 3, 5]
    moved = c.to("ltc:0")
    assert moved.device.index == 0 and (moved + a).tolist() == [1, 4, 7]
    a.copy_(c)
    b[1:].copy_(a[:2])
    assert a.tolist() == [1, 3, 5] and b.tolist() == [0, 1, 3]
    view = torch.zeros(2, 3, device="ltc:1").t()
    view[0] = 5
    assert view.stride() == (1, 3) and view.tolist() == [[5, 5], [0, 0], [0, 0]]
    assert b.new_zeros(2).device.index == torch.zeros_like(b).device.index == b.clone().device.index == 1
    out = torch.empty(3, device="ltc:1")
    assert torch.add(b, 1, out=out).device.index == 1


def test_training_on_the_second_device():
    def program(device):
        where = "cpu" if device == "cpu" else "ltc:1"
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(where)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4, device=where)).pow(2).mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())

    same(program, versions=False)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(2, device="ltc:7"),
        lambda: torch.randn(2, device="ltc:7"),
        lambda: torch.tensor([1.0], device="ltc:7"),
        lambda: torch.arange(3, device="ltc:7"),
        lambda: torch.ones(2).to("ltc:7"),
        lambda: torch.ones(2, device="ltc").to("ltc:7"),
        lambda: torch.zeros_like(torch.ones(2, device="ltc"), device="ltc:7"),
        lambda: torch.ones(2, device="ltc").new_zeros(2, device="ltc:7"),
        lambda: nn.Linear(2, 2).to("ltc:7"),
        lambda: torch.ltc.set_device(7),
    ],
)
def test_a_device_number_that_does_not_exist(make):
    with pytest.raises(lt.errors.NoSuchDevice, match=r"there is no device ltc:7: the process has 2 \(ltc:0 to ltc:1\)"):
        make()


def test_the_number_of_devices_is_a_setting():
    with lt.settings.scope(devices=9):
        assert torch.ltc.device_count() == 9
        assert torch.zeros(2, device="ltc:7").add(1).tolist() == [1, 1]


def test_the_current_device():
    assert torch.ltc.current_device() == 0
    try:
        torch.ltc.set_device(1)
        assert torch.ltc.current_device() == 1
        assert torch.zeros(2, device="ltc").device.index == 1
        assert torch.randn(2, device="ltc").device.index == 1
        assert torch.ones(2).to("ltc").device.index == 1
        assert torch.tensor([1], device="ltc").device.index == 1
    finally:
        torch.ltc.set_device(0)
    assert torch.zeros(2, device="ltc").device.index == 0


def test_the_device_module():
    assert torch.get_device_module("ltc") is torch.ltc
    assert torch.ltc.is_available() and torch.ltc.device_count() == 2
    x = torch.ones(2, device="ltc") * 3
    torch.ltc.synchronize()
    assert x.tolist() == [3, 3]


# --- mixing ---------------------------------------------------------------------------------------------------------


def test_cpu_scalars_mix_with_ltc_tensors_as_on_cuda():
    x = torch.arange(3.0, device="ltc")
    half = torch.tensor(0.5)
    assert (x * half).tolist() == (half * x).tolist() == [0, 0.5, 1]
    assert (x + torch.tensor(2, dtype=torch.int64)).dtype is torch.float32
    assert (torch.arange(3, device="ltc") * torch.tensor(0.5, dtype=torch.float64)).dtype is torch.float64
    x.mul_(torch.tensor(2.0)).addcmul_(x, x, value=1)
    half.fill_(100)
    assert x.tolist() == [0, 6, 20]
    assert torch.where(x > torch.tensor(5.0), x, torch.tensor(-1.0)).tolist() == [-1, 6, 20]
    x[0] = torch.tensor(9.0)
    assert x[torch.tensor(0)].item() == 9
    y = (x.detach().requires_grad_() * torch.tensor(3.0)).sum()
    y.backward()


MIXED = {
    "add": (lambda a, b: a + b, "ltc:0"),
    "add_reversed": (lambda a, b: b + a, "ltc:0"),
    "in_place": (lambda a, b: a.add_(b), "ltc:0"),
    "in_place_on_cpu": (lambda a, b: b.add_(a), "ltc:0"),
    "mm": (lambda a, b: a @ b, "ltc:0"),
    "mm_reversed": (lambda a, b: b @ a, "ltc:0"),
    "cat": (lambda a, b: torch.cat([a, b]), "ltc:0"),
    "stack": (lambda a, b: torch.stack([b, a]), "ltc:0"),
    "where": (lambda a, b: torch.where(a > 0, a, b), "ltc:0"),
    "linear": (lambda a, b: nn.functional.linear(a, b), "ltc:0"),
    "layer_norm": (lambda a, b: nn.functional.layer_norm(a, (2,), b[0], b[1]), "ltc:0"),
    "embedding": (lambda a, b: nn.functional.embedding(b.long(), a), "ltc:0"),
    "out": (lambda a, b: torch.add(a, a, out=b), "ltc:0"),
    "out_on_ltc": (lambda a, b: torch.add(b, b, out=a), "ltc:0"),
    "foreach": (lambda a, b: torch._foreach_add([a], [b]), "ltc:0"),
    "addcmul": (lambda a, b: torch.addcmul(a, a, b), "ltc:0"),
    "equal": (lambda a, b: torch.equal(a, b), "ltc:0"),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_is_the_error_that_cuda_gives(name):
    call, mine = MIXED[name]
    a, b = torch.ones(2, 2, device="ltc"), torch.ones(2, 2)
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as raised:
        call(a, b)
    assert mine in str(raised.value) and "cpu" in str(raised.value)
    assert (a + 1).tolist() == [[2, 2], [2, 2]], "the device is usable afterwards"


@pytest.mark.parametrize("name", ["add", "mm", "cat", "where", "in_place", "addcmul", "layer_norm", "linear"])
def test_mixing_two_ltc_devices_is_an_error(name):
    call, _ = MIXED[name]
    a, b = torch.ones(2, 2, device="ltc:0"), torch.ones(2, 2, device="ltc:1")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device") as raised:
            call(a, b)
        assert "ltc:0" in str(raised.value) and "ltc:1" in str(raised.value)


def test_a_value_known_on_one_device_does_not_hide_the_error_on_another():
    a, b = torch.ones(3, device="ltc:0"), torch.ones(3, device="ltc:0")
    a + b
    c = torch.ones(3, device="ltc:1")
    with pytest.raises(RuntimeError, match="same device"):
        a + c


# --- import ---------------------------------------------------------------------------------------------------------


def test_importing_twice_changes_nothing():
    x = torch.ones(2, device="ltc") + 1
    importlib.import_module("lazytensor")
    lt.device.registration.register()
    assert x.tolist() == [2, 2]
    assert sys.modules["lazytensor"] is lt


def test_importing_again_after_removal_from_sys_modules():
    done = subprocess_run("""
        import importlib, sys, torch, lazytensor
        x = torch.ones(2, device="ltc") + 1
        importlib.reload(lazytensor)
        del sys.modules["lazytensor"]
        import lazytensor
        print(x.tolist())
        for name in [n for n in sys.modules if n.startswith("lazytensor")]:
            del sys.modules[name]
        import lazytensor
    """)
    assert done.stdout == "[2.0, 2.0]\n"
    assert "DeviceInUse" in done.stderr and "already took it" in done.stderr


def test_another_device_owns_privateuse1():
    done = subprocess_run("""
        import torch
        torch.utils.rename_privateuse1_backend("mine")
        import lazytensor
    """)
    assert done.returncode == 1
    assert "DeviceInUse" in done.stderr and "'mine' already took it" in done.stderr
