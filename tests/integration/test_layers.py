"""Recurrent and attention layers of ``torch.nn``."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import same
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import lazytensor as lt
from lazytensor.trace.ir import walk
from lazytensor.trace.storage import value_of

# On any device but the CPU, PyTorch computes a cell's gates by matrix products and adds the biases afterwards; the CPU
# adds the bias within the product, which rounds once less.
CELLS = 2e-6


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options", [{}, {"num_layers": 2, "bidirectional": True}, {"batch_first": True, "bias": False}]
)
def test_recurrent_layers(kind: Any, options: dict[str, Any]) -> None:
    def program(device: str) -> Any:
        layer = kind(3, 4, **options).to(device)
        x = torch.randn(5, 2, 3).to(device).requires_grad_()
        output, state = layer(x)
        output.sum().backward()
        return output, state

    same(program, close=CELLS, versions=False)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_packed_sequences(kind: Any) -> None:
    def program(device: str) -> Any:
        layer = kind(3, 4, num_layers=2).to(device)
        x = torch.randn(5, 3, 3).to(device).requires_grad_()
        packed = pack_padded_sequence(x, torch.tensor([3, 5, 2]), enforce_sorted=False)
        output, state = layer(packed)
        padded, lengths = pad_packed_sequence(output)
        padded.sum().backward()
        return padded, lengths.tolist(), state

    same(program, close=CELLS, versions=False)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind: Any) -> None:
    def program(device: str) -> Any:
        cell = kind(3, 4).to(device)
        x = torch.randn(2, 3).to(device)
        state = None
        for _ in range(3):
            state = cell(x, state)
        (state[0] if isinstance(state, tuple) else state).sum().backward()
        return state

    same(program, close=CELLS, versions=False)


def test_dropout_between_recurrent_layers() -> None:
    def program(device: str) -> Any:
        layer = nn.GRU(3, 4, num_layers=2, dropout=0.5).to(device)
        output, _ = layer(torch.randn(5, 2, 3).to(device))
        return output

    same(program, close=CELLS, versions=False)


def names(tensor: torch.Tensor) -> list[str]:
    return [node.op.name for node in walk([value_of(tensor)])]


ATTENTION = {
    "plain": {},
    "causal": {"is_causal": True},
    "mask of numbers": {"attn_mask": torch.linspace(-1, 1, 25).view(5, 5).clone()},
    "mask of booleans": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).tril()},
    "scale": {"scale": 0.3},
}


@pytest.mark.parametrize("kind", ATTENTION)
def test_attention_is_one_op(kind: str) -> None:
    def program(device: str) -> Any:
        q, k, v = (torch.randn(2, 2, 5, 4).to(device).requires_grad_() for _ in range(3))
        options = {n: o.to(device) if isinstance(o, torch.Tensor) else o for n, o in ATTENTION[kind].items()}
        out = F.scaled_dot_product_attention(q, k, v, **options)
        if device == "ltc":
            recorded = names(out)
            assert sum("scaled_dot_product" in n for n in recorded) == 1
            assert not any("softmax" in n or "bmm" in n or "matmul" in n for n in recorded)
        out.sum().backward()
        return out

    same(program)


def test_attention_with_dropout_and_grouped_queries() -> None:
    def program(device: str) -> Any:
        q = torch.randn(2, 4, 5, 4).to(device)
        k, v = (torch.randn(2, 2, 5, 4).to(device) for _ in range(2))
        grouped = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
        dropped = F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)
        return grouped, dropped

    same(program)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("weights", [True, False])
def test_multihead_attention(training: bool, weights: bool) -> None:
    def program(device: str) -> Any:
        layer = nn.MultiheadAttention(8, 2, batch_first=True).to(device).train(training)
        x, y = (torch.randn(2, 5, 8).to(device) for _ in range(2))
        with torch.set_grad_enabled(training):
            own = layer(x, x, x, need_weights=weights)
            other = layer(x, y, y, need_weights=weights)
            masked = layer(x, x, x, key_padding_mask=torch.tensor([[False] * 4 + [True]] * 2).to(device))
        return own, other, masked

    same(program, versions=False)


@pytest.mark.parametrize("training", [True, False])
def test_transformer_encoder(training: bool) -> None:
    def program(device: str) -> Any:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        model = nn.TransformerEncoder(layer, 2).to(device).train(training)
        x = torch.randn(2, 5, 8).to(device)
        with torch.set_grad_enabled(training):
            y = model(x)
            causal = model(x, mask=nn.Transformer.generate_square_subsequent_mask(5, device=device), is_causal=True)
        if training:
            y.sum().backward()
        return y, causal

    same(program, versions=False)


def test_transformer_encoder_with_padding_in_evaluation() -> None:
    """The CPU goes on with a nested tensor, which leaves zeros at the padding; only what is not padding is compared.

    Its nested softmax and layer norm also add up in another order, hence the tolerance.
    """

    def program(device: str) -> Any:
        model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).to(device).eval()
        padding = torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
        with torch.no_grad():
            return model(torch.randn(2, 5, 8).to(device), src_key_padding_mask=padding.to(device)).cpu()[~padding]

    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        expected = program("cpu")
        torch.manual_seed(0)
        torch.testing.assert_close(program("ltc"), expected, rtol=1e-5, atol=1e-5)


def test_full_transformer() -> None:
    def program(device: str) -> Any:
        model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True).to(device)
        y = model(torch.randn(2, 4, 8).to(device), torch.randn(2, 3, 8).to(device))
        y.sum().backward()
        return y

    same(program, versions=False)


@pytest.mark.parametrize(
    ("layers", "bidirectional", "batch_first", "bias"), [(1, False, True, True), (2, True, False, False)]
)
def test_an_lstm_is_a_few_operations_and_trains_bit_for_bit(
    layers: int, bidirectional: bool, batch_first: bool, bias: bool
) -> None:
    """The CPU's own kernel runs each layer, so the bits are eager's, and the graph does not grow with the length."""

    def train(device: str) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.LSTM(6, 8, layers, bias, batch_first, 0.25, bidirectional).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            output, (hidden, cell) = model(torch.randn(12, 12, 6).to(device))
            optimizer.zero_grad()
            (output.square().mean() + hidden.mean() + cell.mean()).backward()
            optimizer.step()
        assert device == "cpu" or lt.explain().data["ops"] < 150
        return [p.detach().cpu() for p in model.parameters()]

    assert all(map(torch.equal, train("ltc"), train("cpu")))
