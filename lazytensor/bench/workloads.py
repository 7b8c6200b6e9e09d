"""The programs that are measured: each is a model returning its loss, an optimizer or none, and fixed data.

A recipe is built on the CPU under one seed and then moved, so that every system starts from the same bits. The step is
the loop most people write (zero_grad, forward, backward, step), and no step depends on a random number, so that losses
can be compared between systems. Sizes are such that an eager step takes 1 to 150 ms on two cores.
"""

# ruff: noqa: D102  (what a forward does is said by its class)

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SEED = 20_240
BATCHES = 4


@dataclass
class Recipe:
    """What a workload is made of, still on the CPU. `model(*batch)` is the loss."""

    model: nn.Module
    batches: list[tuple[Tensor, ...]]
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None


class Workload:
    """A recipe on a device. `forward` and `update` are attributes, so that a system can put compiled ones there."""

    def __init__(self, recipe: Recipe, device: str) -> None:
        self.model = recipe.model.to(device)
        self.batches = [tuple(t.to(device) for t in batch) for batch in recipe.batches]
        self.optimizer = recipe.optimizer(self.model.parameters()) if recipe.optimizer else None
        self.forward: Callable[..., Tensor] = self.model
        self.update: Callable[[], object] | None = self.optimizer.step if self.optimizer else None
        self.steps = 0

    def step(self) -> Tensor:
        """One step; the loss is returned unread, so that a lazy system is not forced to cut."""
        batch = self.batches[self.steps % len(self.batches)]
        self.steps += 1
        if self.optimizer is None or self.update is None:
            return self.forward(*batch)
        self.optimizer.zero_grad()
        loss = self.forward(*batch)
        loss.backward()
        self.update()
        return loss.detach()


RECIPES: dict[str, Callable[[], Recipe]] = {}


def recipe(function: Callable[[], Recipe]) -> Callable[[], Recipe]:
    """Register a recipe under the function's name."""
    RECIPES[function.__name__] = function
    return function


def build(name: str, device: str) -> Workload:
    """The workload `name` on `device`; `chain_N` is accepted for any N."""
    check(name)
    torch.manual_seed(SEED)
    chain = re.fullmatch(_CHAIN, name)
    return Workload(chain_of(int(chain[1])) if chain else RECIPES[name](), device)


_CHAIN = r"chain_(\d+)"


def check(name: str) -> None:
    """Raise for a name that no workload has, and say which there are."""
    if name not in RECIPES and not re.fullmatch(_CHAIN, name):
        raise ValueError(f"no workload named {name!r}; there are {', '.join(RECIPES)}, chain_N")


class Classifier(nn.Module):
    """A body whose output is scored by cross-entropy over its last dimension."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scores = self.body(x)
        return F.cross_entropy(scores.reshape(-1, scores.shape[-1]), target.reshape(-1))


class Regression(nn.Module):
    """A body whose output is pulled to a target by the mean of squared differences."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        difference: Tensor = self.body(x) - target
        return (difference * difference).mean()


def labelled(shape: tuple[int, ...], classes: int, target_shape: tuple[int, ...]) -> list[tuple[Tensor, ...]]:
    """Batches of random inputs with random classes."""
    return [(torch.randn(shape), torch.randint(classes, target_shape)) for _ in range(BATCHES)]


@recipe
def mlp_adam() -> Recipe:
    """Three linear layers and Adam: small tensors, so the cost per op decides."""
    body = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    return Recipe(Classifier(body), labelled((64, 128), 10, (64,)), lambda p: torch.optim.Adam(p, lr=1e-3))


class Residual(nn.Module):
    """Two 3x3 convolutions with batch norm, and a shortcut that is projected where the shape changes."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(h)) + cast(Tensor, self.shortcut(x)))


@recipe
def resnet_sgd() -> Recipe:
    """A ResNet of four residual blocks with batch norm, on 32x32 images, and SGD with momentum."""
    body = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        Residual(32, 64, 2),
        Residual(64, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )
    batches = labelled((16, 3, 32, 32), 10, (16,))
    return Recipe(Classifier(body), batches, lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9))


class Attention(nn.Module):
    """Causal self-attention with one fused qkv projection that is `split`, as nanoGPT writes it."""

    mask: Tensor

    def __init__(self, width: int, heads: int, context: int, sdpa: bool) -> None:
        super().__init__()
        self.heads, self.sdpa = heads, sdpa
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.register_buffer("mask", torch.ones(context, context).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
            scores = scores.masked_fill(~self.mask[:length, :length], float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return cast(Tensor, self.out(y.transpose(1, 2).contiguous().view(batch, length, width)))


class Block(nn.Module):
    """Pre-norm attention and a four times wider feed-forward, each added to the stream."""

    def __init__(self, width: int, heads: int, context: int, sdpa: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, context, sdpa)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + cast(Tensor, self.feed(self.norm2(x)))


class GPT(nn.Module):
    """A decoder-only transformer whose embedding and output weights are tied."""

    positions: Tensor

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, layers: int, sdpa: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, heads, context, sdpa) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.head.weight = self.tokens.weight
        self.register_buffer("positions", torch.arange(context))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(self.positions[: ids.shape[1]])
        return cast(Tensor, self.head(self.norm(self.blocks(x))))


def gpt(sdpa: bool) -> Recipe:
    """A GPT of four layers on random text."""
    vocabulary, context = 256, 64
    model = Classifier(GPT(vocabulary, context, width=128, heads=4, layers=4, sdpa=sdpa))
    text = [torch.randint(vocabulary, (8, context + 1)) for _ in range(BATCHES)]
    batches: list[tuple[Tensor, ...]] = [(t[:, :-1].contiguous(), t[:, 1:].contiguous()) for t in text]
    return Recipe(model, batches, lambda p: torch.optim.AdamW(p, lr=3e-4))


@recipe
def gpt_adamw() -> Recipe:
    """nanoGPT's model, attention written out, and AdamW."""
    return gpt(sdpa=False)


