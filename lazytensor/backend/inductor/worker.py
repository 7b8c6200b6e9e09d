"""The compiling process: takes graphs from its standard input and leaves compiled entries in the disk cache.

One line in, one line out, both JSON.  In: ``{"id", "key", "graph" (path of a graph file), "numbers", "about",
"threads", "seconds", "recorder"}``.  Out: ``{"id", "ok"}`` or ``{"id", "error"}``.  The process is niced, so that
training has the machine; it ends with its parent.  A program that runs for a while without the compiled recorder gets
it built on the side, for its next start.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any


def _numbers(encoded: list[list[str]]) -> list[Any]:
    from lazytensor.backend.inductor.load import _KINDS

    return [_KINDS[kind](text) for kind, text in encoded]


_A_WHILE = 20  # seconds after its first graph in which a program shows that it is no test of a moment


class _Late(Exception):
    pass


def _too_late(signum: int, frame: Any) -> None:
    raise _Late


def compile_job(job: dict[str, Any]) -> None:
    """Compile one graph into the disk cache."""
    from lazytensor.backend import diskcache, graphfile
    from lazytensor.backend.inductor.build import build

    graph = graphfile.loads(Path(job["graph"]).read_text())
    folder = Path(tempfile.mkdtemp(dir=diskcache.root()))
    try:
        build(graph, _numbers(job["numbers"]), folder)
        diskcache.store(job["key"], folder, job["about"])
    except BaseException:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)
        raise


def _build_recorder() -> None:
    from lazytensor.device.recorder.build import build

    with contextlib.suppress(RuntimeError, OSError):  # the Python kernels do as well, only slower
        build()


def main() -> None:
    """Serve until the standard input ends."""
    os.nice(10)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what compilers print is no answer
    import torch

    signal.signal(signal.SIGALRM, _too_late)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    later: list[threading.Timer] = []
    for line in sys.stdin:
        job = json.loads(line)
        answer: dict[str, Any] = {"id": job["id"], "ok": True}
        signal.alarm(int(job["seconds"]))
        torch.set_num_threads(job["threads"])  # the code is made for so many
        try:
            compile_job(job)
        except _Late:
            answer = {"id": job["id"], "error": f"it took longer than {job['seconds']} s"}
        except Exception as problem:
            text = str(problem).strip().split("\n")[0]
            answer = {"id": job["id"], "error": f"{type(problem).__name__}: {text}"}
        finally:
            signal.alarm(0)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if job["recorder"] and not later:
            later.append(threading.Timer(_A_WHILE, _build_recorder))
            later[0].daemon = True
            later[0].start()


if __name__ == "__main__":
    main()
