"""Aliasing under autograd is exactly eager's: version counters, saved tensors, gradients through written views."""

from __future__ import annotations

import pytest
import torch
from support import Programs, numbers, same
from torch import nn

program = Programs()


@program
def version_counters(device):
    x = numbers(device, 4)
    v = x[1:]
    versions = [x._version, v._version]
    x.add_(1)
    v.mul_(2)
    d = x.detach()
    d.zero_()
    versions += [x._version, v._version, d._version]
    torch.add(x, 1, out=x)
    x.data.add_(1)
    versions += [x._version]
    y = x.view(2, 2)
    y[0, 0] = 1
    x.t_()
    versions += [x._version, y._version]


@program
def changed_after_it_was_saved_for_backward(device):
    x = numbers(device, 4).requires_grad_()
    y = x * 2
    z = y * y
    y.add_(1)
    z.sum().backward()


@program
def changed_through_a_view_after_it_was_saved(device):
    x = numbers(device, 4).requires_grad_()
    y = x.exp()
    y[0] = 1
    y.sum().backward()


@program
def changed_through_data_goes_unnoticed(device):
    x = numbers(device, 4).requires_grad_()
    y = x * 2
    z = y * y
    y.data.add_(1)
    z.sum().backward()


@program
def changed_through_detach_is_noticed(device):
    x = numbers(device, 4).requires_grad_()
    y = x * 2
    z = y * y
    y.detach().add_(1)
    z.sum().backward()


@program
def in_place_on_a_leaf_is_refused(device):
    x = numbers(device, 4).requires_grad_()
    x.add_(1)


@program
def in_place_on_a_view_of_a_leaf_is_refused(device):
    x = numbers(device, 4).requires_grad_()
    x[1:].add_(1)


@program
def in_place_on_a_leaf_without_grad_mode(device):
    x = numbers(device, 4).requires_grad_()
    with torch.no_grad():
        x.add_(1)
        x[1:].mul_(2)
        v = x.view(2, 2)
    y = (x * x).sum()
    y.backward()


@program
def gradients_through_written_views(device):
    x = numbers(device, 3, 4).requires_grad_()
    w = numbers(device, 4).requires_grad_()
    y = x * 2
    y[1] = w
    y[:, 2].mul_(3)
    y.t()[0].add_(w[:3] * 2)
    y.sum().backward()


@program
def gradients_through_every_kind_of_view(device):
    x = numbers(device, 4, 4).requires_grad_()
    total = (
        (x.t() * 2).sum()
        + x[1:, ::2].pow(2).sum()
        + x.diagonal().sum()
        + x.expand(2, 4, 4).mean()
        + x.unfold(0, 2, 1).sum()
        + x.as_strided((2, 2), (3, 1), 1).pow(3).sum()
        + torch.stack(x.unbind(1)).prod(0).sum()
        + sum(p.mul(i).sum() for i, p in enumerate(x.split(2)))
    )
    total.backward()


@program
def gradient_accumulation_in_place_and_zeroed(device):
    x = numbers(device, 3).requires_grad_()
    (x * 2).sum().backward()
    (x * 3).sum().backward()
    kept = x.grad
    x.grad.zero_()
    (x * x).sum().backward()
    x.grad.data.add_(1)


@program
def double_backward(device):
    x = numbers(device, 3).requires_grad_()
    y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    (h,) = torch.autograd.grad(g.sum(), x)


@program
def backward_twice_is_refused(device):
    x = numbers(device, 3).requires_grad_()
    y = (x * x).sum()
    y.backward()
    y.backward()


@program
def tied_parameters(device):
    embedding, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head).to(device)
    tied = model[0].weight is model[1].weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.tensor([1, 2, 1], device=device)).pow(2).mean()
        loss.backward()
        optimizer.step()


@program
def module_to_keeps_its_parameter_objects(device):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.weight
    model.to(device)
    kept = model.weight is before
    model(torch.ones(2, 3, device=device)).sum().backward()
    optimizer.step()


@program
def saved_tensors_come_back_with_their_values(device):
    x = numbers(device, 4).requires_grad_()
    y = x.sigmoid()
    z = y.tanh()
    saved = z.grad_fn._saved_result
    back = y.grad_fn._saved_result
    z.sum().backward()


@program
def inference_mode_views_and_writes(device):
    outside = numbers(device, 2, 3)
    with torch.inference_mode():
        x = numbers(device, 2, 3)
        v = x[1]
        v.add_(1)
        y = x * 2
        seen = outside[0]
        outside.mul_(2)
        d = x.detach()
    z = x + 1


@program
def an_inference_tensor_written_outside_is_refused(device):
    with torch.inference_mode():
        x = numbers(device, 2, 3)
    x.add_(1)


@program
def an_inference_tensor_saved_for_backward_is_refused(device):
    with torch.inference_mode():
        x = numbers(device, 3)
    w = torch.ones(3, device=device, requires_grad=True)
    y = w * x


@program
def views_made_without_grad_mode_and_written_with_it(device):
    x = numbers(device, 3).requires_grad_() * 1
    with torch.no_grad():
        v = x[1:]
    v.mul_(2)


@program
def custom_function_marks_dirty(device):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.mark_dirty(x)
            return x.mul_(2)

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    x = numbers(device, 3).requires_grad_()
    y = x * 1
    z = Twice.apply(y)
    z.sum().backward()


@program
def chained_in_place_under_autograd(device):
    x = numbers(device, 3, 3).requires_grad_()
    y = (x + 1).relu_().mul_(2).sqrt_().t()
    y = y.contiguous().add_(1)
    y.sum().backward()


MOVED = {"tied_parameters", "module_to_keeps_its_parameter_objects"}


@pytest.mark.parametrize("name", program)
def test_aliasing_under_autograd(name):
    same(program[name], versions=name not in MOVED)
