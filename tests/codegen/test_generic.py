"""The generic kernel records the very same nodes as the generated ones, which is what makes their times comparable."""

from __future__ import annotations

import pytest
import torch

import lazytensor as lt
from lazytensor.bench import codegen as bench
from lazytensor.codegen.generic import GenericKernel
from lazytensor.trace.storage import value_of

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("overload", "call"),
    [
        (aten.mul.Tensor, lambda f, x: f(x, x)),
        (aten.sum.dim_IntList, lambda f, x: f(x, [1], True)),
        (aten.cat.default, lambda f, x: f([x, x], 1)),
        (aten.transpose.int, lambda f, x: f(x, 0, 1)),
        (aten.ones_like.default, lambda f, x: f(x, dtype=torch.float64)),
        (aten.split.Tensor, lambda f, x: f(x, 1)[1]),
        (aten.topk.default, lambda f, x: f(x, 1)[0]),
    ],
)
def test_it_records_the_same_node(overload, call) -> None:
    x = torch.arange(6.0).reshape(2, 3).to("ltc")
    generated, generic = call(overload, x), call(GenericKernel(overload), x)
    assert value_of(generic) is value_of(generated)
    assert generic.tolist() == generated.tolist()


def test_it_writes_in_place() -> None:
    add_ = GenericKernel(aten.add_.Tensor, "aten::add.Tensor")
    for _ in range(2):
        x = torch.ones(3, device="ltc")
        assert add_(x[1:], torch.ones(2, device="ltc")).tolist() == [2, 2]
        assert x.tolist() == [1, 2, 2]


def test_the_bench_measures_both_and_leaves_the_devices_kernels_in_force() -> None:
    rows = bench.per_op(turns=1)
    assert {row["op"].partition(",")[0] for row in rows} >= {"add.Tensor", "add_.Tensor", "mm", "cat", "topk"}
    assert all(row["generated_us"] > 0 and row["generic_us"] > 0 for row in rows)
    x = torch.ones(2, device="ltc")
    assert (x + x).tolist() == [2, 2]
    lt.sync()
