"""The table of contents of the command line."""

from __future__ import annotations

import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Annotated

import typer

from . import bench, demo, doctor, mounts, run
from .console import out

MANUAL = """A Lazy Tensor Core for PyTorch, in Python.

Ordinary PyTorch on the device [bold]ltc[/bold] is recorded, not run. At a cut everything
pending becomes one graph, which a backend compiles and runs. Start here:

  [cyan]lazytensor demo[/cyan]             train a small GPT, see what was recorded
  [cyan]lazytensor doctor[/cyan]           what works on this machine, and every setting
  [cyan]lazytensor run script.py[/cyan]    your own program, unchanged, on ltc

Results go to stdout, progress to stderr; [bold]--json[/bold] is for machines.
Exit codes: 0 all is well, 1 a check failed, 2 the command line was wrong."""

app = typer.Typer(
    name="lazytensor",
    help=MANUAL,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        try:
            out.print(version("lazytensor"))
        except PackageNotFoundError:
            from lazytensor import __version__

            out.print(__version__)
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """The options before any command."""


app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command(
    "run", context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
)(run.run)
app.add_typer(bench.app(), name="bench")
mounts.mount_all(app)


def main() -> None:
    """Run the command line; ends the process with the exit code.

    A backend that is not there, or a package that only an extra brings, is told in a sentence.
    """
    try:
        app(prog_name="lazytensor")
    except ModuleNotFoundError as error:
        extra = _extra_with(error.name or "")
        if extra is None:
            raise
        sys.exit(f"lazytensor: this needs {error.name}: pip install 'lazytensor[{extra}]'")
    except Exception as error:
        errors = sys.modules.get("lazytensor.errors")  # not imported here: the manual needs no torch
        if errors is None or not isinstance(error, errors.UnknownBackend | errors.BackendNotLoaded):
            raise
        sys.exit(f"lazytensor: {error}")


def _extra_with(package: str) -> str | None:
    """The first of our extras that installs this package, as the package's own metadata says."""
    try:
        needs = requires("lazytensor") or []
    except PackageNotFoundError:
        return None
    named = (re.match(rf"{re.escape(package)}\b.*extra == ['\"](\w+)['\"]", need) for need in needs)
    return next((found[1] for found in named if found), None)
