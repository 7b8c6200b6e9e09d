"""What eager rejects is rejected when it is recorded: the same exception with the same text, at the user's line."""

from __future__ import annotations

import sys
import traceback

import pytest
import torch
import torch.nn.functional as F
from support import bits, run
from torch import nn


def f(device, *size):
    return torch.ones(size, device=device)


def i(device, *values):
    return torch.tensor(values, device=device)


CALLS = {
    # shapes
    "add": lambda d: f(d, 2, 3) + f(d, 4),
    "add_": lambda d: f(d, 3).add_(f(d, 2, 3)),
    "mul_broadcast_in_place": lambda d: f(d, 1).mul_(f(d, 2)),
    "mm": lambda d: f(d, 2, 3) @ f(d, 2, 3),
    "mm_dim": lambda d: torch.mm(f(d, 2), f(d, 2)),
    "bmm": lambda d: torch.bmm(f(d, 2, 3, 4), f(d, 3, 4, 2)),
    "mv": lambda d: f(d, 2, 3).mv(f(d, 2)),
    "dot": lambda d: torch.dot(f(d, 2), f(d, 3)),
    "addmm": lambda d: torch.addmm(f(d, 5), f(d, 2, 3), f(d, 3, 4)),
    "matmul": lambda d: torch.matmul(f(d, 3, 2, 3), f(d, 2, 3, 2)),
    "linear": lambda d: F.linear(f(d, 2, 3), f(d, 4, 4)),
    "linear_bias": lambda d: F.linear(f(d, 2, 3), f(d, 4, 3), f(d, 5)),
    "conv1d": lambda d: F.conv1d(f(d, 1, 2, 5), f(d, 3, 4, 2)),
    "conv2d": lambda d: F.conv2d(f(d, 1, 2, 5, 5), f(d, 3, 2, 7, 7)),
    "conv2d_groups": lambda d: F.conv2d(f(d, 1, 3, 5, 5), f(d, 3, 3, 2, 2), groups=2),
    "max_pool": lambda d: F.max_pool2d(f(d, 1, 1, 2, 2), 3),
    "avg_pool": lambda d: F.avg_pool2d(f(d, 1, 1, 2, 2), 3),
    "view": lambda d: f(d, 2, 3).view(4),
    "view_stride": lambda d: f(d, 2, 3).t().view(6),
    "reshape": lambda d: f(d, 2, 3).reshape(5),
    "reshape_two_unknown": lambda d: f(d, 2, 3).reshape(-1, -1),
    "expand": lambda d: f(d, 2, 3).expand(2, 4),
    "permute": lambda d: f(d, 2, 3).permute(0, 0),
    "permute_count": lambda d: f(d, 2, 3).permute(0),
    "transpose": lambda d: f(d, 2, 3).transpose(0, 5),
    "t": lambda d: f(d, 2, 3, 4).t(),
    "squeeze": lambda d: f(d, 2).squeeze(4),
    "unsqueeze": lambda d: f(d, 2).unsqueeze(4),
    "select": lambda d: f(d, 2, 3)[5],
    "select_dim": lambda d: f(d, 2, 3).select(3, 0),
    "slice_step": lambda d: f(d, 4)[::-1],
    "narrow": lambda d: f(d, 4).narrow(0, 2, 5),
    "too_many_indices": lambda d: f(d, 4)[0, 0],
    "index_shape": lambda d: f(d, 4)[i(d, 0, 1), i(d, 0, 1)],
    "split_sizes": lambda d: f(d, 5).split([2, 2]),
    "chunk": lambda d: f(d, 5).chunk(0),
    "unbind": lambda d: torch.tensor(1.0, device=d).unbind(),
    "unfold": lambda d: f(d, 4).unfold(0, 5, 1),
    "diagonal": lambda d: f(d, 4).diagonal(),
    "cat": lambda d: torch.cat([f(d, 2, 3), f(d, 2, 4)]),
    "cat_dim": lambda d: torch.cat([f(d, 2), f(d, 2)], dim=2),
    "cat_empty": lambda d: torch.cat([]),
    "stack": lambda d: torch.stack([f(d, 2), f(d, 3)]),
    "sum_dim": lambda d: f(d, 2, 3).sum(4),
    "mean_dtype": lambda d: i(d, 1, 2).mean(),
    "max_empty": lambda d: f(d, 0).max(),
    "argmax_empty": lambda d: f(d, 0).argmax(),
    "softmax_dim": lambda d: f(d, 2).softmax(3),
    "cumsum_dim": lambda d: f(d, 2).cumsum(3),
    "gather_dims": lambda d: f(d, 2, 3).gather(1, i(d, 0)),
    "gather_dtype": lambda d: f(d, 2).gather(0, f(d, 2)),
    "scatter": lambda d: f(d, 2, 3).scatter(0, i(d, 0), f(d, 1)),
    "index_select": lambda d: f(d, 2, 3).index_select(0, f(d, 2)),
    "index_add": lambda d: f(d, 2).index_add(0, i(d, 0, 1), f(d, 3)),
    "masked_fill_dtype": lambda d: f(d, 2).masked_fill(f(d, 2), 1),
    "where_dtype": lambda d: torch.where(f(d, 2), f(d, 2), f(d, 2)),
    "copy_": lambda d: f(d, 3).copy_(f(d, 2)),
    "fill_tensor": lambda d: f(d, 3).fill_(f(d, 2)),
    "layer_norm": lambda d: F.layer_norm(f(d, 2, 3), (4,)),
    "group_norm": lambda d: F.group_norm(f(d, 2, 3), 2),
    "batch_norm_one_value": lambda d: F.batch_norm(f(d, 1, 3), None, None, training=True),
    "batch_norm_size": lambda d: F.batch_norm(f(d, 4, 3), f(d, 2), f(d, 2), training=True),
    "cross_entropy_shape": lambda d: F.cross_entropy(f(d, 3, 4), i(d, 0, 1)),
    "nll_dtype": lambda d: F.nll_loss(f(d, 2, 4), f(d, 2)),
    "bce_shape": lambda d: F.binary_cross_entropy(f(d, 2), f(d, 3)),
    "mse_shape": lambda d: F.mse_loss(f(d, 2), f(d, 3)),
    "kl_div": lambda d: F.kl_div(f(d, 2), f(d, 3)),
    "pad": lambda d: F.pad(f(d, 1, 2, 2), (3, 3), mode="reflect"),
    "interpolate": lambda d: F.interpolate(f(d, 1, 1, 2, 2), size=(0, 0)),
    "embedding_dtype": lambda d: F.embedding(f(d, 2), f(d, 4, 3)),
    "attention": lambda d: F.scaled_dot_product_attention(f(d, 1, 2, 3, 4), f(d, 1, 2, 3, 5), f(d, 1, 2, 3, 4)),
    "einsum": lambda d: torch.einsum("ij,jk", f(d, 2, 3), f(d, 4, 5)),
    "tensordot": lambda d: torch.tensordot(f(d, 2, 3), f(d, 2, 3), 1),
    "cholesky": lambda d: torch.linalg.cholesky(f(d, 2, 3)),
    "inv": lambda d: torch.linalg.inv(f(d, 2, 3)),
    "solve": lambda d: torch.linalg.solve(f(d, 2, 2), f(d, 3, 2)),
    "fft": lambda d: torch.fft.fft(f(d, 2), dim=3),
    "topk": lambda d: f(d, 3).topk(5),
    "kthvalue": lambda d: f(d, 3).kthvalue(5),
    "repeat": lambda d: f(d, 2, 2).repeat(2),
    "tile_negative": lambda d: f(d, 2).repeat(-1),
    "roll": lambda d: f(d, 2).roll((1, 2), (0,)),
    "flip": lambda d: f(d, 2).flip(3),
    "tril": lambda d: f(d, 2).tril(),
    "cross": lambda d: torch.linalg.cross(f(d, 2), f(d, 2)),
    "zeros_negative": lambda d: torch.zeros(-1, device=d),
    "arange_bounds": lambda d: torch.arange(3, 0, device=d),
    "arange_step": lambda d: torch.arange(0, 3, 0, device=d),
    "linspace_steps": lambda d: torch.linspace(0, 1, -1, device=d),
    "eye_negative": lambda d: torch.eye(-1, device=d),
    "randint_bounds": lambda d: torch.randint(5, 2, (3,), device=d),
    "randperm_negative": lambda d: torch.randperm(-1, device=d),
    "normal_std": lambda d: torch.empty(3, device=d).normal_(0, -1),
    "bernoulli_p": lambda d: torch.empty(3, device=d).bernoulli_(2.0),
    "dropout_p": lambda d: F.dropout(f(d, 2), 1.5),
    "multinomial_count": lambda d: torch.multinomial(f(d, 3), 5),
    # dtypes
    "in_place_dtype": lambda d: i(d, 1, 2).add_(0.5),
    "in_place_div_int": lambda d: i(d, 1, 2).div_(2),
    "bool_sub": lambda d: torch.tensor([True], device=d) - torch.tensor([True], device=d),
    "bool_neg": lambda d: -torch.tensor([True], device=d),
    "bitwise_float": lambda d: f(d, 2) & f(d, 2),
    "shift_float": lambda d: f(d, 2) << 1,
    "mm_dtypes": lambda d: f(d, 2, 2) @ i(d, 1, 2, 3, 4).view(2, 2),
    "linear_dtypes": lambda d: F.linear(f(d, 2, 2), f(d, 2, 2).double()),
    "complex_compare": lambda d: torch.tensor([1j], device=d) > 0,
    "sqrt_out_int": lambda d: torch.sqrt(f(d, 2), out=i(d, 1, 2)),
    "conv_dtype": lambda d: F.conv1d(i(d, 1, 2, 3).view(1, 1, 3), f(d, 1, 1, 2)),
    "requires_grad_int": lambda d: i(d, 1).requires_grad_(),
    "grad_shape": lambda d: (f(d, 2).requires_grad_() * 2).backward(),
    "grad_mismatch": lambda d: (f(d, 2).requires_grad_() * 2).backward(f(d, 3)),
    "no_grad_fn": lambda d: f(d, 2).sum().backward(),
    "to_unknown_dtype": lambda d: f(d, 2).to("nowhere"),
    # attributes
    "item": lambda d: f(d, 2).item(),
    "bool": lambda d: bool(f(d, 2)),
    "bool_empty": lambda d: bool(f(d, 0)),
    "iterate": lambda d: list(torch.tensor(1.0, device=d)),
    "len": lambda d: len(torch.tensor(1.0, device=d)),
    "as_strided_bounds": lambda d: f(d, 4).as_strided((3, 3), (2, 2)),
    "as_strided_negative": lambda d: f(d, 4).as_strided((2,), (-1,)),
    "set_size": lambda d: torch.zeros(2, device=d).resize_(-1),
    "foreach_lengths": lambda d: torch._foreach_add([f(d, 2)], [f(d, 2), f(d, 2)]),
    "foreach_empty": lambda d: torch._foreach_add_([], 1),
    "foreach_shape": lambda d: torch._foreach_add_([f(d, 2)], [f(d, 3)]),
    "out_dtype": lambda d: torch.mm(f(d, 2, 2), f(d, 2, 2), out=f(d, 2, 2).long()),
    "module_shape": lambda d: nn.Linear(3, 2).to(d)(f(d, 2, 4)),
    "lstm_shape": lambda d: nn.LSTM(3, 2).to(d)(f(d, 2, 1, 4)),
    "transformer_shape": lambda d: nn.MultiheadAttention(4, 2).to(d)(f(d, 2, 1, 3), f(d, 2, 1, 3), f(d, 2, 1, 3)),
}


