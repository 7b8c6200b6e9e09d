"""``torch.autocast("ltc")`` and ``GradScaler``: the dtypes and the values that ``torch.autocast("cpu")`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import same
from torch import nn

from lazytensor.device import autocast

CALLS: dict[str, Callable[[torch.Tensor], Any]] = {
    "matmul": lambda x: x @ x,
    "bmm": lambda x: torch.bmm(x[None], x[None]),
    "linear": lambda x: F.linear(x, x, x[0]),
    "conv": lambda x: F.conv2d(x[None, None], x[None, None, :2, :2]),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "float32 op of a low result": lambda x: F.mse_loss(x @ x, x),
    "float32 op of a low argument": lambda x: torch.prod(x.bfloat16(), dim=0),
    "promoted": lambda x: (torch.cat([x, x @ x]), torch.cat([x @ x, x.bfloat16()]), torch.stack([x.bfloat16(), x])),
    "no rule": lambda x: (x + 1, (x @ x) + 1, F.relu(x @ x), (x @ x).softmax(0)),
    "float64 is left alone": lambda x: x.double() @ x.double(),
    "integers are left alone": lambda x: x.long() @ x.long(),
    "layer norm": lambda x: F.layer_norm(x @ x, (4,)),
    "cross entropy": lambda x: F.cross_entropy(x @ x, torch.tensor([0, 1, 2, 3], device=x.device)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", CALLS)
def test_casts_are_the_cpus(kind: str, dtype: torch.dtype) -> None:
    def program(device: str) -> Any:
        x = torch.randn(4, 4).to(device).requires_grad_()
        with torch.autocast(device, dtype=dtype):
            results = CALLS[kind](x)
            results = results if isinstance(results, tuple) else (results,)
            total = sum(r.sum().float() for r in results)
        if total.requires_grad:
            total.backward()
        return results

    same(program)


def test_every_op_with_a_rule_on_the_cpu_has_it_here() -> None:
    with torch.autocast("ltc", dtype=torch.bfloat16):
        pass
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    named = autocast.LOWER | autocast.PROMOTE
    assert named <= set(autocast.ops_with_a_rule())
    assert all(has("aten::" + name, "AutocastPrivateUse1") for name in autocast.ops_with_a_rule())


def test_scopes_nest_and_end() -> None:
    def program(device: str) -> list[Any]:
        x = torch.randn(3, 3).to(device)
        seen = []
        with torch.autocast(device, dtype=torch.bfloat16):
            seen.append((x @ x).dtype)
            with torch.autocast(device, enabled=False):
                seen.append((x @ x).dtype)
            with torch.autocast(device, dtype=torch.float16):
                seen.append((x @ x).dtype)
            seen.append(torch.get_autocast_dtype(device))
            seen.append(torch.is_autocast_enabled(device))
        seen.append((x @ x).dtype)
        return seen

    same(program)


def test_a_weight_is_cast_once_and_again_after_it_changed() -> None:
    def program(device: str) -> Any:
        layer = nn.Linear(3, 3).to(device)
        x = torch.randn(2, 3).to(device)
        outputs = []
        for _ in range(3):
            with torch.autocast(device, dtype=torch.bfloat16):
                y = layer(layer(x))  # the gradient is summed in bfloat16 only if both uses share one cast
            y.float().sum().backward()
            outputs.append(y)
            with torch.no_grad():
                layer.weight.sub_(0.1 * layer.weight.grad)
        return outputs

    same(program, versions=False)


def test_custom_functions_follow_autocast() -> None:
    def program(device: str) -> Any:
        class Product(torch.autograd.Function):
            @staticmethod
            @torch.amp.custom_fwd(device_type=device, cast_inputs=torch.float32)
            def forward(ctx: Any, a: torch.Tensor) -> torch.Tensor:
                ctx.save_for_backward(a)
                return a @ a

            @staticmethod
            @torch.amp.custom_bwd(device_type=device)
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                (a,) = ctx.saved_tensors
                return grad @ a.t() + a.t() @ grad

        x = torch.randn(3, 3).to(device).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            y = Product.apply(x @ x)
        y.sum().backward()
        return y

    same(program)


@pytest.mark.parametrize("poison", [None, 2])
def test_grad_scaler(poison: int | None) -> None:
    """A step whose gradients overflow is skipped and the scale shrinks; otherwise the update is that of unscaled
    training.
    """

    def program(device: str) -> Any:
        model = nn.Linear(3, 2).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=2)
        scales = []
        for step in range(5):
            x = torch.randn(4, 3).to(device)
            if step == poison:
                x[0, 0] = float("inf")
            optimizer.zero_grad()
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = model(x).float().pow(2).mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        state = scaler.state_dict()
        return scales, state

    same(program, versions=False)
