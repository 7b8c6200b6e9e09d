"""Aliasing is exactly eager's: views, writes through them, and the errors of both."""

from __future__ import annotations

import pytest
import torch
from support import Programs, numbers, same
from torch import nn

program = Programs()


# --- views of views -------------------------------------------------------------------------------------------------


@program
def a_write_to_the_base_shows_in_every_view(device):
    x = numbers(device, 4, 6)
    row, column, block, flat = x[1], x[:, 2], x[1:3, ::2], x.view(-1)
    turned = block.t()
    x.mul_(2).add_(1)


@program
def a_write_through_a_view_of_a_view_of_a_view(device):
    x = numbers(device, 4, 6)
    a = x[1:]
    b = a.t()
    c = b[::2]
    d = c.unsqueeze(0)
    d.add_(100)
    b[1] = -1
    a.select(1, 4).fill_(7)


@program
def views_taken_before_and_after_a_write(device):
    x = numbers(device, 3, 4)
    before = x[1]
    x += 1
    after = x[1]
    before *= 2
    copy = before.clone()
    after -= 3


@program
def views_that_outlive_their_base(device):
    x = numbers(device, 3, 4)
    v = x[1]
    w = v[1:]
    del x
    w.fill_(9)


@program
def a_base_reached_only_through_a_view(device):
    v = numbers(device, 3, 4)[1]
    v += 1
    base = v._base
    other = base[1]
    base.mul_(2)


@program
def slices_with_steps_and_negative_indices(device):
    x = numbers(device, 10)
    x[1:8:3] = 5
    x[-3:] += 1
    x[::2][1:] *= 10
    v = x[2:-1:2]


@program
def reads_between_writes(device):
    x = numbers(device, 2, 3)
    v = x.t()
    first = v.tolist()
    v.add_(1)
    second = x.sum().item()
    x[0] = 0
    third = v.tolist()
    v[0].sub_(4)


@program
def narrow_movedim_flatten_unflatten_swapaxes(device):
    x = numbers(device, 2, 3, 4)
    a = x.narrow(1, 1, 2)
    b = x.movedim(0, 2)
    c = x.flatten(1)
    d = c.unflatten(1, (3, 4))
    e = x.swapaxes(0, 1)
    a.add_(1)
    b[0] = -5
    c.mul_(2)
    d[1].neg_()
    e.select(0, 2).zero_()


@program
def diagonal_views(device):
    x = numbers(device, 4, 4)
    x.diagonal().fill_(9)
    x.diagonal(1).add_(1)
    d = x.view(2, 2, 4).diagonal(dim1=0, dim2=1)
    d.mul_(3)


@program
def expanded_views(device):
    x = numbers(device, 3, 1)
    e = x.expand(3, 4)
    b = x.broadcast_to(2, 3, 1)
    y = e + 1
    x.add_(10)
    s = e.sum(1)


@program
def unfold_views(device):
    x = numbers(device, 8)
    u = x.unfold(0, 4, 4)
    u.mul_(2)
    w = x.unfold(0, 3, 2)
    total = w.sum(1)


@program
def split_chunk_unbind_tensor_split_views(device):
    x = numbers(device, 6, 4)
    a, b, c = x.split(2)
    d, e = x.chunk(2, dim=1)
    rows = x.unbind(0)
    p, q = x.split([1, 3], dim=1)
    h = x.tensor_split(3)
    a.add_(1)
    e.mul_(2)
    p.sub_(5)
    h[1].fill_(0)


@program
def split_with_a_negative_dim_written(device):
    x = numbers(device, 2, 6)
    a, b = x.split(3, dim=-1)
    b.fill_(1)
    c, d = x.split([2, 4], dim=-1)
    d.add_(1)
    u = x.unbind(-1)


@program
def unbind_outputs_may_not_be_written_under_autograd(device):
    x = numbers(device, 3, 4).requires_grad_()
    y = x * 1
    rows = y.unbind(0)
    rows[0].add_(1)


@program
def split_outputs_may_not_be_written_under_autograd(device):
    x = numbers(device, 4, 4).requires_grad_()
    y = x * 1
    a, b = y.chunk(2)
    a.mul_(2)


@program
def reshape_that_copies_and_reshape_that_views(device):
    x = numbers(device, 3, 4)
    v = x.reshape(4, 3)
    c = x.t().reshape(12)
    v[0] = -1
    c[0] = -2


@program
def view_as_real_and_complex(device):
    x = torch.complex(numbers(device, 3), numbers(device, 3) + 1)
    r = torch.view_as_real(x)
    r[:, 0] = 5
    y = numbers(device, 3, 2)
    c = torch.view_as_complex(y)
    c.mul_(1j)
    re, im = x.real, x.imag
    im.add_(1)


