"""Composite ops whose C++ form takes another path on an out-of-tree device than on the CPU.

``COMPOSITES`` are registered for the autograd key, where composite ops are taken apart: each is written as the CPU
takes it apart, so that the same arithmetic is recorded.  ``ANSWERS`` stand in the place of recording kernels: ops that
PyTorch's own composites ask, and that need nothing to be recorded or run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

COMPOSITES: dict[str, Callable[..., Any]] = {}
ANSWERS: dict[str, Callable[..., Any]] = {}


def _into(table: dict[str, Callable[..., Any]], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        table[name] = function
        return function

    return register


def composite(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function for the autograd key of this overload."""
    return _into(COMPOSITES, name)


def answer(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as the device's kernel of this overload."""
    return _into(ANSWERS, name)


@composite("dropout")
def dropout(input: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """Other devices take ``native_dropout``, which multiplies by 1/(1-p) after the mask; the CPU divides the mask
    first.

    Symptom: losses differed from CPU eager's in the last bit.
    """
    if not train or p == 0 or input.numel() == 0:
        return input
    _check(p)
    if p == 1:
        return input * torch.zeros((), dtype=input.dtype, device=input.device)
    return input * _noise(input, p)


@composite("dropout_")
def dropout_(self: torch.Tensor, p: float, train: bool) -> torch.Tensor:
    """The same in place."""
    if not train or p == 0 or self.numel() == 0:
        return self
    _check(p)
    if p == 1:
        return self.mul_(torch.zeros((), dtype=self.dtype, device=self.device))
    return self.mul_(_noise(self, p))


def _check(p: float) -> None:
    if p < 0 or p > 1:
        raise RuntimeError(f"dropout probability has to be between 0 and 1, but got {p:g}")


def _noise(like: torch.Tensor, p: float) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty_like(like).bernoulli_(1 - p).div_(1 - p)


_LSTM = 2  # the mode of mkldnn_rnn_layer


@composite("lstm.input")
def lstm(
    input: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> Any:
    """One op for each layer and direction, oneDNN's, as on the CPU; other devices take every time step apart.

    Symptom: a step of an LSTM over 32 places was 1,265 operations and took 13 times as long as eager.
    """
    directions = 2 if bidirectional else 1
    stride = 4 if has_biases else 2
    if (
        input.dtype is not torch.float32
        or input.numel() == 0
        or input.dim() != 3
        or len(hx) != 2
        or len(params) != stride * num_layers * directions  # else the hidden state is projected
        or not torch.backends.mkldnn.enabled
        or any(t.device != input.device for t in (*hx, *params))
    ):
        taken_apart = torch._C.DispatchKey.CompositeImplicitAutograd
        arguments = (input, hx, params, has_biases, num_layers, dropout, train, bidirectional, batch_first)
        return torch.ops.aten.lstm.input._op_dk(taken_apart, *arguments)
    hidden = hx[0].size(2)
    current = (input.transpose(0, 1) if batch_first else input).contiguous()
    first, cells = hx[0].contiguous(), hx[1].contiguous()
    last: list[torch.Tensor] = []
    last_cells: list[torch.Tensor] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            index = layer * directions + direction
            weights = params[index * stride : (index + 1) * stride]
            if not has_biases:
                weights = [*weights, *[torch.zeros(weights[0].size(0), device=input.device) for _ in range(2)]]
            output, hy, cy, _workspace = torch.ops.aten.mkldnn_rnn_layer(
                current,
                *weights,
                first[index],
                cells[index],
                direction > 0,
                [],
                _LSTM,
                hidden,
                num_layers,
                has_biases,
                bidirectional,
                False,
                train,
            )
            outputs.append(output)
            last.append(hy)
            last_cells.append(cy)
        current = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < num_layers - 1:
            current = torch.dropout(current, dropout, True)
    return current.transpose(0, 1) if batch_first else current, torch.stack(last), torch.stack(last_cells)


@composite("_thnn_fused_lstm_cell")
def lstm_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    cx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Other devices take one fused op for an LSTM cell, for which the CPU has no kernel.

    Symptom: ``Could not run 'aten::_thnn_fused_lstm_cell' with arguments from the 'CPU' backend``.
    """
    gates = _with_bias(hidden_gates, hidden_bias) + _with_bias(input_gates, input_bias)
    in_gate, forget_gate, cell_gate, out_gate = gates.unsafe_chunk(4, 1)
    cy = forget_gate.sigmoid() * cx + in_gate.sigmoid() * cell_gate.tanh()
    return out_gate.sigmoid() * cy.tanh(), cy, gates


@composite("_thnn_fused_gru_cell")
def gru_cell(
    input_gates: torch.Tensor,
    hidden_gates: torch.Tensor,
    hx: torch.Tensor,
    input_bias: torch.Tensor | None = None,
    hidden_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a GRU cell."""
    hidden = _with_bias(hidden_gates, hidden_bias)
    reset_h, update_h, new_h = hidden.unsafe_chunk(3, 1)
    reset_i, update_i, new_i = _with_bias(input_gates, input_bias).unsafe_chunk(3, 1)
    reset = (reset_h + reset_i).sigmoid()
    update = (update_h + update_i).sigmoid()
    new = (new_i + new_h * reset).tanh()
    return (hx - new) * update + new, hidden


def _with_bias(gates: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return gates if bias is None else gates + bias


@composite("scaled_dot_product_attention")
def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """PyTorch asks a C++ table, which has no row for this device, which attention kernel to take, and takes none.

    Symptom: attention was recorded as its dozen mathematical steps.  Here the CPU is asked, for tensors that look like
    these.
    """
    flash = _choice(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa) == _FLASH
    if not flash:
        return torch._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(attn_mask.logical_not(), -float("inf"))
    return torch._scaled_dot_product_flash_attention_for_cpu(  # type: ignore[attr-defined,no-any-return]
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )[0]


_FLASH = 1
_fused_sdp_choice: Any = torch._fused_sdp_choice  # its type stub misses that the mask may be None
_choices: dict[Any, int] = {}


def _choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> int:
    """The CPU's choice for this call; asked once per geometry."""
    tensors = (query, key, value, mask)
    looks = tuple(None if t is None else (tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors)
    asked = (looks, dropout_p, is_causal, enable_gqa, torch.backends.cuda.flash_sdp_enabled(), torch.is_grad_enabled())
    known = _choices.get(asked)
    if known is None:
        stands = [
            None
            if t is None
            else torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="cpu").requires_grad_(t.requires_grad)
            for t in tensors
        ]
        known = _choices[asked] = _fused_sdp_choice(*stands, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    return known


# --- answers ----------------------------------------------------------------------------------------------------------


@answer("is_same_size")
def is_same_size(self: torch.Tensor, other: torch.Tensor) -> bool:
    """Forward-mode AD asks it of every tangent.

    Symptom: ``torch.func.jvp`` fell back, and so cut, for each op.
    """
    return self.shape == other.shape


@answer("_has_same_storage_numel")
def has_same_storage_numel(self: torch.Tensor, other: torch.Tensor) -> bool:
    """The same."""
    mine, theirs = (t.untyped_storage().nbytes() // t.element_size() for t in (self, other))
    return mine == theirs


@answer("_efficientzerotensor")
def zero_tensor(
    size: Any, *, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> torch.Tensor:
    """Forward-mode AD's zeros without memory are a kind of tensor of its own on the CPU, which a graph cannot return.

    Symptom: ``torch.func.hessian``: "Attempted to access the data pointer on an invalid python storage".
    """
    return torch.ops.aten.zeros.default(size, dtype=dtype, device=device)  # type: ignore[no-any-return]


@answer("_nested_tensor_from_mask_left_aligned")
def left_aligned(t: torch.Tensor, mask: torch.Tensor) -> bool:
    """``nn.TransformerEncoder`` asks whether it may go on with a nested tensor, a layout that cannot be recorded.

    Symptom: in evaluation mode with a padding mask: "Input should be a 3D tensor, N * L * D".  No keeps it on its dense
    path.
    """
    return False


@composite("kron.out")
def kron_out(self: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
    """PyTorch writes through ``_unsafe_view``, which on the CPU is an alias although its schema says it is not.

    Symptom: ``torch.kron(a, b, out=c)`` left c as it was.
    """
    result = torch.kron(self, other)
    if out.shape != result.shape:
        out.resize_(result.shape)
    return out.copy_(result)
