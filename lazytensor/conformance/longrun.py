"""The long run: every chosen entry and dtype, in several processes, resumable, and safe from crashes and hangs.

A *chunk* is one entry with one dtype.  Each of a few threads owns a worker process
(:mod:`lazytensor.conformance.worker`), hands it chunks and collects outcomes.  When a worker dies or is silent for too
long, the check it was at is written down as a crash or a hang, and a new worker goes on behind it.  Outcomes are
appended to a state file, from which an interrupted run continues.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TextIO

import torch

from lazytensor._version import __version__

CRASH, HANG, BROKEN = "crash", "hang", "broken sample"


@dataclass(frozen=True)
class Chunk:
    """One entry with one dtype, and which of its checks to make."""

    op: str
    dtype: str
    limit: int | None
    forms: tuple[str, ...]
    skip: int = 0
    every: int = 1

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two chunks the same piece of work."""
        return (self.op, self.dtype, self.limit, self.forms, self.every)


class State:
    """The state file: a header, then one JSON object a line: outcomes, and a mark behind each finished chunk."""

    def __init__(self, path: Path, target: str, fresh: bool = False) -> None:
        self.path = path
        self.header = {"target": target, "torch": torch.__version__, "lazytensor": __version__}
        self.rows: list[dict[str, Any]] = []
        self.finished: set[tuple[Any, ...]] = set()
        self._lock = threading.Lock()
        if fresh or not self._read():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.header) + "\n", encoding="utf-8")
            self.rows.clear()
            self.finished.clear()
        self._file: TextIO = path.open("a", encoding="utf-8")

    def _read(self) -> bool:
        """Take over what an earlier run of the same versions finished; what it was in the middle of is done again."""
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines()
            if not lines or json.loads(lines[0]) != self.header:
                return False
        except (OSError, ValueError):
            return False
        pending: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for line in lines[1:]:
            try:
                row = json.loads(line)
            except ValueError:  # the run was interrupted within this line
                continue
            if "finished" in row:
                op, dtype, limit, forms, every = row["finished"]
                self.finished.add((op, dtype, limit, tuple(forms), every))
                self.rows += pending.pop((op, dtype), [])
            else:
                pending.setdefault((row["op"], row["dtype"]), []).append(row)
        return True

    def add(self, chunk: Chunk, rows: list[dict[str, Any]]) -> None:
        """Write down a finished chunk."""
        with self._lock:
            self.rows += rows
            self.finished.add(chunk.key)
            for row in [*rows, {"finished": chunk.key}]:
                self._file.write(json.dumps(row) + "\n")
            self._file.flush()


class _Worker:
    """One worker process and the lines it writes."""

    def __init__(self, command: list[str], patience: float) -> None:
        self.patience = patience
        self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as the worker)
        environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.said,
            env=environment,
        )
        self._rest = b""
        try:
            self.line(5 * patience)
        except (EOFError, TimeoutError):
            self.stop()
            self.said.seek(0)
            told = self.said.read().decode(errors="replace").strip()
            raise RuntimeError(f"a conformance worker does not start: {told[-2000:]}") from None

    def send(self, chunk: Chunk) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps(asdict(chunk)) + "\n").encode())
        self.process.stdin.flush()

    def line(self, patience: float | None = None) -> dict[str, Any]:
        """The next line; raises TimeoutError if it does not come, EOFError if the process died."""
        assert self.process.stdout is not None
        descriptor = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            if not select.select([descriptor], [], [], patience or self.patience)[0]:
                raise TimeoutError
            more = os.read(descriptor, 1 << 16)
            if not more:
                raise EOFError(f"exit code {self.process.wait()}")
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\n")
        return json.loads(text)  # type: ignore[no-any-return]

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with suppress(OSError):
                    stream.close()


def worker_command(backend: str) -> list[str]:
    """How a worker for ltc with this backend is started."""
    return [sys.executable, "-m", "lazytensor.conformance.worker", backend]


def run(
    chunks: Iterable[Chunk],
    state: State,
    command: list[str],
    jobs: int = 2,
    patience: float = 120.0,
    told: Callable[[Chunk, list[dict[str, Any]]], None] = lambda chunk, rows: None,
) -> None:
    """Run the chunks that the state does not have yet; ``told`` hears of each finished one, from several threads."""
    waiting: queue.SimpleQueue[Chunk] = queue.SimpleQueue()
    for chunk in chunks:
        if chunk.key not in state.finished:
            waiting.put(chunk)
    stopping = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        worker: _Worker | None = None
        try:
            for chunk in _until_empty(waiting, stopping):
                worker, rows = _run_chunk(chunk, worker, command, patience)
                state.add(chunk, rows)
                told(chunk, rows)
        except BaseException as error:
            failures.append(error)
            stopping.set()
        finally:
            if worker is not None:
                worker.stop()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    finally:
        stopping.set()
    if failures:
        raise failures[0]


def _until_empty(waiting: queue.SimpleQueue[Chunk], stopping: threading.Event) -> Iterator[Chunk]:
    while not stopping.is_set():
        try:
            yield waiting.get_nowait()
        except queue.Empty:
            return


def _run_chunk(
    chunk: Chunk, worker: _Worker | None, command: list[str], patience: float
) -> tuple[_Worker | None, list[dict[str, Any]]]:
    rows: list[dict[str, Any]] = []
    while True:
        if worker is None:
            worker = _Worker(command, patience)
        rest = Chunk(chunk.op, chunk.dtype, chunk.limit, chunk.forms, chunk.skip + len(rows) * chunk.every, chunk.every)
        try:
            worker.send(rest)
            while "op" in (row := worker.line()):
                rows.append(row)
        except (EOFError, TimeoutError, BrokenPipeError) as error:
            worker.stop()
            worker = None
            rows.append(_lost(chunk, HANG if isinstance(error, TimeoutError) else CRASH, str(error)))
            continue
        if "broken" in row:
            rows.append(_lost(chunk, BROKEN, row["broken"]))
        return worker, rows


def _lost(chunk: Chunk, status: str, detail: str) -> dict[str, Any]:
    return {"op": chunk.op, "dtype": chunk.dtype, "sample": -1, "form": "*", "status": status, "detail": detail}