@program
def conjugate_views(device):
    x = torch.complex(numbers(device, 3), numbers(device, 3) + 1)
    c = x.conj()
    product = c * x
    x.add_(1j)
    again = c + 0
    i = c.imag
    resolved = c.resolve_conj()
    m = torch.complex(numbers(device, 2, 2), numbers(device, 2, 2) + 1)
    h = m.mH @ m
    n = i.neg()


@program
def writes_through_conjugate_views(device):
    x = torch.complex(numbers(device, 3), numbers(device, 3) + 1)
    c = x.conj()
    c.add_(1j)
    c[0] = 4 + 4j
    n = c.imag
    n.fill_(3)


@program
def view_of_another_dtype(device):
    x = numbers(device, 4)
    i = x.view(torch.int32)
    b = x.view(torch.uint8)
    i[0] = 1
    b[4:8] = 255
    d = x.view(torch.float64)
    x[3] = 2


@program
def dtype_view_of_a_slice(device):
    x = numbers(device, 8)
    h = x[2:6].view(torch.int16)
    h[:4] = 3
    w = x[4:].view(torch.int64)
    w.add_(1)


# --- writes ---------------------------------------------------------------------------------------------------------


@program
def out_arguments_into_tensors_and_views(device):
    x, y = numbers(device, 4), numbers(device, 4) + 1
    o = torch.zeros(4, device=device)
    torch.add(x, y, out=o)
    base = torch.zeros(3, 4, device=device)
    torch.mul(x, y, out=base[1])
    torch.sub(x, y, out=base.t()[:, 2])
    torch.mm(numbers(device, 2, 3), numbers(device, 3, 2), out=base[:2, ::2])
    values, where = torch.zeros(2, device=device), torch.zeros(2, dtype=torch.long, device=device)
    torch.max(numbers(device, 2, 3), 1, out=(values, where))
    same_in_and_out = torch.add(x, 1, out=x)
    wide = torch.zeros(4, dtype=torch.float64, device=device)
    torch.add(x, y, out=wide)


@program
def out_arguments_are_resized(device):
    x = numbers(device, 2, 3)
    o = torch.empty(0, device=device)
    torch.add(x, 1, out=o)
    p = torch.zeros(5, device=device)
    torch.mul(x, 2, out=p)


@program
def out_of_a_dtype_that_cannot_hold_the_result(device):
    o = torch.zeros(3, dtype=torch.long, device=device)
    torch.add(numbers(device, 3), 0.5, out=o)


@program
def out_that_overlaps_an_input_partially(device):
    x = numbers(device, 8)
    torch.add(x[:4], 1, out=x[2:6])


@program
def in_place_with_a_partially_overlapping_operand(device):
    x = numbers(device, 8)
    x[1:5].mul_(x[2:6])


@program
def in_place_with_the_same_memory_is_fine(device):
    x = numbers(device, 8)
    x.mul_(x)
    v = x[:4]
    v.add_(x[:4])
    v.sub_(x[4:])
    w = x.view(2, 4)
    w[0].copy_(w[1])


@program
def writing_an_expanded_tensor_is_refused(device):
    x = numbers(device, 1)
    x.expand(3).add_(1)


@program
def copying_into_an_expanded_tensor_is_refused(device):
    x = numbers(device, 1, 3)
    x.expand(2, 3).copy_(torch.ones(2, 3, device=device))


@program
def filling_an_expanded_tensor(device):
    x = numbers(device, 1, 3)
    x.expand(2, 3).fill_(4)


@program
def out_into_an_expanded_tensor_is_refused(device):
    x = numbers(device, 1)
    torch.add(numbers(device, 3), 1, out=x.expand(3))


@program
def writing_an_overlapping_as_strided_view(device):
    x = numbers(device, 6)
    x.as_strided((3, 3), (1, 1)).add_(1)


@program
def copy_between_dtypes_shapes_and_views(device):
    x = torch.zeros(3, 4, dtype=torch.int32, device=device)
    x.copy_(numbers(device, 4) + 0.7)
    x[1].copy_(torch.tensor([1.5, -2.5, 3.5, 0.1], device=device))
    x.t()[0].copy_(torch.ones(3, dtype=torch.bool, device=device))
    x[:, 1:3].copy_(x[:, 2:4].clone())
    y = numbers(device, 3)
    y.copy_(torch.tensor([9.0, 8.0, 7.0]))
    y[1:].copy_(torch.tensor([[5]]).reshape(1))


@program
def index_assignment(device):
    x = numbers(device, 4, 5)
    x[2] = torch.ones(5, device=device)
    x[:, 0] = 9
    x[[0, 2], [1, 3]] = -1.0
    x[torch.tensor([1, 3], device=device)] += 100
    x[..., -1] = torch.arange(4.0, device=device)
    x[1, 2] = 77
    x[None, 0, 1:3] = 3
    v = x[1:]
    v[torch.tensor([True, False, True], device=device)] = 0
    g = x[torch.tensor([0, 0, 1], device=device)]
    g.fill_(1)


