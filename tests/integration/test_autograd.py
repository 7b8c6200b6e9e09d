"""Autograd beyond one backward: double backward, hooks, functions, forward mode, ``torch.func``, checkpointing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from support import same
from torch import func, nn
from torch.autograd.gradcheck import GradcheckError
from torch.utils.checkpoint import checkpoint

import lazytensor as lt


def f(x: torch.Tensor) -> torch.Tensor:
    return (x.sin() * x).sum() + (x[:2] * x[1:]).prod()


def vector(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([x.pow(2).sum(), x.prod(), x[0] * 3]) * x


TRANSFORMS = {
    "grad": lambda x: func.grad(f)(x),
    "grad_and_value": lambda x: func.grad_and_value(f)(x),
    "grad of grad": lambda x: func.grad(lambda y: func.grad(f)(y).sum())(x),
    "vjp": lambda x: func.vjp(vector, x)[1](torch.ones_like(x)),
    "jvp": lambda x: func.jvp(vector, (x,), (torch.ones_like(x),)),
    "linearize": lambda x: func.linearize(vector, x)[1](torch.ones_like(x)),
    "jacrev": lambda x: func.jacrev(vector)(x),
    "jacfwd": lambda x: func.jacfwd(vector)(x),
    "hessian": lambda x: func.hessian(f)(x),
    "hessian by reverse over forward": lambda x: func.jacrev(func.jacfwd(f))(x),
    "vmap": lambda x: func.vmap(lambda a, b: a * b + a.sum())(x.expand(2, 3), torch.stack([x, x + 1])),
    "vmap over the second dimension": lambda x: func.vmap(torch.dot, in_dims=(None, 1))(x, x.expand(2, 3).t()),
    "vmap of grad": lambda x: func.vmap(func.grad(f))(torch.stack([x, x * 2])),
    "vmap of vmap": lambda x: func.vmap(func.vmap(lambda a: a * 2 + 1))(x.expand(2, 3)),
    "vmap with randomness": lambda x: func.vmap(lambda a: a + torch.rand_like(a), randomness="different")(
        x.expand(2, 3)
    ),
    "vmap by chunks": lambda x: func.vmap(f, chunk_size=2)(torch.stack([x, x * 2, x * 3])),
    "functionalize": lambda x: func.functionalize(lambda y: y.clone().add_(1).view(-1).mul_(2))(x),
}


@pytest.fixture(scope="module", autouse=True)
def decompositions_loaded() -> None:
    """PyTorch's decompositions for forward mode warn of torch.jit.script when they are loaded, on whichever device
    comes first.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        func.jvp(vector, (torch.ones(3),), (torch.ones(3),))


@pytest.mark.parametrize("name", TRANSFORMS)
def test_torch_func(name: str) -> None:
    def program(device: str) -> Any:
        return TRANSFORMS[name](torch.tensor([0.5, -1.25, 2.0]).to(device))

    same(program)


def test_functional_call_and_per_sample_gradients() -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(device)
        parameters = {k: v.detach() for k, v in model.named_parameters()}
        x = torch.randn(5, 3).to(device)

        def loss(parameters: dict[str, torch.Tensor], one: torch.Tensor) -> torch.Tensor:
            return func.functional_call(model, parameters, (one[None],)).pow(2).sum()

        return func.vmap(func.grad(loss), in_dims=(None, 0))(parameters, x)

    same(program, versions=False)


def test_stacked_models() -> None:
    def program(device: str) -> Any:
        models = [nn.Linear(3, 2).to(device) for _ in range(3)]
        parameters, buffers = func.stack_module_state(models)
        x = torch.randn(4, 3).to(device)
        call = lambda p, b, x: func.functional_call(models[0], (p, b), (x,))  # noqa: E731
        result = func.vmap(call, in_dims=(0, 0, None))(parameters, buffers, x)
        return result

    same(program, versions=False)


def test_forward_mode() -> None:
    def program(device: str) -> Any:
        x = torch.tensor([0.5, -1.25, 2.0]).to(device)
        model = nn.Sequential(nn.Linear(3, 3), nn.GELU()).to(device)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            out = forward_ad.unpack_dual(model(dual).exp())
            return out.primal, out.tangent

    same(program, versions=False)


def test_forward_mode_does_not_cut() -> None:
    from lazytensor.execute import cut

    x = torch.tensor([0.5, -1.25, 2.0]).to("ltc")
    before = cut.hits + cut.misses
    _, tangent = func.jvp(vector, (x,), (torch.ones_like(x),))
    assert cut.hits + cut.misses == before
    assert torch.isfinite(tangent).all()


def test_double_backward() -> None:
    def program(device: str) -> Any:
        x = torch.tensor([0.5, -1.25, 2.0]).to(device).requires_grad_()
        (first,) = torch.autograd.grad(f(x), x, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(2).sum(), x, create_graph=True)
        second.sum().backward()
        return first, second

    same(program)


