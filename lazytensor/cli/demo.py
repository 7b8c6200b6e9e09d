"""``lazytensor demo``: train a small GPT on ltc, then on the CPU, and say what happened."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer
from rich.markup import escape

from .console import FAILED, AsJson, err, out, print_json, progress


def demo(
    steps: Annotated[int, typer.Option(min=1, help="Training steps on each device.")] = 150,
    json: AsJson = False,
) -> None:
    """Train a small GPT on [bold]ltc[/bold] and check it against the CPU.

    A character-level GPT learns a short story that comes with the package: once recorded on [bold]ltc[/bold], once by eager
    PyTorch on the CPU, from the same seed. At the end you read what was recorded, how many graphs were compiled, what
    recording cost, and whether the losses are the same. Takes less than a minute.

    Exit code 1 if the losses differ.
    """
    with err.status("starting PyTorch"):
        # The matrices are small: a second thread costs more in waiting than it gains.
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        import torch

        from lazytensor import settings
        from lazytensor.demo.train import Text, train, write

        torch.set_num_threads(1)
    text = Text.shipped()
    with progress(steps, "ltc") as (bar, task):
        lazy, model = train(text, "ltc", steps, lambda n, loss: bar.update(task, completed=n, description=f"ltc, loss {loss:.3f}"))
    with progress(steps, "cpu") as (bar, task):
        eager, _ = train(text, "cpu", steps, lambda n, loss: bar.update(task, completed=n, description=f"CPU, loss {loss:.3f}"))
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
    fallbacks = ", ".join(result["fallbacks"]) or "none"
    steps, graphs = result["steps"], result["graphs_compiled"]
    out.print(f"[dim]{escape(result['sample'])}[/dim]\n")
    out.print(f"[bold]Trained[/bold]   {steps} steps of a GPT, loss {result['first_loss']:.3f} → {result['last_loss']:.3f}, on the backend {result['backend']}")
    out.print(f"[bold]Recorded[/bold]  {result['ops_per_step']} ops a step: forward, backward and AdamW; fallbacks: {fallbacks}")
    out.print(f"[bold]Compiled[/bold]  {graphs} graphs; the other {result['cuts_from_cache']} steps found theirs in the cache")
    out.print(f"[bold]Cost[/bold]      {result['record_microseconds_per_op']:.1f} µs to record an op, autograd and optimizer included")
    if result["losses_equal"]:
        out.print(f"[bold]Equal[/bold]     all {steps} losses are the CPU's, [green]bit for bit[/green]")
    else:
        out.print(f"[bold]Differ[/bold]    from the CPU's losses by at most {result['largest_difference']:.2g}")