@pytest.mark.parametrize("name", CALLS)
def test_error_is_eagers_when_recorded(name):
    call = CALLS[name]

    def program(device):
        call(device)

    eager = run(program, "cpu")
    assert eager.error is not None, "the table holds wrong calls only"
    for attempt in ("when new", "when known"):
        lazy = run(program, "ltc")
        assert type(lazy.error) is type(eager.error), (attempt, eager.error, lazy.error)
        assert str(lazy.error) == str(eager.error), attempt


def test_error_points_to_the_users_line():
    x, y = torch.ones(2, 3, device="ltc"), torch.ones(4, device="ltc")
    try:
        here = sys._getframe().f_lineno + 1
        x + y
    except RuntimeError as error:
        frames = traceback.extract_tb(error.__traceback__)
        assert frames[0].filename == __file__ and frames[0].lineno == here
    else:
        raise AssertionError("it did not raise")


def test_nothing_changes_when_an_op_is_refused():
    x = torch.arange(4.0, device="ltc")
    kept = x + 1
    pending = x * 2
    for wrong in (lambda: x.add_(torch.ones(3, device="ltc")), lambda: torch.mm(x, x), lambda: x.view(3)):
        with pytest.raises(RuntimeError):
            wrong()
    pending.add_(1)
    assert bits(kept) == bits(torch.arange(4.0) + 1)
    assert bits(pending) == bits(torch.arange(4.0) * 2 + 1)
    assert bits(x) == bits(torch.arange(4.0))
