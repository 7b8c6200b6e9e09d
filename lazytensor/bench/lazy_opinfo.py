"""PyTorch's own samples on ``torch._lazy`` and on ltc, judged by the same measure, for the table in the README.

The measure is the one that ``torch._lazy`` can meet: values and dtypes within PyTorch's tolerance, strides left out,
and entries whose results are random left out.  An entry passes if all its samples do.  Two runs: the first two samples
forward, and the first eight with gradients.  Each system runs in processes of its own; ``torch._lazy`` crashes on some
samples, which costs it those.

    python -m lazytensor.bench.lazy_opinfo [--json FILE] [--jobs 2]
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
SYSTEMS = ("ltc", "torch._lazy")
RUNS = {"two samples forward": (2, False), "eight samples with gradients": (8, True)}


def serve(system: str, gradients: bool) -> None:
    """Be a worker of the long run for this system."""
    if system == "torch._lazy":
        # The package's own __init__ would register ltc and change PyTorch, so a bare package stands for it here.
        bare = types.ModuleType("lazytensor")
        bare.__path__ = [str(HERE.parents[1])]
        sys.modules["lazytensor"] = bare
    import dataclasses
    import logging

    from lazytensor.conformance import opinfo, worker
    from lazytensor.conformance.compare import Rule

    logging.getLogger("lazytensor").setLevel(logging.ERROR)
    rule = Rule(exact=False, strides=False, grad_flags=False)
    if system == "ltc":
        target = dataclasses.replace(opinfo.ltc(), rule=rule, plain=True, gradients=gradients)
    else:
        import torch
        import torch._lazy.metrics
        import torch._lazy.ts_backend

        torch._lazy.ts_backend.init()

        def counted() -> dict[str, int]:
            names = [n for n in torch._lazy.metrics.counter_names() if n.startswith("aten::")]
            return {n: torch._lazy.metrics.counter_value(n) for n in names}

        target = opinfo.Target("lazy", "ts", gradients, True, rule, fallbacks=counted)
    worker.serve(target, lambda outcome: outcome)


def comparable(name: str) -> bool:
    """Whether the CPU runs an entry's first samples, and gives the same result under two seeds."""
    import torch

    from lazytensor.conformance import opinfo
    from lazytensor.conformance.compare import Rule, difference

    entry = opinfo.entries()[name]
    if entry.name in opinfo.UNINITIALISED:
        return False
    for sample in opinfo.samples(entry, torch.float32, 2):
        results = []
        for seed in (1, 2):
            torch.manual_seed(seed)
            try:
                with torch.no_grad():
                    results.append(entry(sample.input, *sample.args, **sample.kwargs))
            except Exception:  # for CUDA only
                return False
        if difference(results[0], results[1], Rule(strides=False)) is not None:
            return False
    return True


def compare(jobs: int, only: list[str] | None = None) -> dict[str, Any]:
    """Run both systems; how many entries each passes."""
    import torch

    from lazytensor.conformance import longrun, opinfo

    names = [n for n, e in opinfo.entries().items() if opinfo.supports(e, torch.float32) and (not only or n in only)]
    names = [n for n in names if comparable(n)]
    found: dict[str, Any] = {"torch": torch.__version__, "entries": len(names), "runs": []}
    for title, (limit, gradients) in RUNS.items():
        for system in SYSTEMS:
            with tempfile.TemporaryDirectory() as folder:
                state = longrun.State(Path(folder) / "state.jsonl", system)
                command = [sys.executable, "-P", str(HERE), "--serve", system, *(["--gradients"] if gradients else [])]
                longrun.run([longrun.Chunk(n, "float32", limit, ("forward",)) for n in names], state, command, jobs)
            failing = sorted({r["op"] for r in state.rows if r["status"] != opinfo.EQUAL})
            crashed = sorted({r["op"] for r in state.rows if r["status"] in (longrun.CRASH, longrun.HANG)})
            fell_back = sorted({r["op"] for r in state.rows if r.get("fallbacks")})
            found["runs"].append(
                {
                    "run": title,
                    "system": system,
                    "passing": len(names) - len(failing),
                    "samples": len(state.rows),
                    "equal": sum(r["status"] == opinfo.EQUAL for r in state.rows),
                    "failing": failing,
                    "crashed": crashed,
                    "fell_back": fell_back,
                }
            )
    return found


def main() -> None:
    """Parse the command line, run, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", choices=SYSTEMS, help=argparse.SUPPRESS)
    parser.add_argument("--gradients", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--op", action="append", help="only this entry; repeatable")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.gradients)
        return
    found = compare(options.jobs, options.op)
    print(f"torch {found['torch']}: {found['entries']} entries that the CPU runs and whose results are not random")
    for run in found["runs"]:
        print(
            f"{run['run']:30} {run['system']:12} {run['passing']:4} entries pass, "
            f"{run['equal']:5} of {run['samples']:5} samples, "
            f"{len(run['crashed'])} crashed, {len(run['fell_back'])} fell back"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
