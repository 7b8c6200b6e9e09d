"""Trains the demonstration's model on a device and measures what that took; ``ltc`` and the CPU run one program."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import lazytensor as lt
from lazytensor.demo.gpt import GPT

SEED = 20
BATCH = 12
WARM = 3  # steps left out of the time per op: the first ones record and compile what is new
Say = Callable[[int, float], None]


class Text:
    """The text, as numbers."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        number = {letter: i for i, letter in enumerate(self.letters)}
        self.data = torch.tensor([number[letter] for letter in text])

    @classmethod
    def shipped(cls) -> Text:
        """The story that comes with the package."""
        return cls(resources.files("lazytensor.demo").joinpath("text.txt").read_text(encoding="utf-8"))

    def batches(self, context: int, steps: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Random passages, each with the characters that follow; the same ones every time."""
        generator = torch.Generator().manual_seed(SEED)
        for _ in range(steps):
            starts = torch.randint(len(self.data) - context, (BATCH, 1), generator=generator)
            places = starts + torch.arange(context)
            yield self.data[places], self.data[places + 1]

    def show(self, numbers: list[int]) -> str:
        """Character numbers as text."""
        return "".join(self.letters[n] for n in numbers)


@dataclass
class Training:
    """What one training run gave, and what it took."""

    device: str
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    ops_per_step: int = 0
    record_seconds: list[float] = field(default_factory=list)
    graphs: int = 0
    reused: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)

    @property
    def record_microseconds(self) -> float:
        """What recording one op cost in a typical step, in processor time: a busy machine does not count."""
        steps = sorted(self.record_seconds[WARM:]) or [0.0]
        return steps[len(steps) // 2] / max(self.ops_per_step, 1) * 1e6


class _Count(TorchDispatchMode):
    """Counts the ATen ops that reach the device."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops += 1
        return func(*args, **(kwargs or {}))


def train(text: Text, device: str, steps: int, say: Say = lambda step, loss: None) -> tuple[Training, GPT]:
    """Train from scratch.  The loss is read every tenth step only, since a read is a cut."""
    lazy = torch.device(device).type == "ltc"
    result = Training(device)
    before = lt.cache_info()
    counters = _fallbacks()
    torch.manual_seed(SEED)
    model = GPT(len(text.letters)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    losses: list[Tensor] = []
    started = time.perf_counter()
    for step, (x, following) in enumerate(text.batches(model.size.context, steps)):
        x, following = x.to(device), following.to(device)
        recording = time.thread_time()
        counting = _Count() if step == 1 else None
        if counting is not None:
            with counting:
                losses.append(_step(model, optimizer, x, following))
            result.ops_per_step = counting.ops
        else:
            losses.append(_step(model, optimizer, x, following))
        result.record_seconds.append(time.thread_time() - recording)
        schedule.step()
        if lazy:
            lt.sync()
        if step % 10 == 9 or step == steps - 1:
            result.losses += [loss.item() for loss in losses]
            losses.clear()
            say(step + 1, result.losses[-1])
    result.seconds = time.perf_counter() - started
    after = lt.cache_info()
    result.graphs = after["misses"] - before["misses"]
    result.reused = after["hits"] - before["hits"]
    result.fallbacks = dict(Counter(_fallbacks()) - Counter(counters))
    return result, model


def _step(model: GPT, optimizer: torch.optim.Optimizer, x: Tensor, following: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = model.loss(x, following)
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    return loss.detach()


def _fallbacks() -> dict[str, int]:
    """Ops that ran eagerly: counters named after an op."""
    names = [name for name in lt.metrics.counter_names() if name.startswith("aten::")]
    return {name: lt.metrics.counter_value(name) or 0 for name in names}


@torch.no_grad()
def write(model: GPT, text: Text, beginning: str, length: int) -> str:
    """Let the model go on with a beginning.  The window has a fixed width: every character is the same graph."""
    device = next(model.parameters()).device
    letters = [text.letters.index(letter) for letter in beginning]
    generator = torch.Generator().manual_seed(SEED)
    context = model.size.context
    for _ in range(length):
        window = letters[-context:]
        padded = torch.tensor([window + [0] * (context - len(window))]).to(device)
        scores = model(padded)[0].cpu()[len(window) - 1]
        letters.append(int(torch.multinomial((scores / 0.8).softmax(-1), 1, generator=generator)))
    return text.show(letters)
