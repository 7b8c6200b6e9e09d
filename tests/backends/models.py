"""The small models that every backend trains in these tests, and how."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

import lazytensor as lt


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.short(x))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).split(width, dim=2)
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in (q, k, v))
        scores = q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5
        mask = torch.ones(length, length, device=x.device, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        x = x + self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(17, 16), nn.Embedding(8, 16)
        self.blocks = nn.Sequential(Attention(16, 2), Attention(16, 2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 17, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(y))).flatten(0, 1)


def mlp() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.optim.Optimizer]]:
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    return model, torch.randn(8, 6), torch.randint(4, (8,)), torch.optim.Adam


def resnet() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.optim.Optimizer]]:
    model = nn.Sequential(Block(3, 4, 1), Block(4, 8, 2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    return model, torch.randn(4, 3, 8, 8), torch.randint(4, (4,)), lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)


def nano_gpt() -> tuple[nn.Module, torch.Tensor, torch.Tensor, Callable[..., torch.optim.Optimizer]]:
    return GPT(), torch.randint(17, (2, 8)), torch.randint(17, (16,)), torch.optim.AdamW


MODELS = {"mlp": mlp, "resnet": resnet, "nano_gpt": nano_gpt}


def losses(name: str, device: str, steps: int = 4) -> list[float]:
    """Train and read the losses at the end, so that every step is one graph."""
    torch.manual_seed(7)
    model, x, y, optimizer = MODELS[name]()
    model, x, y = model.to(device), x.to(device), y.to(device)
    update = optimizer(model.parameters())
    found = []
    for _ in range(steps):
        update.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        update.step()
        found.append(loss.detach())
        if device == "ltc":
            lt.sync()
    return [float(loss) for loss in found]
