"""Autoregressive decoding with a key-value cache, as people write it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support import same
from torch import nn

import lazytensor as lt

WORDS, WIDTH, HEADS, LONGEST = 11, 8, 2, 208


class Decoder(nn.Module):
    """One attention block over words and positions; the way of caching is the caller's."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(LONGEST, WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, word: torch.Tensor, place: torch.Tensor, attend: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = self.words(word) + self.places(place)
        batch, length, _ = x.shape
        q, k, v = (t.view(batch, length, HEADS, -1).transpose(1, 2) for t in self.qkv(x).split(WIDTH, dim=-1))
        y = attend(q, k, v).transpose(1, 2).reshape(batch, length, WIDTH)
        return self.head(x + self.out(y))[:, -1]


def choose(logits: torch.Tensor, sampling: str) -> torch.Tensor:
    if sampling == "greedy":
        return logits.argmax(-1, keepdim=True)
    kept, which = torch.topk(logits, 4)
    drawn = torch.multinomial(F.softmax(kept / 0.8, dim=-1), 1)
    return which.gather(-1, drawn)


@torch.no_grad()
def by_cat(device: str, count: int, sampling: str) -> torch.Tensor:
    model = Decoder().to(device).eval()
    word = torch.tensor([[1], [2]]).to(device)
    cache: list[torch.Tensor] = []

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        cache[:] = [torch.cat([c, n], dim=2) for c, n in zip(cache, (k, v), strict=True)] if cache else [k, v]
        return F.scaled_dot_product_attention(q, *cache)

    words = [word]
    for place in range(count):
        word = choose(model(word, torch.tensor([place]).to(device), attend), sampling)
        words.append(word)
    return torch.cat(words, dim=1)


@torch.no_grad()
def in_place(device: str, count: int, sampling: str) -> torch.Tensor:
    model = Decoder().to(device).eval()
    word = torch.tensor([[1], [2]]).to(device)
    keys, values = (torch.zeros(2, HEADS, LONGEST, WIDTH // HEADS, device=device) for _ in range(2))
    place = torch.zeros(1, dtype=torch.long, device=device)
    every = torch.arange(LONGEST, device=device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys.index_copy_(2, place, k)
        values.index_copy_(2, place, v)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=(every <= place)[None, None, None])

    words = torch.zeros(2, count + 1, dtype=torch.long, device=device)
    words[:, :1] = word
    for _ in range(count):
        word = choose(model(word, place, attend), sampling)
        place.add_(1)
        words.index_copy_(1, place, word)
        lt.sync()
    return words


@pytest.mark.parametrize("sampling", ["greedy", "topk"])
@pytest.mark.parametrize("form", [by_cat, in_place])
def test_the_words_are_eagers(form: Any, sampling: str) -> None:
    same(lambda device: form(device, 12, sampling), twice=False, versions=False)


@pytest.mark.parametrize("sampling", ["greedy", "topk"])
def test_the_in_place_form_compiles_a_bounded_number_of_graphs(sampling: str) -> None:
    torch.manual_seed(0)
    in_place("ltc", 4, sampling)
    before = lt.cache_info()["misses"]
    torch.manual_seed(0)
    lazy = in_place("ltc", 200, sampling)
    assert lt.cache_info()["misses"] - before <= 4
    torch.manual_seed(0)
    assert torch.equal(lazy.cpu(), in_place("cpu", 200, sampling))


def test_two_hundred_tokens_by_cat() -> None:
    torch.manual_seed(0)
    lazy = by_cat("ltc", 200, "topk").cpu()
    torch.manual_seed(0)
    assert torch.equal(lazy, by_cat("cpu", 200, "topk"))


def test_a_position_that_is_a_python_number() -> None:
    """Writing ``cache[:, place] = …`` with a Python number is right too; each position is a structure of its own."""

    def program(device: str) -> Any:
        cache = torch.zeros(2, 6, 3, device=device)
        for place in range(6):
            cache[:, place] = torch.full((2, 3), float(place), device=device)
            total = cache[:, : place + 1].sum()
        return cache, total

    same(program)
