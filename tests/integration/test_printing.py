"""Printing a tensor on ltc is one cut, and shows what CPU eager shows."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lazytensor as lt
from lazytensor.execute import cut

TENSORS = {
    "float": lambda: torch.tensor([[1.5, -2.0], [float("nan"), float("inf")]]),
    "int": lambda: torch.arange(3),
    "bool": lambda: torch.tensor([True, False]),
    "complex": lambda: torch.tensor([1 + 2j]),
    "bfloat16": lambda: torch.ones(2, dtype=torch.bfloat16),
    "large": lambda: torch.arange(3000.0).view(3, 1000),
    "number": lambda: torch.tensor(3.25),
    "empty": lambda: torch.empty(0, 2),
    "small values": lambda: torch.tensor([1e-8, 1.0]),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_the_text_is_eagers_with_the_device_added(kind: str) -> None:
    x = TENSORS[kind]()
    text = repr(x.to("ltc"))
    assert "device='ltc:0'" in text
    assert "".join(text.replace("device='ltc:0'", "").split()).replace(",)", ")").replace(",,", ",") == "".join(
        repr(x).split()
    )


def test_one_cut_one_graph_no_fallback() -> None:
    x = torch.arange(12.0, device="ltc").view(3, 4).sin()
    cuts, graphs = cut.hits + cut.misses, cut.misses
    before = set(lt.metrics.counter_names())
    text = f"{x} {x[1]} {x.t()}"
    assert "0.8415" in text
    assert cut.hits + cut.misses == cuts + 1
    assert cut.misses <= graphs + 1
    assert not {n for n in set(lt.metrics.counter_names()) - before if n.startswith("aten::")}


def test_autograd_is_shown() -> None:
    x = torch.ones(2, device="ltc", requires_grad=True)
    assert repr(x) == "tensor([1., 1.], device='ltc:0', requires_grad=True)"
    assert repr(x * 2) == "tensor([2., 2.], device='ltc:0', grad_fn=<MulBackward0>)"
    assert repr(nn.Parameter(x.detach())).startswith("Parameter containing:\ntensor([1., 1.], device='ltc:0'")


def test_formatting_and_str_of_numbers() -> None:
    x = torch.tensor(2.5, device="ltc")
    assert f"{x:.2f}" == "2.50"
    assert str(nn.Linear(2, 2).to("ltc")) == "Linear(in_features=2, out_features=2, bias=True)"