@program
def scatter_index_fill_masked_fill_in_place(device):
    x = numbers(device, 3, 4)
    x.scatter_(1, torch.tensor([[0], [2], [3]], device=device), 50.0)
    x.index_fill_(0, torch.tensor([1], device=device), -3)
    x.masked_fill_(x > 20, 0.5)
    x[1:].index_add_(0, torch.tensor([0, 0], device=device), torch.ones(2, 4, device=device))
    x.t().tril_()
    y = numbers(device, 4)
    y[1:].put_(torch.tensor([0, 2], device=device), torch.tensor([9.0, 9.5], device=device))
    y.clamp_(min=0.5)


@program
def foreach_and_lists_written(device):
    a = [numbers(device, 3), numbers(device, 2, 2)]
    views = [a[0][1:], a[1].t()]
    torch._foreach_add_(a, 1.5)
    torch._foreach_mul_(views, [2.0, 3.0])
    torch._foreach_addcmul_(views, [v.clone() for v in views], [v.clone() for v in views], 0.5)
    b = torch._foreach_sqrt(a)
    torch._foreach_zero_(views[:1])
    norms = torch._foreach_norm(a)


@program
def the_same_tensor_twice_in_a_written_list(device):
    a = numbers(device, 3)
    torch._foreach_add_([a, a], 1)
    base = numbers(device, 4)
    torch._foreach_mul_([base[:2], base[2:]], 2)


@program
def overlapping_tensors_in_a_written_list(device):
    base = numbers(device, 4)
    torch._foreach_add_([base, base[1:]], 1)


@program
def swapped_and_rotated_values(device):
    a, b = numbers(device, 3), numbers(device, 3) + 10
    for _ in range(3):
        a, b = b, a + b
        a.mul_(0.5)
    temporary = a.clone()
    a.copy_(b)
    b.copy_(temporary)


@program
def storage_level_operations(device):
    x = numbers(device, 4)
    y = x.view(2, 2)
    z = torch.zeros_like(x)
    z.copy_(x)
    x.zero_()
    nbytes = x.untyped_storage().nbytes()
    size = x.untyped_storage().size()
    view_nbytes = y[1].untyped_storage().nbytes()


@program
def deepcopy_keeps_the_sharing(device):
    import copy

    x = numbers(device, 3, 4)
    v = x[1:]
    a, b = copy.deepcopy([x, v])
    b.add_(1)
    p = copy.deepcopy(nn.Parameter(numbers(device, 2)))
    p.data.add_(1)


@program
def no_sharing_after_clone_contiguous_or_to(device):
    x = numbers(device, 2, 3)
    a, b, c = x.clone(), x.contiguous(), x.to(torch.float32)
    d = x.t().contiguous()
    e = x.to(torch.float32, copy=True)
    x.add_(1)


@program
def lists_of_views_kept_over_many_writes(device):
    x = numbers(device, 5, 2)
    rows = [x[i] for i in range(5)]
    for i, row in enumerate(rows):
        row.add_(rows[(i + 1) % 5])
    total = x.sum()


@program
def squeeze_and_unsqueeze_writes(device):
    x = numbers(device, 2, 1, 3)
    x.squeeze(1).add_(1)
    x.squeeze()[0] = 9
    x.unsqueeze(-1).mul_(2)
    x.squeeze((1,)).t().sub_(1)
    x.view(6)[::5] = 100


@program
def real_strides_of_a_sliced_permuted_write(device):
    x = numbers(device, 2, 3, 4)
    v = x.permute(2, 0, 1)[1:3, :, ::2]
    v.copy_(torch.ones(2, 2, 2, device=device))
    w = v.transpose(0, 2).flatten()
    v.div_(3)


@pytest.mark.parametrize("name", program)
def test_aliasing(name):
    same(program[name])


def test_equal_values_in_two_storages_do_not_share_memory():
    """Two factories give one interned value; a partial overlap of the values is none of the memory."""

    def program(device):
        x, y = torch.zeros(8, device=device), torch.zeros(8, device=device)
        x[1:5].add_(y[2:6]).add_(1)
        torch._foreach_add_([x, y], 1)
        a, b = torch.ones(4, device=device), torch.ones(4, device=device)
        torch._foreach_mul_([a, b], [b.clone() * 3, a])
        torch.add(torch.ones(8, device=device)[:4], 1, out=torch.ones(8, device=device)[2:6])

    same(program)
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        x = torch.zeros(8, device="ltc")
        x[1:5].add_(x[2:6])
    with pytest.raises(RuntimeError, match="some elements of the input tensor and the written-to tensor"):
        x = torch.ones(8, device="ltc")
        torch.add(x[:4], 1, out=x[2:6])
