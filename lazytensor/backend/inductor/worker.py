"""The compiling process: takes graphs from its standard input and leaves compiled entries in the disk cache.

One line in, one line out, both JSON.  In: ``{"id", "key", "graph" (path of a graph file), "numbers", "about",
"device", "threads", "seconds", "recorder"}``.  Out: ``{"id", "ok"}`` or ``{"id", "error"}``.  The process is niced, so
that training has the machine; it ends with its parent.  A program that runs for a while without the compiled recorder
gets it built on the side, for its next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any


def _numbers(encoded: list[list[str]]) -> list[Any]:
    from lazytensor.backend.inductor.load import _KINDS

    return [_KINDS[kind](text) for kind, text in encoded]


_A_WHILE = 20  # seconds after its first graph in which a program shows that it is no test of a moment


class _Late(Exception):
    pass


class Limit:
    """Ends a job once it has used so many seconds of processor time, its compilers' included.

    A clock on the wall would end jobs on a busy machine, where this process has the lowest claim.  It ends only those
    that hang.
    """

    TICK = 2.0
    HANGS = 10  # so many times the limit

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __enter__(self) -> None:
        signal.signal(signal.SIGALRM, self._look)
        self.used, self.began = _processor_seconds(), time.monotonic()
        signal.setitimer(signal.ITIMER_REAL, self.TICK, self.TICK)

    def _look(self, signum: int, frame: Any) -> None:
        hangs = time.monotonic() - self.began > self.HANGS * self.seconds
        if hangs or _processor_seconds() - self.used > self.seconds:
            raise _Late

    def __exit__(self, *error: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _processor_seconds() -> float:
    return sum(os.times()[:4])


def compile_job(job: dict[str, Any]) -> None:
    """Compile one graph into the disk cache."""
    import torch

    from lazytensor.backend import diskcache, graphfile
    from lazytensor.backend.inductor.build import build

    graph = graphfile.loads(Path(job["graph"]).read_text())
    folder = Path(tempfile.mkdtemp(dir=diskcache.root()))
    try:
        device = None if job["device"] is None else torch.device(job["device"])
        build(graph, _numbers(job["numbers"]), folder, device)
        diskcache.store(job["key"], folder, job["about"])
    except BaseException:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        raise


def _build_recorder() -> None:
    from lazytensor.native.build import build

    with contextlib.suppress(RuntimeError, OSError):  # the Python kernels do as well, only slower
        build()


def main() -> None:
    """Serve until the standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    later: list[threading.Timer] = []
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {"id": job["id"], "ok": True}
        torch.set_num_threads(job["threads"])  # the code is made for so many
        try:
            with Limit(job["seconds"]):
                compile_job(job)
        except _Late:
            answer = {"id": job["id"], "error": f"it took more than {job['seconds']} s of processor time"}
        except Exception as problem:
            text = str(problem).strip().split("\n")[0]
            answer = {"id": job["id"], "error": f"{type(problem).__name__}: {text}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if job["recorder"] and not later:
            later.append(threading.Timer(_A_WHILE, _build_recorder))
            later[0].daemon = True
            later[0].start()
