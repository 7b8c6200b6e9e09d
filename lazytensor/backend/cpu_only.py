"""Operators that only the CPU has kernels for, on the tensors of an accelerator.

Operations are recorded as the CPU would run them, whatever runs the graph later.  Fused attention is then written out
in operators that every device has.  What is left (oneDNN's LSTM) goes through the host, and its graph is not compiled.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lazytensor.trace.ir import Op

_MARKS = ("mkldnn", "onednn", "fbgemm", "nnpack", "_for_cpu")


def instead(op: Op) -> Callable[..., Any] | None:
    """What to call on an accelerator's tensors instead of this operator; None if it can be called itself."""
    if not any(mark in op.name for mark in _MARKS):
        return None
    return FORMS.get(op.name) or functools.partial(_through_host, op.overload)


def written_out(op: Op) -> bool:
    """Whether that is made of operators that the accelerator has."""
    return op.name in FORMS


def _through_host(overload: Any, *args: Any, **kwargs: Any) -> Any:
    device = next(a.device for a in args if isinstance(a, torch.Tensor))
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), (args, kwargs))
    return tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), overload(*args, **kwargs))


def _weights(
    query: torch.Tensor, key: torch.Tensor, is_causal: bool, attn_mask: torch.Tensor | None, scale: float | None
) -> tuple[torch.Tensor, float]:
    """Attention's weights before the softmax, as precise as the CPU's kernel has them, and the scale."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    scores = _wide(query) @ _wide(key).transpose(-2, -1) * scale
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(seen.logical_not(), float("-inf"))
    return (scores if attn_mask is None else scores + attn_mask), scale


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dtype is torch.float64 else tensor.float()


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu``: the result and the logarithm of each row's sum.  No dropout:
    the CPU's kernel has none either.
    """
    scores, _ = _weights(query, key, is_causal, attn_mask, scale)
    total = scores.logsumexp(-1)
    total = total.masked_fill(total == float("-inf"), 0.0)  # a row that sees nothing is nothing, not nan
    return ((scores - total.unsqueeze(-1)).exp() @ _wide(value)).to(query.dtype), total


def attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    logsumexp: torch.Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``_scaled_dot_product_flash_attention_for_cpu_backward``: the gradients of query, key and value."""
    scores, factor = _weights(query, key, is_causal, attn_mask, scale)
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    slope = _wide(grad_out)
    inner = (slope * _wide(out)).sum(-1, keepdim=True)
    slopes = weights * (slope @ _wide(value).transpose(-2, -1) - inner) * factor
    made = slopes @ _wide(key), slopes.transpose(-2, -1) @ _wide(query), weights.transpose(-2, -1) @ slope
    return made[0].to(query.dtype), made[1].to(key.dtype), made[2].to(value.dtype)


FORMS: dict[str, Callable[..., Any]] = {
    "aten::_scaled_dot_product_flash_attention_for_cpu": attention,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": attention_backward,
}
