"""The parent's side of the compiling process: hand it graphs, and be told when they are in the disk cache.

There is one process at most, started when the first graph is wanted.  A thread waits for its answers.  If it dies, the
graph it was working on is reported as failed, and the next request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import diskcache, graphfile
from lazytensor.backend.graph import Graph

log = logging.getLogger("lazytensor")
Answer = Callable[[str | None], None]  # called with None when the entry is there, or with what went wrong


def encode(number: Any) -> list[str]:
    """A Python number as text, exactly."""
    return [type(number).__name__, number.hex() if isinstance(number, float) else repr(number)]


# Niced before it imports anything, which takes seconds.
_START = "import os; os.nice(5); from lazytensor.backend.inductor.worker import main; main()"


class Service:
    """Starts, feeds and watches the compiling process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, tuple[Answer, Path, subprocess.Popen[str] | None]] = {}
        self._next = 0
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        """In a forked child the process belongs to the parent."""
        self._lock = threading.Lock()
        self._process = None
        self._waiting = {}

    def submit(
        self,
        key: str,
        graph: Graph,
        numbers: list[Any],
        about: dict[str, Any],
        answer: Answer,
        device: torch.device | None = None,
    ) -> None:
        """Have a graph compiled into the cache under this key; ``answer`` is called on another thread."""
        handle, name = tempfile.mkstemp(dir=diskcache.root(), suffix=".graph")
        with os.fdopen(handle, "w") as file:
            file.write(graphfile.dumps(graph))
        with self._lock:
            self._next += 1
            number = self._next
            job = {
                "id": number,
                "key": key,
                "graph": name,
                "numbers": [encode(n) for n in numbers],
                "device": None if device is None else str(device),
                "about": about,
                "threads": torch.get_num_threads(),
                "seconds": settings.compile_seconds,
                "recorder": settings.compiled_recorder,
            }
            try:
                process = self._running()
                assert process.stdin is not None
                self._waiting[number] = (answer, Path(name), process)
                process.stdin.write(json.dumps(job) + "\n")
                process.stdin.flush()
            except OSError as problem:
                self._waiting.pop(number, None)
                Path(name).unlink(missing_ok=True)
                failure = f"the compiling process could not be reached: {problem}"
            else:
                return
        answer(failure)

    @property
    def busy(self) -> int:
        """How many graphs are being compiled or wait for it."""
        return len(self._waiting)

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            cache = diskcache.root().parent / "inductor"
            cache.mkdir(mode=0o700, exist_ok=True)
            environment = os.environ | {
                "TORCHINDUCTOR_CACHE_DIR": str(cache),
                "LAZYTENSOR_CACHE_DIR": str(settings.cache_directory()),
                "LAZYTENSOR_BACKEND": "reference",
                "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            }
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=environment,
                # Not a new session: the kernel gives each the same share of the cores, whatever the niceness in it.
                process_group=0,
            )
            threading.Thread(target=self._listen, args=(self._process,), daemon=True, name="lazytensor-compile").start()
        return self._process

    def _listen(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            try:
                reply = json.loads(line)
            except ValueError:  # it was killed while it wrote
                break
            self._answer(reply["id"], reply.get("error"))
        process.wait()
        # Another process may have been started already: only what was given to this one is lost.
        for number, (_answer, _path, given) in list(self._waiting.items()):
            if given is process:
                self._answer(number, f"the compiling process ended (exit code {process.returncode})")

    def _answer(self, number: int, error: str | None) -> None:
        found = self._waiting.pop(number, None)
        if found is None:
            return
        answer, path, _process = found
        path.unlink(missing_ok=True)
        try:
            answer(error)
        except Exception:
            log.exception("lazytensor: a compiled graph could not be taken into use")

    def close(self) -> None:
        """End the compiling process: what it has not finished is lost, and compiled again when next wanted."""
        process, self._process = self._process, None
        for _answer, path, _process in self._waiting.values():
            path.unlink(missing_ok=True)
        self._waiting.clear()
        if process is not None and process.poll() is None:
            with contextlib.suppress(OSError):
                os.killpg(process.pid, 15)
            process.wait()


service = Service()
