"""What the C++ Lazy Tensor Core gets wrong, defect by defect (A to L): each passes on ltc.

A test carries the letter of the defect and what PyTorch's ``lazy`` device does instead.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import bits, same, subprocess_run
from torch import nn

import lazytensor as lt
from lazytensor import errors
from lazytensor.execute import cut
from lazytensor.trace.storage import value_of

# --- A: list-returning ops hand back CPU tensors disguised as lazy ones -----------------------------------------------

LISTS = {
    "split": lambda x: x.split(2),
    "split by sizes": lambda x: x.split([1, 3]),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(),
    "tensor_split": lambda x: x.tensor_split(3),
    "hsplit": lambda x: x.view(2, 2).hsplit(2),
    "iteration": lambda x: list(x.view(2, 2)),
    "meshgrid": lambda x: torch.meshgrid(x, x, indexing="ij"),
    "broadcast_tensors": lambda x: torch.broadcast_tensors(x, x.view(4, 1)),
    "where of one argument": lambda x: torch.where(x > 1),
    "nonzero as tuple": lambda x: (x > 1).nonzero(as_tuple=True),
    "foreach": lambda x: torch._foreach_add([x, x], 1),
}


@pytest.mark.parametrize("name", LISTS)
def test_a_lists_hold_tensors_of_the_device(name: str) -> None:
    def program(device: str) -> Any:
        x = torch.arange(4.0, device=device)
        parts = LISTS[name](x)
        assert all(p.device.type == device for p in parts)
        sums = [(p + 1) * p for p in parts]
        assert all(s.device.type == device for s in sums)
        return sums

    same(program)


@pytest.mark.parametrize("name", ["split", "chunk", "unbind", "tensor_split", "iteration"])
def test_a_writes_into_parts_reach_the_base(name: str) -> None:
    def program(device: str) -> Any:
        x = torch.arange(4.0, device=device)
        LISTS[name](x)[1].mul_(10)
        return x + 1

    same(program)


# --- B: reading a tensor runs its graph again -------------------------------------------------------------------------


def test_b_reads_do_not_draw_again() -> None:
    x = torch.rand(3, device="ltc")
    assert bits(x) == bits(x + 0) == bits(x)
    y = F.dropout(torch.ones(1000, device="ltc"), 0.5)
    assert len({y.sum().item() for _ in range(4)}) == 1


def test_b_backward_uses_the_mask_that_the_loss_was_read_with() -> None:
    def program(device: str) -> Any:
        x = torch.ones(1000, device=device, requires_grad=True)
        loss = F.dropout(x, 0.5).sum()
        value = loss.item()
        loss.backward()
        assert x.grad is not None
        assert x.grad.sum().item() == value
        return loss

    same(program)


# --- C: running statistics of batch norm ------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [0, 1, 2])
@pytest.mark.parametrize("kept", [True, False])
def test_c_statistics_move_once(reads: int, kept: bool) -> None:
    def program(device: str) -> Any:
        layer = nn.BatchNorm1d(3).to(device)
        y = layer(torch.randn(5, 3).to(device) + 2)
        for _ in range(reads):
            y.sum().item()
        if not kept:
            del y
        lt.sync()
        return layer.running_mean, layer.running_var, layer.num_batches_tracked

    same(program, versions=False)


# --- D: the dtype drifts when a 0-dim tensor meets a Python number ----------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.bool])
def test_d_dtypes_of_zero_dimensional_tensors(dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        x = torch.ones(3, device=device).to(dtype).sum(dtype=dtype)
        results = [x * 0.1, x * 2, x + True, 0.5 - x, x / 4, x * torch.tensor(2.0), x.float() * 0.1]
        return results, [r.dtype for r in results], [r.cpu().dtype for r in results]

    same(program)


LOSSES = {
    "CE * 0.5": lambda x, y: F.cross_entropy(x, y) * 0.5,
    "nll * 0.5": lambda x, y: F.nll_loss(x.log_softmax(1), y) * 0.5,
    "label smoothing": lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1),
    "CE + 0.1 * l2": lambda x, y: F.cross_entropy(x, y) + 0.1 * x.pow(2).sum(),
    "mean * 0.5": lambda x, y: x.mean() * 0.5,
    "0.3 * mse + 0.7 * l1": lambda x, y: 0.3 * F.mse_loss(x, x * 2) + 0.7 * F.l1_loss(x, x * 3),
    "bce * 0.5": lambda x, y: F.binary_cross_entropy_with_logits(x, x.sigmoid()) * 0.5,
}


@pytest.mark.parametrize("name", LOSSES)
def test_d_losses_times_numbers(name: str) -> None:
    def program(device: str) -> Any:
        x = torch.randn(4, 3).to(device).requires_grad_()
        loss = LOSSES[name](x, torch.tensor([0, 1, 2, 0], device=device))
        loss.backward()
        assert x.grad is not None
        assert x.grad.dtype is x.grad.cpu().dtype is torch.float32
        return loss

    same(program)


# --- E: an old error is raised again ----------------------------------------------------------------------------------


def test_e_an_error_is_raised_once() -> None:
    table = torch.randn(3, 2).to("ltc")
    good = torch.ones(2, device="ltc") + 1
    bad = F.embedding(torch.tensor([7], device="ltc"), table)
    with pytest.raises((IndexError, RuntimeError), match="index out of range"):
        bad.cpu()
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2, 2]
    assert good.tolist() == [2, 2]
    assert table.shape == (3, 2)
    assert bits(table + 0) == bits(table)


# --- F: deep graphs end the process -----------------------------------------------------------------------------------


def test_f_deep_graphs_run_and_are_freed() -> None:
    code = """
        import torch, lazytensor as lt
        x = torch.zeros(2, device="ltc")
        for _ in range(20_000):
            x = x + 1
        print(x.tolist())
        for _ in range(100_000):
            x = x.neg()
        del x
        y = torch.zeros(2, device="ltc")
        for _ in range(20_000):
            y.add_(1)
        lt.sync()
        print(y.tolist())
    """
    result = subprocess_run(code, timeout=300)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[:2] == ["[20000.0, 20000.0]", "[20000.0, 20000.0]"]


# --- G: forward-mode AD ends the process ------------------------------------------------------------------------------


def test_g_forward_mode() -> None:
    with warnings.catch_warnings():  # PyTorch's decompositions warn of torch.jit.script on whichever device comes first
        warnings.simplefilter("ignore")
        torch.func.jvp(torch.sin, (torch.ones(2),), (torch.ones(2),))

    def program(device: str) -> Any:
        x = torch.tensor([0.5, -1.0]).to(device)
        f = lambda x: (x.sin() * x).sum()  # noqa: E731
        jvp = torch.func.jvp(f, (x,), (torch.ones_like(x),))
        jacobian = torch.func.jacfwd(lambda x: x.exp() * x[0])(x)
        hessian = torch.func.hessian(f)(x)
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            tangent = torch.autograd.forward_ad.unpack_dual(dual * dual).tangent
        return jvp, jacobian, hessian, tangent

    same(program)


# --- H: draws happen in another order than in eager -------------------------------------------------------------------


def test_h_draws_happen_where_they_are_written() -> None:
    def program(device: str) -> Any:
        a = torch.rand(3, device=device)
        b = torch.rand(3)
        c = torch.randn(3, device=device)
        d = F.dropout(torch.ones(4, device=device))
        e = torch.rand(2).tolist()
        f = torch.randperm(5, device=device)
        return a, b, c, d, e, f

    same(program)


# --- I: a loop that reads compiles every time -------------------------------------------------------------------------


def test_i_a_loop_that_reads_compiles_once() -> None:
    model = nn.Linear(4, 2).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(8, 4).to("ltc")
    misses = []
    for _ in range(25):
        optimizer.zero_grad()
        loss = model(x).pow(2).mean()
        loss.backward()
        optimizer.step()
        loss.item()
        misses.append(cut.misses)
    assert misses[-1] == misses[3]
    total = torch.zeros(2, device="ltc")
    before = cut.misses
    for i in range(120):
        total = total * 0.9 + i
        total.sum().item()
    assert cut.misses - before <= 3


# --- J: more than one device ------------------------------------------------------------------------------------------


def test_j_copies_between_devices() -> None:
    x = torch.arange(3.0, device="ltc:0") * 2
    y = x.to("ltc:1")
    assert y.device == torch.device("ltc:1")
    assert (y + 1).device == torch.device("ltc:1")
    assert (y + 1).tolist() == [1, 3, 5]
    x.copy_(y * 2)
    assert x.tolist() == [0, 4, 8]
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        x + y


def test_j_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(errors.NoSuchDevice, match="there is no device ltc:5"):
        torch.ones(2, device="ltc:5")
    with pytest.raises(errors.NoSuchDevice, match="there is no device ltc:5"):
        torch.ones(2).to("ltc:5")


# --- K: switches that stick, start-up that cannot be repeated, source lines that are wrong ----------------------------


def test_k_registering_twice_does_nothing() -> None:
    from lazytensor.device.registration import register

    register()
    assert (torch.ones(2, device="ltc") + 1).tolist() == [2, 2]


def test_k_settings_do_not_stick() -> None:
    before = lt.settings.max_pending
    with lt.settings.scope(max_pending=7):
        assert lt.settings.max_pending == 7
    assert lt.settings.max_pending == before


def test_k_a_node_knows_the_line_that_made_it() -> None:
    x = torch.ones(2, device="ltc")
    y = x.atan2(x)  # this line
    line = str(value_of(y).node.line)
    y.cpu()
    source = open(__file__).read().split("\n")  # noqa: SIM115
    expected = next(i for i, text in enumerate(source, 1) if text.endswith("# this line"))
    assert f"{__file__.rsplit('/', 1)[-1]}:{expected}" in line


# --- L: fallback loses in-place updates of lists ----------------------------------------------------------------------


def test_l_lists_are_written_in_place() -> None:
    def program(device: str) -> Any:
        x, found = torch.full((2,), 4.0, device=device), torch.zeros(1, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_([x], found, torch.full((1,), 0.5, device=device))
        return x, found

    same(program)


def test_l_grad_scaler_unscales() -> None:
    def program(device: str) -> Any:
        weight = nn.Parameter(torch.ones(1, device=device))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0)
        scaler.scale((weight * 2).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert weight.item() == pytest.approx(0.8)
        return weight

    same(program)