@recipe
def gpt_sdpa_adamw() -> Recipe:
    """The same with `scaled_dot_product_attention`."""
    return gpt(sdpa=True)


class LastOutput(nn.Module):
    """An LSTM read out after its last time step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(32, 64, batch_first=True)
        self.out = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.out(self.lstm(x)[0][:, -1]))


@recipe
def lstm() -> Recipe:
    """`nn.LSTM` over 32 time steps and SGD."""
    return Recipe(Classifier(LastOutput()), labelled((16, 32, 32), 10, (16,)), lambda p: torch.optim.SGD(p, lr=0.05))


@recipe
def transformer_layer_adamw() -> Recipe:
    """One `nn.TransformerEncoderLayer` and AdamW."""
    body = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
    batches: list[tuple[Tensor, ...]] = [(torch.randn(8, 16, 64), torch.randn(8, 16, 64)) for _ in range(BATCHES)]
    return Recipe(Regression(body), batches, lambda p: torch.optim.AdamW(p, lr=1e-3))


class ElementwiseChain(nn.Module):
    """Twelve elementwise ops, each reading and writing 8 MB when run one by one."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(x * y + 0.5) - y
        return x.mean()


@recipe
def elementwise_chain() -> Recipe:
    """Memory bound: what fusion gains shows here."""
    batches: list[tuple[Tensor, ...]] = [(torch.randn(1024, 2048), torch.randn(1024, 2048)) for _ in range(2)]
    return Recipe(ElementwiseChain(), batches)


class NormGelu(nn.Module):
    """Two rounds of LayerNorm, GELU and a residual, without a matrix product to hide them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = x + F.gelu(norm(x))
        return x


@recipe
def layernorm_gelu() -> Recipe:
    """LayerNorm-GELU blocks, forward, backward and SGD."""
    batches: list[tuple[Tensor, ...]] = [(torch.randn(1024, 512), torch.randn(1024, 512)) for _ in range(2)]
    return Recipe(Regression(NormGelu(512)), batches, lambda p: torch.optim.SGD(p, lr=0.1))


class Refining(nn.Module):
    """Repeats a layer until its output has settled, and picks a branch by a value it reads.

    The thresholds are coarse, so that rounding differences between systems do not change the path.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.positive = nn.Linear(width, 10)
        self.negative = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        state = x
        for _ in range(8):
            update = torch.tanh(self.layer(state))
            moved = (update - state).abs().mean().item()
            state = update
            if moved < 0.05:
                break
        branch = self.positive if x[:, 0].mean().item() > 0 else self.negative
        return cast(Tensor, branch(state))


@recipe
def control_flow() -> Recipe:
    """Python control flow that reads `.item()` several times in the forward pass."""
    batches = labelled((128, 128), 10, (128,))
    for i, batch in enumerate(batches):
        batch[0][:, 0] += 1.0 if i % 2 else -1.0
    return Recipe(Classifier(Refining(128)), batches, lambda p: torch.optim.SGD(p, lr=0.05))


class TinyOps(nn.Module):
    """A thousand different small ops in one Python loop."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for i in range(250):
            x = x * y
            x = x + i / 250
            x = torch.tanh(x)
            x = x - y
        return x.mean()


@recipe
def tiny_ops() -> Recipe:
    """1,000 tiny ops: the cost per op and nothing else; unrolled, it is also what keeps a compiler busy longest."""
    return Recipe(TinyOps(), [(torch.randn(16, 16), torch.randn(16, 16))])


class Chain(nn.Module):
    """x = x + y, n times."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes = nodes

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for _ in range(self.nodes):
            x = x + y
        return x


def chain_of(nodes: int) -> Recipe:
    """A chain of that many additions."""
    return Recipe(Chain(nodes), [(torch.randn(4, 4), torch.randn(4, 4) / nodes)])


@recipe
def chain_1000() -> Recipe:
    """1,000 equal additions of 4x4 tensors: the smallest op there is."""
    return chain_of(1000)
