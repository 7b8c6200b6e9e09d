"""``lazytensor bisect step.step --backend B``: the first operation of a saved step that a backend gets wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def command(
    step: Annotated[Path, typer.Argument(help="A step that lazytensor.save_step wrote.")],
    backend: Annotated[str, typer.Option(help="The backend to compare with the reference interpreter.")] = "ts",
    tolerance: Annotated[
        float | None, typer.Option(help="Relative to each result's largest element; by dtype if not given.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the part of the step that differs to this file.")] = None,
) -> None:
    """Find the first operation of a saved step whose result on a backend differs from the reference interpreter's."""
    import lazytensor as lt
    from lazytensor.execute.verify import first_difference

    try:
        loaded = lt.load_step(step)
        difference = first_difference(loaded.graph, loaded.inputs, backend, tolerance)
    except (OSError, lt.errors.LazyTensorError) as problem:
        typer.echo(f"lazytensor bisect: {problem}", err=True)
        raise typer.Exit(2) from None
    if difference is None:
        typer.echo(f"all {len(loaded.graph)} operations agree with the reference interpreter on {backend!r}")
        return
    if save is not None:
        difference.save(save)
    typer.echo(f"{difference}\n\n{difference.graph.python()}")
    raise typer.Exit(1)
