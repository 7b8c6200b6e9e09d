"""``lazytensor bench``: the measurements of ``lazytensor/bench``, each a command."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import FAILED, AsJson, err, out, print_json
from .mounts import exists

QUESTIONS = {
    "trace": "What it costs to record an op and to cut, beside eager and [bold]torch._lazy[/bold].",
    "backends": "The tests' models on each backend, beside eager and [bold]torch._lazy[/bold].",
    "models": "Every workload on every system, from the first step to steady speed.",
    "first": "The first steps of eager and of [bold]auto[/bold] alone, in new processes.",
    "codegen": "How long the generator takes, and the code it writes.",
}

Quick = Annotated[bool, typer.Option("--quick", help="Fewer turns: a first impression, not a figure to quote.")]
Out = Annotated[Path | None, typer.Option(help="Write the result as JSON to this file as well.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with code 1 if a goal is not reached.")]
Workloads = Annotated[list[str] | None, typer.Option("--workload", help="Only this workload; may be repeated.")]
Budget = Annotated[float | None, typer.Option(help="Seconds that each system has for warming up.")]
Picture = Annotated[Path | None, typer.Option(help="Draw a plot: a path without a suffix.")]


def app() -> typer.Typer:
    """The group of those measurements that exist."""
    group = typer.Typer(
        help="Measure: each system in a process of its own, taking turns, so that a noisy machine is noisy for all.",
        no_args_is_help=True,
        rich_markup_mode="rich",
    )
    own = {"models": _models, "first": _first}
    for name, help in QUESTIONS.items():
        if exists(f"lazytensor.bench.{name}"):
            group.command(name, help=help)(own.get(name) or _command(name))
    return group


def _command(name: str) -> Any:
    def command(quick: Quick = False, out: Out = None, check: Check = False, json: AsJson = False) -> None:
        measure(name, check, json, quick=quick, out=out)

    return command


def _models(
    quick: Quick = False,
    out: Out = None,
    check: Check = False,
    json: AsJson = False,
    workload: Workloads = None,
    budget: Budget = None,
    picture: Picture = None,
) -> None:
    _check_names(workload)
    measure("models", check, json, quick=quick, out=out, workloads=workload, budget=budget, picture=picture)


def _first(
    quick: Quick = False, out: Out = None, check: Check = False, json: AsJson = False, workload: Workloads = None
) -> None:
    _check_names(workload)
    measure("first", check, json, quick=quick, out=out, workloads=workload)


def _check_names(names: list[str] | None) -> None:
    from lazytensor.bench import workloads

    for name in names or ():
        try:
            workloads.check(name)
        except ValueError as problem:
            raise typer.BadParameter(str(problem), param_hint="--workload") from None


def measure(name: str, check: bool, json: bool, **options: Any) -> None:
    """Run one measurement with the options that it takes, and show or print it."""
    module = importlib.import_module(f"lazytensor.bench.{name}")
    takes = inspect.signature(module.run).parameters
    given = {"console": err, **{k: v for k, v in options.items() if v is not None}}
    result = module.run(**{k: v for k, v in given.items() if k in takes})
    if json:
        print_json(result)
    else:
        module.render(result, out)
    if check and any(goal["reached"] is False for goal in result.get("goals", ())):
        raise typer.Exit(FAILED)
