"""``lazytensor fuzz``: random programs on ltc and on CPU eager, compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def command(
    programs: Annotated[int, typer.Option(min=1, help="How many programs to run.")] = 1000,
    seed: Annotated[int, typer.Option(help="The seed of the first program; the next has the next seed.")] = 0,
    backend: Annotated[str, typer.Option(help="The backend to try.")] = "reference",
    lines: Annotated[int, typer.Option(min=2, help="How long a program is.")] = 24,
    ahead: Annotated[bool, typer.Option("--ahead", help="Run new steps as they are recorded.")] = False,
    most_failures: Annotated[int, typer.Option(help="Stop after this many failures.")] = 10,
    output: Annotated[Path | None, typer.Option(help="Write the script of each failure into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print plain data.")] = False,
) -> None:
    """Run random programs on ltc and on CPU eager; every value, shape, stride, version and error must agree.

    A failure is shrunk to a script of a few lines that runs by itself.  The exit code is 1 if there was one.
    """
    import logging

    from rich.console import Console
    from rich.progress import track

    import lazytensor as lt
    from lazytensor.fuzz.campaign import plain, run_programs

    logging.getLogger("lazytensor").setLevel(logging.ERROR)
    if backend in ("inductor", "auto"):
        lt.set_backend(backend, wait=True)
    else:
        lt.set_backend(backend)
    if ahead:
        lt.current_backend().runs_ahead = True
    errors = Console(stderr=True)
    failures = []
    ran = 0
    for failure in track(
        run_programs(programs, seed, backend, lines), "programs", programs, console=errors, disable=as_json
    ):
        ran += 1
        if failure is None:
            continue
        failures.append(failure)
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            (output / f"seed{failure.seed}.py").write_text(failure.script)
        if not as_json:
            errors.print(f"[red]seed {failure.seed}[/red]: {failure.difference}", markup=True, highlight=False)
            errors.print("\n".join("    " + line for line in failure.lines), markup=False, highlight=False)
        if len(failures) >= most_failures:
            break
    if as_json:
        typer.echo(
            json.dumps({"programs": ran, "failures": [plain(f) for f in failures], "seed": seed, "backend": backend})
        )
    else:
        seeds = f"seeds {seed} to {seed + ran - 1}"
        typer.echo(f"{ran - len(failures)} of {ran} programs agree with eager ({seeds}, backend {backend})")
    raise typer.Exit(1 if failures else 0)
