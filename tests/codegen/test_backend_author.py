"""A backend author's path: ten ops, two kernels by hand and one non-native op make a device that trains an MLP."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import lazytensor as lt
from lazytensor.codegen.lowering import lower_graph
from lazytensor.codegen.node import LazyNode

sys.path.insert(0, str(Path(__file__).parent))
import packages

YAML = """
    backend: PrivateUse1
    namespace: author
    full_codegen:
      - addmm
      - mm
      - t
      - sum.dim_IntList
      - mul.Tensor
      - mse_loss
      - mse_loss_backward
      - add_.Tensor
      - neg
      - where.self
    supported:
      - relu
      - threshold_backward
    non_native:
      - func: gate(Tensor input, Tensor like, float floor) -> Tensor
    """
KERNELS = '''
    """The kernels of the backend `author` that are written by hand: relu and its gradient are one op."""

    import torch

    from lazytensor.trace.storage import value_of


    def relu(self):
        from author import non_native

        return non_native.Gate.create(value_of(self), value_of(self), 0.0).tensors()


    def threshold_backward(grad_output, self, threshold):
        from author import non_native

        return non_native.Gate.create(value_of(grad_output), value_of(self), float(threshold)).tensors()


    def lower_gate(input, like, floor):
        """What `gate` computes: where `like` is above the floor, the input; elsewhere zero."""
        return torch.where(like > floor, input, torch.zeros_like(input))
    '''


class AuthorBackend(lt.Backend):
    """Lowers every node through the class that was generated for it."""

    seen: ClassVar[list[str]] = []

    def compile(self, graph):
        AuthorBackend.seen += [type(LazyNode.wrap(node)).__name__ for node in graph.nodes]
        return lower_graph(graph)


def train(device: str, steps: int = 6) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x, y = torch.randn(8, 6).to(device), torch.randn(8, 3).to(device)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", ["reference", "author"])
def test_ten_ops_two_kernels_and_one_node_train_an_mlp(tmp_path_factory: pytest.TempPathFactory, backend: str) -> None:
    if "author" not in sys.modules:
        folder = tmp_path_factory.mktemp("author")
        result = packages.generate(folder, YAML, name="author", kernels=KERNELS)
        assert result.counts["generated kernels"] == 10
        packages.load(folder, "author")
    author = sys.modules["author"]
    lt.register_backend("author", AuthorBackend)
    expected = train("cpu")
    AuthorBackend.seen.clear()
    author.register()
    lt.set_backend(backend)
    try:
        losses = train("ltc")
    finally:
        lt.set_backend("reference")
        author.unregister()
    assert losses == pytest.approx(expected, rel=1e-5)
    assert losses[-1] < losses[0]
    for kernel in ("addmm", "mm", "t", "mse_loss", "mse_loss_backward", "add__Tensor"):
        assert (lt.metrics.counter_value(f"author.{kernel}") or 0) >= 6
    if backend == "author":
        assert {"Gate", "Addmm", "Mm", "MseLossBackward"} <= set(AuthorBackend.seen)
        assert "Relu" not in AuthorBackend.seen
    fallbacks = [n for n in lt.metrics.counter_names() if n.startswith(("aten::", "author::"))]
    assert [n for n in fallbacks if n.startswith("author::") or n in ("aten::relu", "aten::mm")] == []
