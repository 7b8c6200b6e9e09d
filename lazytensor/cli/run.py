"""``lazytensor run``: a user's program, unchanged, on ltc; afterwards a summary of what it did there."""

from __future__ import annotations

import enum
import re
import runpy
import sys
import time
import traceback
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from .console import FAILED, AsJson, err, print_json


class Replace(enum.StrEnum):
    """Which device of the program ltc stands in for."""

    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


def run(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="The program.")],
    replace: Annotated[
        Replace,
        typer.Option(help="What ltc stands in for; auto: cuda if the program speaks of it."),
    ] = Replace.auto,
    backend: Annotated[str | None, typer.Option(help="The backend to use.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write a page about the run to this file (.html).")] = None,
    json: AsJson = False,
) -> None:
    """Run a program that was written for CUDA or the CPU on [bold]ltc[/bold], unchanged.

    What stands after the script's name are the script's own arguments:
    [cyan]lazytensor run --backend ts train.py --epochs 3[/cyan]

    [bold]--replace cuda[/bold]: whatever the program asks of cuda it gets from ltc. torch.cuda.is_available() is true,
    there is one device, torch.compile gives back what it is given; the CPU stays the CPU.

    [bold]--replace cpu[/bold]: what the program makes is made on ltc, requests for the CPU are answered by ltc;
    .cpu() and .numpy() read.

    There is a cut after every step of an optimizer, so that each turn of a training loop is the same graph.

    The program's own output goes where it always goes; the summary follows on stderr. With [bold]--json[/bold]
    it is the last thing on stdout. The exit code is the program's own; 1 if it raised.
    """
    with err.status("starting PyTorch"):
        import lazytensor as lt
        from lazytensor.cli.stand_in import StandIn
    if backend is not None:
        lt.set_backend(backend)
    lt.current_backend()  # which may compute on the very device that ltc stands in for
    replaced = choose(script, replace)
    before = _counts(lt)
    arguments = sys.argv
    sys.argv = [str(script), *context.args]
    sys.path.insert(0, str(script.resolve().parent))
    code = 0
    started = time.perf_counter()
    try:
        with StandIn(replaced):
            runpy.run_path(str(script), run_name="__main__")
            lt.sync(wait=True)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else FAILED
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except Exception as error:
        code = FAILED
        traceback.print_exception(_without_this_file(error))
    finally:
        sys.argv = arguments
        sys.path.pop(0)
    after = _counts(lt)
    result = {
        "script": str(script),
        "replaced": replaced,
        "seconds": time.perf_counter() - started,
        "cuts": sum(after[k] - before[k] for k in ("hits", "misses")),
        "compiled": after["misses"] - before["misses"],
        "from_cache": after["hits"] - before["hits"],
        "causes": _causes(lt),
        "fallbacks": {k: n - before["fallbacks"].get(k, 0) for k, n in after["fallbacks"].items()},
        "exit_code": code,
    }
    if report is not None:
        result["report"] = str(lt.report(report))
    if json:
        print_json(result)
    else:
        _summary(result)
    raise typer.Exit(code)


def choose(script: Path, replace: Replace) -> str:
    """The device to stand in for: cuda if the program's text speaks of it, else the CPU."""
    if replace is not Replace.auto:
        return replace.value
    return "cuda" if re.search(r"\bcuda\b", script.read_text(encoding="utf-8", errors="replace")) else "cpu"


def _counts(lt: Any) -> dict[str, Any]:
    info = lt.cache_info()
    names = [name for name in lt.metrics.counter_names() if name.startswith("aten::")]
    return {
        "hits": info["hits"],
        "misses": info["misses"],
        "fallbacks": {name: lt.metrics.counter_value(name) or 0 for name in names},
    }


def _causes(lt: Any) -> list[dict[str, Any]]:
    """Which lines cut, most often first."""
    lines = sorted(lt.syncs().data["lines"], key=lambda line: -line["count"])
    return [
        {key: line[key] for key in ("reason", "file", "line", "count", "splits")} for line in lines if line["count"]
    ]


def _without_this_file(error: Exception) -> Exception:
    """The error with a traceback that begins in the program."""
    frame = error.__traceback__
    while frame is not None and (
        frame.tb_frame.f_code.co_filename == __file__ or "runpy" in frame.tb_frame.f_code.co_filename
    ):
        frame = frame.tb_next
    return error.with_traceback(frame)


def _summary(result: dict[str, Any]) -> None:
    cuts, compiled = result["cuts"], result["compiled"]
    err.rule("lazytensor", style="dim")
    if not cuts and result["exit_code"] == 0:
        other = "cpu" if result["replaced"] == "cuda" else "cuda"
        err.print(
            f"Nothing ran on ltc: the program never used the device {result['replaced']}. "
            f"Try [cyan]--replace {other}[/cyan]."
        )
        return
    err.print(
        f"{escape(Path(result['script']).name)} ran on ltc in place of {result['replaced']}: "
        f"{result['seconds']:.1f} s, exit code {result['exit_code']}"
    )
    err.print(f"[bold]cuts[/bold]       {cuts}, of which {result['from_cache']} found their graph in the cache")
    for cause in result["causes"][:5]:
        place = f"{Path(cause['file']).name}:{cause['line']}"
        split = f", split a step {cause['splits']} times" if cause["splits"] else ""
        err.print(f"           {cause['count']} × {escape(cause['reason'])} at {escape(place)}{split}")
    err.print(f"[bold]compiled[/bold]   {compiled} graphs")
    if result["fallbacks"]:
        err.print("[bold]fallbacks[/bold]  " + ", ".join(f"{k} × {n}" for k, n in sorted(result["fallbacks"].items())))
    else:
        err.print("[bold]fallbacks[/bold]  none")
    if "report" in result:
        err.print(f"[bold]report[/bold]     {escape(result['report'])}")
