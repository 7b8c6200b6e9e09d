"""Commands that live beside what they command: found when the manual is printed, imported when they are called."""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import typer


class Mount(NamedTuple):
    """A command that another package provides: a typer app or a function that typer can call."""

    name: str
    module: str
    attribute: str
    help: str


MOUNTS = (
    Mount("backends", "lazytensor.backend.command", "command", "List the backends, and what each can do."),
    Mount("codegen", "lazytensor.codegen.command", "app", "Generate a backend's kernels, nodes and shape functions."),
    Mount("conformance", "lazytensor.conformance.command", "command", "Check a backend against PyTorch's own samples."),
    Mount("fuzz", "lazytensor.fuzz.command", "command", "Run random programs on ltc and on the CPU, and compare."),
    Mount("bisect", "lazytensor.execute.bisect_command", "command", "Find the operation that a backend gets wrong."),
    Mount("cache", "lazytensor.execute.cache_command", "app", "Show and clear what is kept on disk."),
    Mount("report", "lazytensor.inspect.command", "command", "Turn a recorded run into a page to look at."),
)


def exists(module: str) -> bool:
    """Whether the module is there.  Looked for as a file: Python would import its package, and PyTorch with it."""
    package, *inside = module.split(".")
    found = find_spec(package)
    if found is None or found.origin is None:
        return False
    path = Path(found.origin).parent.joinpath(*inside)
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def load(mount: Mount) -> typer.Typer:
    """The mounted command as a typer app of its own."""
    found = getattr(importlib.import_module(mount.module), mount.attribute)
    if isinstance(found, typer.Typer):
        return found
    app = typer.Typer(add_completion=False, rich_markup_mode="rich")
    app.command(help=None if found.__doc__ else mount.help)(found)
    return app


def mount_all(app: typer.Typer) -> None:
    """Give the app a command for every mount whose module exists."""
    for mount in MOUNTS:
        if exists(mount.module):
            _add(app, mount)


def _add(app: typer.Typer, mount: Mount) -> None:
    def call(context: typer.Context) -> None:
        # The mounted app reads its own arguments, --help among them, and ends the process with its own exit code.
        load(mount)(args=context.args, prog_name=context.command_path)
        sys.exit(0)

    settings: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
    app.command(mount.name, help=mount.help, context_settings=settings, add_help_option=False)(call)