def test_hooks() -> None:
    def program(device: str) -> Any:
        seen: list[Any] = []
        model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)).to(device)
        model[0].register_forward_hook(lambda m, i, o: seen.append(o.detach()))
        model[0].register_forward_pre_hook(lambda m, i: (i[0] * 2,))
        model[2].register_full_backward_hook(lambda m, gi, go: seen.append(gi[0]))
        model[0].weight.register_hook(lambda g: g * 3)
        model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        x = torch.randn(4, 3).to(device).requires_grad_()
        y = model(x)
        y.retain_grad()
        y.sum().backward()
        return seen, y.grad

    same(program, versions=False)


def test_saved_tensor_hooks_and_offloading() -> None:
    def program(device: str) -> Any:
        x = torch.randn(3).to(device).requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: t * 1):
            x.exp().sum().backward()
        with torch.autograd.graph.save_on_cpu():
            (x.sin() * x).sum().backward()
        return x

    same(program)


def test_autograd_function() -> None:
    class Cube(torch.autograd.Function):
        @staticmethod
        def forward(x: torch.Tensor) -> torch.Tensor:
            return x**3

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            ctx.save_for_backward(*inputs)
            ctx.save_for_forward(*inputs)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad * 3 * ctx.saved_tensors[0] ** 2

        @staticmethod
        def jvp(ctx: Any, tangent: torch.Tensor) -> torch.Tensor:
            return tangent * 3 * ctx.saved_tensors[0] ** 2

        generate_vmap_rule = True

    def program(device: str) -> Any:
        x = torch.tensor([0.5, -1.25]).to(device).requires_grad_()
        Cube.apply(x).sum().backward()
        batched = func.vmap(func.grad(lambda a: Cube.apply(a).sum()))(x.detach().expand(2, 2))
        pushed = func.jvp(Cube.apply, (x.detach(),), (torch.ones_like(x),))
        return batched, pushed

    same(program)


def test_in_place_write_to_a_saved_tensor_is_an_error() -> None:
    def program(device: str) -> None:
        x = torch.ones(2).to(device).requires_grad_()
        y = x.exp()
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()

    same(program)


def test_gradcheck() -> None:
    x = torch.randn(3, dtype=torch.float64, device="ltc", requires_grad=True)
    w = torch.randn(3, 2, dtype=torch.float64, device="ltc", requires_grad=True)
    call = lambda x, w: (x.tanh() @ w).softmax(0)  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, w), check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(call, (x, w))
    wrong = lambda x: x.detach() * x  # noqa: E731
    with pytest.raises(GradcheckError):
        torch.autograd.gradcheck(wrong, (x,))


def test_anomaly_mode_names_the_forward_line() -> None:
    x = torch.tensor([0.0], device="ltc", requires_grad=True)
    with pytest.warns(UserWarning, match="Anomaly"), torch.autograd.detect_anomaly():
        y = x.sqrt() * 0
        with pytest.warns(UserWarning, match="Error detected in"), pytest.raises(RuntimeError, match="nan values"):
            y.backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_replays_dropout(reentrant: bool) -> None:
    def program(device: str) -> Any:
        block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 4)).to(device)
        x = torch.randn(3, 4).to(device).requires_grad_()
        y = checkpoint(block, x, use_reentrant=reentrant)
        noise = torch.rand(2, device=device)  # the replay must not disturb the numbers drawn after it
        y.pow(2).sum().backward()
        after = torch.rand(2, device=device)
        return y, noise, after

    same(program, versions=False)


def test_checkpointing_under_autocast() -> None:
    def program(device: str) -> Any:
        block = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
        x = torch.randn(3, 4).to(device).requires_grad_()
        with torch.autocast(device, dtype=torch.bfloat16):
            y = checkpoint(block, x, use_reentrant=False)
        y.float().sum().backward()
        return y

    same(program, versions=False)


def test_no_grad_and_inference_mode() -> None:
    def program(device: str) -> Any:
        x = torch.ones(3).to(device).requires_grad_()
        with torch.no_grad():
            a = x * 2
            a[1:].add_(1)
        with torch.inference_mode():
            b = x * 3
            b.add_(1)
            c = b[1:].clone()
        with torch.enable_grad():
            d = x * 4
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            x * b
        return a, b.is_inference(), c.is_inference(), d

    same(program)


def test_backward_of_a_step_is_one_graph() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)).to("ltc")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(5, 4).to("ltc")
    lt.sync()
    from lazytensor.execute import cut

    before = cut.hits + cut.misses
    model(x).pow(2).mean().backward()
    optimizer.step()
    lt.sync()
    assert cut.hits + cut.misses == before + 1
