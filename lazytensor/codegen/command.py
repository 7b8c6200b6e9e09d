"""`lazytensor codegen`: a backend's YAML in, its Python package out."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(add_completion=False, rich_markup_mode="rich")

Yaml = Annotated[Path | None, typer.Option(help="The backend's YAML.")]
Output = Annotated[Path | None, typer.Option(help="The folder of the package that is written.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check everything and say what would be written.")]
Impl = Annotated[Path | None, typer.Option(help="The Python file with the kernels written by hand.")]
Shapes = Annotated[Path | None, typer.Option(help="The Python file with the shape functions written by hand.")]
Base = Annotated[str | None, typer.Option(help="The base of node classes, such as my_backend.base.MyNode.")]
Name = Annotated[str | None, typer.Option(help="What the backend is called; its namespace, if not given.")]
Lowerings = Annotated[bool, typer.Option("--ts-lowerings/--no-ts-lowerings", help="Give nodes a TorchScript lowering.")]
Show = Annotated[str | None, typer.Option(help="Print all that is generated for one op, such as aten::add.Tensor.")]


@app.command()
def codegen(
    source_yaml: Yaml = None,
    output_dir: Output = None,
    dry_run: DryRun = False,
    impl_path: Impl = None,
    shape_inference: Shapes = None,
    node_base: Base = None,
    backend_name: Name = None,
    ts_lowerings: Lowerings = True,
    show: Show = None,
) -> None:
    """Generate a backend's node classes, kernels, shape stubs and registration from its YAML."""
    from .package import run
    from .show import show as show_op
    from .yaml_document import CodegenErrors

    out, err = Console(highlight=False, soft_wrap=True), Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        if show is not None:
            out.print(show_op(show, source_yaml), markup=False)
            return
        if source_yaml is None or output_dir is None:
            raise typer.BadParameter("give --source-yaml and --output-dir, or --show and the name of an op")
        result = run(
            source_yaml, output_dir, dry_run, impl_path, shape_inference, node_base, backend_name, ts_lowerings
        )
    except CodegenErrors as errors:
        for problem in errors.errors:
            err.print(str(problem), markup=False)
        err.print(f"{len(errors.errors)} error(s); nothing was written", style="red")
        raise typer.Exit(1) from None
    for warning in result.warnings:
        err.print(f"warning: {warning}", markup=False)
    for line in result.summary():
        out.print(line, markup=False)
