"""One system runs one workload in this process, a round of steps at a time, and answers in lines of JSON.

Run as a program it does `--steps` steps and ends, or with `--serve` waits for requests on standard input:

    round N        N steps, cut after each, one wait at the end (a pipeline stays full)
    round N wait   N steps, each waited for, so that recording and cut + run can be told apart
    alone N        N runs of a step's computation by itself, without recording
    count          the ATen operations of one step (on eager)
    free           record a step, drop its result uncut, clear the caches: how long letting go takes

Reading losses, collecting garbage and asking for memory happen outside the timed part.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from torch import Tensor

# Losses of this many first steps are kept, to compare systems before rounding differences have grown.
LOSSES = 10


class Session:
    """A started system with its workload."""

    def __init__(self, kind: str, backend: str, options: Mapping[str, Any], workload: str) -> None:
        from . import systems, workloads

        started = time.perf_counter()
        self.system = systems.start(kind, backend, options)
        # The optimizers load this when first used; it is no memory of the workload.
        importlib.import_module("torch._dynamo")
        self.baseline_mb = resident_mb()
        self.workload = workloads.build(workload, self.system.device)
        self.system.adapt(self.workload)
        # The transfers belong to the building, not to the first step.
        self.system.cut(wait=True)
        self.start_s = time.perf_counter() - started

    def round(self, steps: int, wait: bool) -> dict[str, Any]:
        """Run steps and say how long each took to record and to cut, in seconds."""
        system, step, now = self.system, self.workload.step, time.perf_counter
        record: list[float] = []
        cut: list[float] = []
        collect: list[float] = []
        kept: dict[int, Tensor] = {}
        gc.collect()
        reset_peak()
        start = now()
        for i in range(steps):
            t0 = now()
            loss = step()
            t1 = now()
            system.cut(wait)
            t2 = now()
            record.append(t1 - t0)
            cut.append(t2 - t1)
            if wait and (us := system.collect_us()) is not None:
                collect.append(us)
            if self.workload.steps <= LOSSES or i == steps - 1:
                kept[self.workload.steps - 1] = loss
        system.wait()
        total = now() - start
        return {
            "steps": steps,
            "total": total,
            "record": record,
            "cut": cut,
            "collect_us": collect,
            "peak_mb": peak_mb(),
            "losses": {index: value(loss) for index, loss in kept.items()},
            "counters": system.counters(),
            "busy": system.busy(),
        }

    def rest(self, seconds: float) -> dict[str, Any]:
        """Take no step until what goes on beside the steps has ended, or for so long."""
        start = time.perf_counter()
        while self.system.busy() and time.perf_counter() - start < seconds:
            time.sleep(0.1)
        return {"rested_s": time.perf_counter() - start}

    def count(self) -> dict[str, Any]:
        """Every ATen call a step makes, as a dispatch mode sees them: after autograd, before the device's kernels."""
        from torch.utils._python_dispatch import TorchDispatchMode

        calls: Counter[str] = Counter()

        class Count(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                calls[str(func)] += 1
                return func(*args, **(kwargs or {}))

        # The first step also makes the optimizer's state.
        self.workload.step()
        with Count():  # type: ignore[no-untyped-call]
            self.workload.step()
        return {"ops": calls.total(), "by_name": dict(calls.most_common())}

    def free(self) -> dict[str, Any]:
        """How long it takes to let go of a recorded step that nobody wants, and of everything compiled."""
        result = self.workload.step()
        gc.collect()
        start = time.perf_counter()
        del result
        self.system.cut(wait=True)
        dropped = time.perf_counter()
        self.system.clear()
        gc.collect()
        return {"drop": dropped - start, "clear": time.perf_counter() - dropped}

    def answer(self, request: str) -> dict[str, Any]:
        """Do what one line asks."""
        match request.split():
            case ["round", steps]:
                return self.round(int(steps), wait=False)
            case ["round", steps, "wait"]:
                return self.round(int(steps), wait=True)
            case ["alone", runs]:
                return {"alone_s": self.system.alone(self.workload.step, int(runs))}
            case ["rest", seconds]:
                return self.rest(float(seconds))
            case ["count"]:
                return self.count()
            case ["free"]:
                return self.free()
        raise ValueError(f"unknown request {request!r}")


def value(loss: Tensor) -> float:
    """The loss as a number; the arithmetic is done on the CPU, so that no system records anything for it."""
    return float(loss.cpu().double().mean())


def status_mb(field: str) -> float | None:
    """A memory figure of this process in MB, where the kernel offers it."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(field + ":")), None)


def resident_mb() -> float:
    """Resident memory now."""
    return status_mb("VmRSS") or peak_mb()


def peak_mb() -> float:
    """The highest resident memory since `reset_peak`, or of the whole run where that cannot be reset."""
    return status_mb("VmHWM") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def reset_peak() -> None:
    """Let the peak start from what is resident now."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def first_line(error: BaseException) -> str:
    """The error as one line."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0]}" if text else type(error).__name__


def serve(arguments: argparse.Namespace, requests: TextIO, answers: TextIO) -> None:
    """Answer each request with one line; an error is an answer too, and the last one."""

    def say(answer: Mapping[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    try:
        session = Session(arguments.system, arguments.backend, dict(arguments.option), arguments.workload)
        say({"baseline_mb": session.baseline_mb, "start_s": session.start_s})
        for request in requests:
            say(session.answer(request))
    except Exception as error:
        say({"error": first_line(error)})


def once(arguments: argparse.Namespace, answers: TextIO) -> None:
    """The first step, then the others, as one JSON line or as a sentence."""
    session = Session(arguments.system, arguments.backend, dict(arguments.option), arguments.workload)
    first = session.round(1, wait=True)
    rest = session.round(max(arguments.steps - 1, 1), wait=True)
    times = [r + c for r, c in zip(rest["record"], rest["cut"], strict=True)]
    result = {
        "system": arguments.system,
        "backend": arguments.backend if arguments.system == "ltc" else None,
        "workload": arguments.workload,
        "first_step": first["total"],
        "steps": times,
        "losses": first["losses"] | rest["losses"],
        "peak_mb": max(first["peak_mb"], rest["peak_mb"]),
        "baseline_mb": session.baseline_mb,
        "counters": rest["counters"],
    }
    if arguments.json:
        text = json.dumps(result)
    else:
        middle = sorted(times)[len(times) // 2]
        text = f"{arguments.workload} on {arguments.system}: first step {first['total'] * 1e3:.2f} ms, "
        text += f"then {middle * 1e3:.2f} ms (median of {len(times)}), peak {result['peak_mb']:.0f} MB"
    print(text, file=answers, flush=True)


def option(text: str) -> tuple[str, Any]:
    """`name=value`, the value in JSON."""
    name, _, literal = text.partition("=")
    return name, json.loads(literal)


def main(argv: list[str] | None = None) -> None:
    """Serve requests, or run once."""
    parser = argparse.ArgumentParser(description="Run one system on one workload in this process.")
    parser.add_argument("--system", required=True)
    parser.add_argument("--workload", required=True)
    parser.add_argument("--backend", default="reference", help="lazytensor's backend")
    parser.add_argument("--option", action="append", type=option, default=[], metavar="NAME=JSON")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--serve", action="store_true", help="answer requests on standard input")
    arguments = parser.parse_args(argv)
    # Compilers and libraries print; the answers keep the real standard output to themselves.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if arguments.serve:
        serve(arguments, sys.stdin, answers)
    else:
        once(arguments, answers)


def command(arguments: list[str]) -> tuple[list[str], dict[str, str]]:
    """The command line and environment that run this file without importing the lazytensor package around it.

    `-P` keeps this folder off the path, where `trace.py` would hide the standard library's; the folder that holds the
    package goes on it, so that the system `ltc` finds this lazytensor and no other.
    """
    here = Path(__file__).resolve()
    path = [str(here.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return [sys.executable, "-P", str(here), *arguments], os.environ | {"PYTHONPATH": os.pathsep.join(path)}


def run_alone() -> None:
    """Run `main` with this folder as a package of its own.

    `python -m lazytensor.bench.worker` has imported lazytensor already, so the process is replaced by one that has not.
    """
    if "lazytensor" in sys.modules:
        line, environment = command(sys.argv[1:])
        os.execve(sys.executable, line, environment)
    here = Path(__file__).resolve()
    spec = importlib.util.spec_from_file_location(
        "lazytensor_bench", here.with_name("__init__.py"), submodule_search_locations=[str(here.parent)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the package of {here.name}")
    package = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = package
    spec.loader.exec_module(package)
    importlib.import_module("lazytensor_bench.worker").main()


if __name__ == "__main__":
    run_alone()
