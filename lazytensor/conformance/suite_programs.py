"""The behaviours that a backend must keep, each as a small program: it is run on the CPU and on ltc, and what it
returns is compared.

A program takes a device and returns a tree of tensors and numbers.  It is run three times in a row, since a backend may
compile at the second run and specialise at the third.
"""

# ruff: noqa: D103  (the name of a program is the behaviour)

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

Program = Callable[[str], Any]
PROGRAMS: dict[str, dict[str, Program]] = {}


def behaviour(group: str) -> Callable[[Program], Program]:
    """Put a program into a group; its name, words apart, is the behaviour's name."""

    def enter(program: Program) -> Program:
        PROGRAMS.setdefault(group, {})[program.__name__.replace("_", " ")] = program
        return program

    return enter


def data(device: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Fixed numbers, all different, none zero."""
    count = torch.Size(size).numel()
    made = (torch.arange(1, count + 1, dtype=torch.float64) * 0.37).sin() + 2
    return (made * (100 if not dtype.is_floating_point else 1)).to(dtype).view(size).to(device)


# --- results ----------------------------------------


@behaviour("results")
def outputs_keep_their_order(device: str) -> Any:
    x = data(device, 4)
    return x + 1, x * 2, x - 3, x / 4


@behaviour("results")
def dtypes_are_the_declared_ones(device: str) -> Any:
    x = data(device, 3)
    return [x.to(d) for d in (torch.float64, torch.int64, torch.int32, torch.bool)] + [x > 2, x.sum() * 0.5, x.argmax()]


@behaviour("results")
def half_precision_stays_half(device: str) -> Any:
    x = data(device, 4, dtype=torch.bfloat16)
    return x * 1.5, x.float().sum().to(torch.float16)


@behaviour("results")
def broadcasting_goes_by_the_last_dimensions(device: str) -> Any:
    square, row, column = data(device, 3, 3), data(device, 3), data(device, 3, 1)
    return square + row, square * column, row - column, square / data(device, 2, 1, 3)


@behaviour("results")
def several_outputs_of_one_op(device: str) -> Any:
    return *torch.topk(data(device, 3, 4), 2, dim=1), *torch.var_mean(data(device, 5)), *data(device, 5, 2).split(2)


@behaviour("results")
def the_same_value_twice(device: str) -> Any:
    x = data(device, 3)
    y, z = x + 1, x + 1
    y.mul_(2)
    return y, z


@behaviour("results")
def strides_are_the_declared_ones(device: str) -> Any:
    x = data(device, 2, 3, 4, 4)
    last = x.to(memory_format=torch.channels_last)
    return last + 1, x.transpose(1, 2) * 2, x.permute(3, 1, 0, 2).contiguous(), F.relu(x[:, ::2])


# --- numbers ----------------------------------------


@behaviour("numbers")
def a_changed_number_is_used(device: str) -> Any:
    x = data(device, 3)
    found = []
    for rate in (0.1, 0.01, float("inf"), -2.5):
        found.append(x * rate)
        found[-1].sum().item()
    return found


@behaviour("numbers")
def numbers_promote_as_python_numbers(device: str) -> Any:
    whole, point = data(device, 3, dtype=torch.int32), data(device, 3).sum()
    return whole * 2, whole * 2.0, whole / 2, point * 3, point + 0.25, whole.sum(dtype=torch.int32) + 1, True + whole


# --- aliasing ----------------------------------------


@behaviour("aliasing")
def an_update_in_place_arrives(device: str) -> Any:
    x = data(device, 4)
    before = x.clone()
    for _ in range(3):
        x.add_(1).mul_(1.5)
        x.sum().item()
    return before, x


@behaviour("aliasing")
def several_updates_in_one_step_all_arrive(device: str) -> Any:
    parameters = [data(device, 3) * k for k in range(1, 5)]
    for _ in range(2):
        torch._foreach_mul_(parameters, 0.5)
        for parameter in parameters:
            parameter.sub_(0.1)
        parameters[0].sum().item()
    return parameters


@behaviour("aliasing")
def a_write_through_a_view_reaches_the_base(device: str) -> Any:
    x = data(device, 4, 4)
    x[1].zero_()
    x.t()[2].mul_(3)
    x.view(-1)[::5] = 7
    x[2:, 1:3] += x[:2, 1:3]
    return x


@behaviour("aliasing")
def a_view_sees_a_later_write(device: str) -> Any:
    x = data(device, 6)
    view = x.view(2, 3)[1]
    x.add_(10)
    x.sum().item()
    x[4] = -1
    return view, x


@behaviour("aliasing")
def results_do_not_share_memory(device: str) -> Any:
    x = data(device, 4)
    same, copy = x.view(4), x.clone()
    x.sum().item()
    copy.zero_()
    return x, same, copy


# --- donation ----------------------------------------


@behaviour("donation")
def the_old_value_of_an_updated_tensor_can_be_kept(device: str) -> Any:
    x = data(device, 4)
    for _ in range(3):
        old = x + 0
        x.sum().item()
        x.mul_(2)
        both = old + x
        both.sum().item()
    return old, x, both


@behaviour("donation")
def an_input_that_is_still_held_keeps_its_value(device: str) -> Any:
    x, w = data(device, 4), data(device, 4) + 1
    x.sum().item()
    found = []
    for _ in range(3):
        found.append((x * w).exp().sum())
        found[-1].item()
        found.append(x.clone())
        found.append(w.sum())
    return x, w, found


@behaviour("donation")
def an_updated_tensor_that_is_also_read_later_in_the_step(device: str) -> Any:
    x, moment = data(device, 5), torch.zeros(5).to(device)
    for _ in range(3):
        gradient = x * x
        moment.mul_(0.9).add_(gradient, alpha=0.1)
        x.addcdiv_(moment, gradient.sqrt() + 1, value=-0.1)
        moment.sum().item()
    return x, moment, gradient


@behaviour("donation")
def two_tensors_change_places(device: str) -> Any:
    x, y = data(device, 3), data(device, 3) * -1
    x.sum().item(), y.sum().item()
    for _ in range(3):
        old = x.clone()
        x.copy_(y)
        y.copy_(old)
        x.sum().item()
    return x, y


# --- empty tensors and tensors without dimensions ----------------------------------------


@behaviour("empty and 0-d")
def empty_tensors(device: str) -> Any:
    x = data(device, 0, 3)
    return x + 1, x.sum(), x.sum(0), torch.cat([x, data(device, 2, 3)]), x @ data(device, 3, 2), x.t() @ x, x.mean()


@behaviour("empty and 0-d")
def tensors_without_dimensions(device: str) -> Any:
    x = data(device, 1).reshape(())
    return x * x, x.sum(), x.view(1, 1), torch.stack([x, x]), x.expand(2, 2) + 1, x.max(), x.to(torch.int64)


# --- randomness ----------------------------------------


@behaviour("randomness")
def the_same_seed_gives_the_same_numbers(device: str) -> Any:
    torch.manual_seed(5)
    first = torch.rand(4, device=device)
    read = first.sum().item()
    second = torch.randn(3, device=device) + first[:3]
    return first, read, second


@behaviour("randomness")
def reading_twice_draws_once(device: str) -> Any:
    torch.manual_seed(6)
    x = F.dropout(torch.ones(50).to(device), 0.5)
    return x.sum().item(), x.sum().item(), x


@behaviour("randomness")
def dropout_masks_differ_from_step_to_step_and_agree_with_their_gradient(device: str) -> Any:
    torch.manual_seed(7)
    weight = torch.ones(20).to(device).requires_grad_()
    found = []
    for _ in range(3):
        out = F.dropout(weight, 0.3)
        out.sum().backward()
        assert weight.grad is not None
        found.append((out.detach(), weight.grad.clone()))
        weight.grad = None
        found[-1][0].sum().item()
    return found


# --- training ----------------------------------------


@behaviour("training")
def batch_norm_moves_its_statistics_once(device: str) -> Any:
    norm = torch.nn.BatchNorm1d(3).to(device)
    for k in range(3):
        norm(data(device, 5, 3) * (k + 1)).sum().item()
    return norm.running_mean, norm.running_var, norm.num_batches_tracked


@behaviour("training")
def a_network_with_adam(device: str) -> Any:
    torch.manual_seed(8)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3)
    ).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data(device, 6, 4)), torch.tensor([0, 1, 2, 0, 1, 2]).to(device))
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    return losses, [p.detach() for p in model.parameters()]


@behaviour("training")
def a_convolution_with_momentum(device: str) -> Any:
    torch.manual_seed(9)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(2, 3, 3, 2, 1), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()
    ).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        model(data(device, 2, 2, 8, 8)).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [p.detach() for p in model.parameters()]


# --- errors ----------------------------------------


@behaviour("errors")
def an_index_out_of_range_is_the_users_error(device: str) -> Any:
    table = data(device, 4, 2)
    found: list[Any] = [torch.embedding(table, torch.tensor([0, 3]).to(device)).sum().item()]
    try:
        torch.embedding(table, torch.tensor([0, 9]).to(device)).sum().item()
    except IndexError as error:
        found.append(str(error))
    return found


@behaviour("errors")
def after_an_error_everything_else_still_has_its_value(device: str) -> Any:
    x = data(device, 3)
    other = x + 1
    with contextlib.suppress(IndexError):
        torch.embedding(x.view(3, 1), torch.tensor([5]).to(device)).sum().item()
    return other, x * 2


@behaviour("errors")
def a_wrong_call_raises_when_it_is_made(device: str) -> Any:
    try:
        data(device, 2, 3) @ data(device, 2, 3)
    except RuntimeError as error:
        return str(error)
    return "nothing was raised"
