"""Changes of geometry over shared memory are exactly eager's: ``as_strided``, ``resize_``, ``set_``, layouts."""

from __future__ import annotations

import pytest
import torch
from support import Programs, numbers, same
from torch import nn

program = Programs()


@program
def as_strided_reads_and_writes(device):
    x = numbers(device, 12)
    a = x.as_strided((3, 2), (4, 1), 1)
    a.mul_(10)
    v = x[4:]
    b = v.as_strided((2, 2), (2, 1))
    c = v.as_strided((2, 2), (2, 1), 0)
    b.add_(1)
    c.sub_(1)
    over = x.as_strided((3, 3), (1, 1))


@program
def as_strided_in_place(device):
    x = numbers(device, 12)
    y = x.view(3, 4)
    x.as_strided_((2, 3), (6, 2), 1)
    x.add_(1)


@program
def as_strided_scatter_and_friends(device):
    x = numbers(device, 4, 4)
    s = torch.as_strided_scatter(x, torch.ones(2, 2, device=device), (2, 2), (5, 1), 1)
    t = torch.slice_scatter(x, torch.ones(2, 4, device=device), 0, 1, 3)
    u = torch.select_scatter(x, torch.ones(4, device=device), 1, 2)
    w = torch.diagonal_scatter(x, torch.ones(4, device=device))


@program
def in_place_view_ops(device):
    x = numbers(device, 2, 3)
    alias = x.view(6)
    x.t_()
    x.unsqueeze_(0)
    x.transpose_(1, 2)
    x.squeeze_(0)
    x.squeeze_()
    x.swapaxes_(0, 1)
    x.add_(1)
    y = numbers(device, 1, 3, 1)
    y.squeeze_((0, 2))
    z = numbers(device, 2, 3, 4)[:, 1]
    z.t_()
    z.fill_(5)


@program
def in_place_view_ops_under_autograd(device):
    w = numbers(device, 2, 3).requires_grad_()
    y = w * 2
    y.t_()
    y.unsqueeze_(0)
    y.mul_(3)
    y.sum().backward()


@program
def resize_smaller_larger_and_with_views(device):
    x = numbers(device, 6)
    x.resize_(2, 2)
    y = numbers(device, 6)
    v = y[2:4]
    v.add_(10)
    y.resize_(3)
    e = torch.empty(0, device=device)
    e.resize_(2, 3).fill_(4)
    r = numbers(device, 2, 2)
    r.resize_(4, 2)
    r[2:] = 0
    q = numbers(device, 4)
    q.resize_as_(r)
    q[2:] = 1


@program
def resize_of_a_view_reaches_into_its_base(device):
    x = numbers(device, 8)
    v = x[2:4]
    v.resize_(5)
    v.mul_(2)


@program
def resize_with_a_memory_format(device):
    x = numbers(device, 2, 3, 2, 2)
    x.resize_(2, 3, 2, 2, memory_format=torch.channels_last)
    y = torch.empty(0, device=device)
    y.resize_(1, 2, 3, 4, memory_format=torch.channels_last).zero_()


@program
def resize_of_a_tensor_that_requires_grad_is_refused(device):
    x = numbers(device, 4).requires_grad_()
    x.resize_(2)


@program
def set_to_another_tensor(device):
    x, y = numbers(device, 4), numbers(device, 2, 3) + 100
    x.set_(y)
    x[0] = 1
    z = torch.empty(0, device=device)
    z.set_(y.untyped_storage(), 1, (2, 2), (3, 1))
    z.add_(1)
    w = torch.empty(0, device=device)
    w.set_(y.untyped_storage())
    u = numbers(device, 3)
    u.set_()
    k = numbers(device, 3)
    k.set_(y[1])
    k.mul_(2)
    together = x.is_set_to(y)


@program
def set_shares_its_version_counter(device):
    x, y = numbers(device, 4), numbers(device, 4)
    x.set_(y)
    y.add_(1)
    x.add_(1)


@program
def detach_shares_everything(device):
    x = numbers(device, 3, 3).requires_grad_()
    y = x * 2
    d = y.detach()
    d[0] = 5
    v = y.detach()[1:]
    v.mul_(3)
    z = y.detach_()


@program
def data_attribute_read_and_set(device):
    x = numbers(device, 3, 3).requires_grad_()
    x.data.mul_(2)
    x.data[0] = -1
    shape_changed = numbers(device, 2)
    shape_changed.data = numbers(device, 3, 2)
    y = numbers(device, 3)
    z = numbers(device, 3) + 10
    y.data = z
    z.add_(1)
    y.data.add_(1)
    p = nn.Parameter(numbers(device, 4))
    p.data = p.data.double()
    p.data = p.data[1:3]
    p.data.fill_(0)


@program
def data_set_to_a_view(device):
    z = numbers(device, 4, 4)
    y = numbers(device, 2)
    y.data = z[1:3, ::2]
    y.data.add_(1)
    w = y * 2


@program
def channels_last_and_its_strides(device):
    x = numbers(device, 2, 3, 4, 5)
    c = x.to(memory_format=torch.channels_last)
    d = c.contiguous()
    e = c.contiguous(memory_format=torch.channels_last)
    y = c * 2
    z = c + x
    p = c.permute(0, 2, 3, 1)
    cl = c.clone()
    el = torch.empty_like(c).copy_(c)
    flags = [t.is_contiguous(memory_format=torch.channels_last) for t in (x, c, d, e, y, z, cl, el)]
    w = torch.zeros(1, 2, 3, 3, device=device).contiguous(memory_format=torch.channels_last)
    three = torch.zeros(1, 2, 3, 3, 2, device=device).contiguous(memory_format=torch.channels_last_3d)


@program
def strides_of_results(device):
    x = numbers(device, 3, 4).t()
    y = x + 1
    z = x.clone()
    w = x.clone(memory_format=torch.contiguous_format)
    s = x.sum(0, keepdim=True)
    k = torch.zeros_like(x)
    c = torch.cat([x, x])
    m = x @ x.t()
    e = x.expand(2, 4, 3) * 1
    strided = torch.empty_strided((2, 3), (1, 2), device=device).zero_()
    sorted_ = x.sort(0)
    relu = x.relu()
    typed = x.to(torch.float64)


@program
def zero_sized_tensors(device):
    x = torch.empty(0, 3, device=device)
    y = x[:, 1:]
    y.add_(1)
    z = x.sum(0)
    c = torch.cat([x, numbers(device, 2, 3)])
    v = c[2:]
    v.fill_(3)


@program
def zero_dimensional_tensors(device):
    x = torch.tensor(3.0, device=device)
    y = x.view(1)
    y.add_(1)
    z = x.expand(3)
    w = numbers(device, 4)[2]
    w.mul_(5)


@pytest.mark.parametrize("name", program)
def test_changes_of_geometry(name):
    same(program[name])
