"""``lazytensor demo``: train a small GPT on ltc, then on the CPU, and say what happened."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.markup import escape

from .console import FAILED, AsJson, err, out, print_json, progress, quiet


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps on each device.")] = 150,
    json: AsJson = False,
) -> None:
    """Train a small GPT on [bold]ltc[/bold] and check it against the CPU.

    A character-level GPT learns a short story that comes with the package: once recorded on [bold]ltc[/bold],
    once by eager PyTorch on the CPU, from the same seed. At the end you read what was recorded, how many graphs
    were compiled, what recording cost, and whether the losses are the same. Takes less than a minute.

    Exit code 1 if the losses differ.
    """
    with err.status("starting PyTorch"):
        # The matrices are small: a second thread costs more in waiting than it gains.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        from lazytensor import settings
        from lazytensor.demo.train import Text, train, write

        torch.set_num_threads(1)
        quiet()
    text = Text.shipped()
    runs = []
    for device in ("ltc", "cpu"):
        with progress(steps, device) as (bar, task):

            def say(step: int, loss: float, name: str = device, bar: Any = bar, task: Any = task) -> None:
                bar.update(task, completed=step, description=f"{name}, loss {loss:.3f}")

            runs.append(train(text, device, steps, say))
    (lazy, model), (eager, _) = runs
    with err.status("writing"):
        sample = write(model, text, "The keeper", 90)
    equal = lazy.losses == eager.losses
    apart = max(abs(a - b) for a, b in zip(lazy.losses, eager.losses, strict=True))
    close = apart <= 1e-3 * max(eager.losses)
    exact = settings.backend == "reference"
    result: dict[str, Any] = {
        "backend": settings.backend,
        "steps": steps,
        "first_loss": lazy.losses[0],
        "last_loss": lazy.losses[-1],
        "ops_per_step": lazy.ops_per_step,
        "record_microseconds_per_op": lazy.record_microseconds,
        "graphs_compiled": lazy.graphs,
        "cuts_from_cache": lazy.reused,
        "fallbacks": lazy.fallbacks,
        "seconds": lazy.seconds,
        "eager_seconds": eager.seconds,
        "losses_equal": equal,
        "largest_difference": apart,
        "sample": sample,
    }
    if json:
        print_json(result)
    else:
        _tell(result)
    raise typer.Exit(0 if equal or (close and not exact) else FAILED)


def _tell(result: dict[str, Any]) -> None:
    steps, cost = result["steps"], result["record_microseconds_per_op"]
    fallbacks = ", ".join(result["fallbacks"]) or "none"
    losses = f"{result['first_loss']:.3f} → {result['last_loss']:.3f}"
    if result["losses_equal"]:
        verdict = f"all {steps} losses are the CPU's, [green]bit for bit[/green]"
    else:
        verdict = f"[yellow]no[/yellow]: the losses differ from the CPU's by at most {result['largest_difference']:.2g}"
    lines = {
        "Trained": f"{steps} steps of a small GPT on the backend {result['backend']}, loss {losses}",
        "Recorded": f"{result['ops_per_step']} ops a step: forward, backward and AdamW; fallbacks: {fallbacks}",
        "Compiled": f"{result['graphs_compiled']} graphs; {result['cuts_from_cache']} cuts found theirs in the cache",
        "Cost": f"{cost:.1f} µs of processor time to record an op, autograd and optimizer included",
        "Equal": verdict,
    }
    out.print(f"[dim]{escape(result['sample'])}[/dim]\n")
    for name, line in lines.items():
        out.print(f"[bold]{name:10}[/bold]{line}", soft_wrap=True)
