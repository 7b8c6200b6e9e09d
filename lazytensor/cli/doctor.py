"""``lazytensor doctor``: what is installed, what works, and every setting with the place its value came from."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from .console import FAILED, AsJson, err, out, print_json, progress, quiet

# Packages that lazytensor uses where they are installed, each with what for.
PACKAGES = {
    "torch": "the PyTorch that ltc is a device of",
    "pyyaml": "generating kernels",
    "rich": "this command",
    "typer": "this command",
    "numpy": "Tensor.numpy()",
    "onnx": "the example backend that writes ONNX",
    "onnxruntime": "the example backend that runs ONNX",
    "matplotlib": "plots of lazytensor bench",
    "tensorboard": "metrics for TensorBoard",
}


PYTHON_RECORDER = "Python; 'lazytensor cache build' compiles it, which halves the cost of recording"
NO_COMPILER = "[yellow]no compiler: backends that generate C++ cannot work[/yellow]"


def doctor(json: AsJson = False) -> None:
    """Say what is installed, which backends work, and every setting.

    Each backend is given one tiny training step, whose loss and parameters are compared with the CPU's. A backend that
    cannot work here says why. Settings are shown with their values and where each came from: the default, an
    environment variable, or the program.

    Exit code 1 if the backend in use does not work.
    """
    with err.status("starting PyTorch"):
        import lazytensor as lt
    quiet()
    names = sorted(lt.backends())
    with progress(len(names), "backends") as (bar, task):

        def say(name: str) -> None:
            bar.update(task, description=name, advance=1)

        result = examine(names, say)
    if json:
        print_json(result)
    else:
        _show(result)
    raise typer.Exit(0 if result["healthy"] else FAILED)


def examine(names: list[str], say: Callable[[str], None] = lambda name: None) -> dict[str, Any]:
    """Everything that the doctor knows, as plain data."""
    from lazytensor import settings
    from lazytensor.backend import compiler
    from lazytensor.device import recorder

    backends = []
    for name in names:
        say(name)
        backends.append(_try(name))
    working = {b["name"] for b in backends if b["works"]}
    return {
        "healthy": settings.backend in working,
        "machine": {
            "system": platform.platform(),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "compiler": compiler.find(),
            "compiled_recorder": recorder.in_use(),
        },
        "packages": {name: _version(name) for name in ("lazytensor", *PACKAGES)},
        "backend": settings.backend,
        "backends": backends,
        "settings": [
            {"name": s.name, "value": s.value, "origin": s.origin, "variable": s.env, "help": s.help}
            for s in settings.all_settings()
        ],
        "cache": _cache(settings.cache_directory()),
    }


def _version(name: str) -> str | None:
    if name == "lazytensor":
        from lazytensor import __version__

        return __version__
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _cache(folder: Path) -> dict[str, Any]:
    files = [path.stat() for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    return {"directory": str(folder), "files": len(files), "bytes": sum(f.st_size for f in files)}


def _try(name: str) -> dict[str, Any]:
    """One backend, on a training step; what went wrong is a finding, not a failure of the doctor."""
    from lazytensor.backend import registry

    started = time.perf_counter()
    found: dict[str, Any] = {"name": name, "works": False, "equal": False, "difference": None, "error": None}
    try:
        with registry.scope(name):
            found["difference"] = _smoke()
        found["equal"] = found["difference"] == 0
        found["works"] = found["difference"] <= 1e-5
        if not found["works"]:
            found["error"] = f"results differ from the CPU's by {found['difference']:.2g}"
    except Exception as error:  # whatever a compiler or a missing package may raise
        found["error"] = f"{type(error).__name__}: {error}".splitlines()[0]
    found["seconds"] = time.perf_counter() - started
    return found


def _smoke() -> float:
    """The largest difference between ltc and the CPU after two training steps of a small network."""
    import torch

    import lazytensor as lt

    def values(device: str) -> Iterator[torch.Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).to(device)
        optimizer = torch.optim.Adam(model.parameters())
        x = torch.randn(5, 8).to(device)
        for _ in range(2):
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if device == "ltc":
                lt.sync()
            yield loss.detach().cpu()
        yield from (p.detach().cpu() for p in model.parameters())

    return max(float((a - b).abs().max()) for a, b in zip(list(values("ltc")), list(values("cpu")), strict=True))


def _show(result: dict[str, Any]) -> None:
    machine = result["machine"]
    out.print(f"[bold]Machine[/bold]  {machine['system']}, {machine['cores']} cores, Python {machine['python']}")
    out.print(f"[bold]C++[/bold]      {machine['compiler'] or NO_COMPILER}")
    out.print(f"[bold]Recorder[/bold] {'compiled' if machine['compiled_recorder'] else PYTHON_RECORDER}")
    cache = result["cache"]
    out.print(f"[bold]Cache[/bold]    {cache['directory']}: {cache['files']} files, {cache['bytes'] / 1e6:.1f} MB")
    packages = Table("package", "version", "used for", title="Installed", title_justify="left", box=SIMPLE_HEAD)
    for name, found in result["packages"].items():
        packages.add_row(name, found or "[dim]no[/dim]", PACKAGES.get(name, ""))
    out.print(packages)
    backends = Table("backend", "", "two steps took", "", title="Backends", title_justify="left", box=SIMPLE_HEAD)
    for b in result["backends"]:
        equal = "equal to the CPU, bit for bit" if b["equal"] else f"within {b['difference'] or 0:.1g} of the CPU"
        remark = escape(b["error"]) if b["error"] else equal
        mark = "[green]works[/green]" if b["works"] else "[red]does not work[/red]"
        name = f"[bold]{b['name']}[/bold] (in use)" if b["name"] == result["backend"] else b["name"]
        backends.add_row(name, mark, f"{b['seconds']:.2f} s", remark)
    out.print(backends)
    settings = Table("setting", "value", "from", title="Settings", title_justify="left", box=SIMPLE_HEAD)
    settings.add_column("variable", style="dim", overflow="fold")
    for s in result["settings"]:
        settings.add_row(s["name"], escape(str(s["value"])), s["origin"], s["variable"])
    out.print(settings)
    out.print("[dim]lazytensor.settings explains each; so does the documentation's page on settings.[/dim]")
