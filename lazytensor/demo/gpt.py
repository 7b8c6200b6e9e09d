"""A character-level GPT, small enough to train in seconds.  It is ordinary PyTorch and knows nothing of lazytensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Size:
    """How large the model is."""

    context: int = 48
    width: int = 64
    heads: int = 4
    layers: int = 2


class Attention(nn.Module):
    """Causal self-attention with one projection for queries, keys and values, taken apart by a split."""

    mask: Tensor

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.qkv = nn.Linear(size.width, 3 * size.width)
        self.out = nn.Linear(size.width, size.width)
        self.register_buffer("mask", torch.ones(size.context, size.context, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        """Mix each position with those before it."""
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        scores = (q @ k.transpose(2, 3)) * (width // self.heads) ** -0.5
        weights = scores.masked_fill(self.mask[:length, :length], float("-inf")).softmax(dim=-1)
        mixed: Tensor = self.out((weights @ v).transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """Attention, then a perceptron, each added to what came in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.before_perceptron = nn.LayerNorm(size.width)
        self.perceptron = nn.Sequential(
            nn.Linear(size.width, 4 * size.width), nn.GELU(), nn.Linear(4 * size.width, size.width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One layer."""
        x = x + self.attention(self.before_attention(x))
        layer: Tensor = x + self.perceptron(self.before_perceptron(x))
        return layer


class GPT(nn.Module):
    """Scores for the next character at every position."""

    def __init__(self, characters: int, size: Size | None = None) -> None:
        super().__init__()
        self.size = size or Size()
        self.characters = nn.Embedding(characters, self.size.width)
        self.places = nn.Embedding(self.size.context, self.size.width)
        self.blocks = nn.Sequential(*[Block(self.size) for _ in range(self.size.layers)])
        self.norm = nn.LayerNorm(self.size.width)
        self.head = nn.Linear(self.size.width, characters, bias=False)
        self.head.weight = self.characters.weight
        for table in (self.characters, self.places):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` holds character numbers, batch × length."""
        places = torch.arange(x.shape[1], device=x.device)
        scores: Tensor = self.head(self.norm(self.blocks(self.characters(x) + self.places(places))))
        return scores

    def loss(self, x: Tensor, following: Tensor) -> Tensor:
        """How badly the characters that follow are foretold, in nats per character."""
        return functional.cross_entropy(self(x).flatten(0, 1), following.flatten())
