"""Systems are measured alternately, each alive in a process of its own, so that a noisy machine is noisy for all.

A `Lane` is one system on one workload: its process, its rounds, and the error that ended it if one did. A `Race` holds
the lanes compared with each other: they start together, warm up one after the other, and then take turns. What a lane
found out is a dict of plain data; `report` makes ratios and tables of such dicts.
"""

from __future__ import annotations

import json
import math
import os
import select
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from .. import settings
from ..native import build
from . import worker

START_BUDGET = 120.0
TURN_BUDGET = 300.0
MOST_STEPS = 200
CUT_OFF = "cut off"


@dataclass(frozen=True)
class System:
    """A column of a table: what is run, and under which name it is shown."""

    name: str
    kind: str
    backend: str = "reference"
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)


EAGER = System("eager", "eager")
COMPILE = System("compile", "compile")
LAZY = System("torch._lazy", "lazy")
LAZY_REUSE = System("torch._lazy reuse", "lazy-reuse")
REFERENCE = System("ltc reference", "ltc", "reference")
IN_PYTHON = System("ltc in Python", "ltc", "reference", environment={"LAZYTENSOR_COMPILED_RECORDER": "0"})
TS = System("ltc ts", "ltc", "ts")
INDUCTOR = System("ltc inductor", "ltc", "inductor", {"wait": True})
AUTO = System("ltc auto", "ltc", "auto")


class LaneError(Exception):
    """A worker answered with an error, died, or was stopped for taking too long."""


class Lane:
    """One system on one workload. Once it has failed, `error` says why and every request answers None."""

    def __init__(self, system: System, workload: str) -> None:
        self.system, self.workload = system, workload
        self.error: str | None = None
        self.started: dict[str, Any] = {}
        self.warmup: list[dict[str, Any]] = []
        self.rounds: list[dict[str, Any]] = []
        self.losses: dict[str, float] = {}
        self.shown: list[float] = []  # a step's time over that of its computation alone
        self._buffer = b""
        self._folder = tempfile.TemporaryDirectory(prefix="lazytensor-bench-", ignore_cleanup_errors=True)
        self._process = self._start()
        self.allow(START_BUDGET)

    def _start(self) -> subprocess.Popen[bytes]:
        system = self.system
        arguments = [f"--system={system.kind}", f"--backend={system.backend}", f"--workload={self.workload}"]
        arguments += [f"--option={name}={json.dumps(value)}" for name, value in system.options.items()]
        line, environment = worker.command(["--serve", *arguments])
        folder = Path(self._folder.name)
        environment |= system.environment or fresh_caches(folder)
        with (folder / "stderr").open("wb") as errors:
            # In a session of its own: an interrupt from the keyboard is for the runner, which ends the worker.
            return subprocess.Popen(
                line,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                start_new_session=True,
            )

    def allow(self, seconds: float) -> None:
        """From now on the lane has this long; the request that overruns it ends the lane."""
        self._budget, self._deadline = seconds, time.monotonic() + seconds

    def left(self) -> float:
        """Seconds of what was allowed."""
        return self._deadline - time.monotonic()

    def ready(self) -> None:
        """Wait until the system has started and the workload is built."""
        self.started = self._attempt(self._read) or {}

    def ask(self, request: str) -> dict[str, Any] | None:
        """The worker's answer, or None where the lane has failed or does so now."""
        return self._attempt(lambda: self._exchange(request))

    def round(self, steps: int, wait: bool = False) -> dict[str, Any] | None:
        """Run steps; the answer is kept in `rounds`, its losses in `losses`."""
        answer = self.ask(f"round {steps}{' wait' if wait else ''}")
        if answer is not None:
            self.rounds.append(answer)
            self.losses |= answer.pop("losses")
        return answer

    def close(self) -> None:
        """End the worker and whatever it started: a compiler left behind would disturb the lanes that follow."""
        if self._process.poll() is None:
            for pid in [*descendants(self._process.pid), self._process.pid]:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self._process.communicate()
        self._folder.cleanup()

    def _attempt(self, action: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
        if self.error is not None:
            return None
        try:
            answer = action()
            if "error" in answer:
                raise LaneError(answer["error"])
        except LaneError as error:
            self.error = str(error)
            self.close()
            return None
        return answer

    def _exchange(self, request: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(request.encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise LaneError(self._last_words()) from None
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, self.left()))[0]:
                raise LaneError(f"{CUT_OFF} after {self._budget:.0f} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise LaneError(self._last_words())
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _last_words(self) -> str:
        """Why a worker that answers no more has died."""
        code = self._process.wait()
        if code < 0:
            return f"killed by {signal.Signals(-code).name}"
        said = (Path(self._folder.name) / "stderr").read_text(errors="replace").strip().splitlines()
        return f"exit code {code}: {said[-1] if said else 'no message'}"

    def result(self) -> dict[str, Any]:
        """What was found out. Times are seconds per step; `turns` holds one entry for each turn taken."""
        result: dict[str, Any] = {"system": self.system.name, "workload": self.workload, "error": self.error}
        if self.started:
            result |= {"start_s": self.started["start_s"], "baseline_mb": self.started["baseline_mb"]}
        every = self.warmup + self.rounds
        if every:
            result |= {
                "first_s": every[0]["total"],
                "peak_mb": max(r["peak_mb"] for r in every),
                "counters": every[-1]["counters"],
                "losses": self.losses,
            }
        if self.rounds and self.error is None:
            turns = [turn(r) for r in self.rounds]
            result |= {
                "turns": turns,
                "step_s": statistics.median(t["step_s"] for t in turns),
                "min_s": min(t["step_s"] for t in turns),
                "step_peak_mb": max(r["peak_mb"] for r in self.rounds),
            }
            result["settle_s"], result["settle_steps"] = settling(self.warmup, result["step_s"])
        if self.shown:
            result["of_graph_alone"] = statistics.median(self.shown)
        return result


def fresh_caches(folder: Path) -> dict[str, str]:
    """An environment in which no graph compiled by an earlier run or by another lane is found.

    The kernels that lazytensor generates once for each torch are found: they are part of installing it, and generating
    them leaves so much free memory behind that a workload would seem to need none.  So is the extension.
    """
    ours = folder / "lazytensor"
    (ours / "graphs").mkdir(parents=True, mode=0o700)
    for kernels in settings.cache_directory().glob("kernels-*"):
        (ours / kernels.name).symlink_to(kernels, target_is_directory=True)
    with suppress(RuntimeError):  # where there is no compiler, Python records
        extension = build.build()
        shutil.copytree(extension, ours / "graphs" / extension.name)
        shutil.copy2(extension.parent / "key", ours / "graphs")
    return {"LAZYTENSOR_CACHE_DIR": str(ours), "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}


def descendants(pid: int) -> list[int]:
    """The processes that this one started, and that those started, where the kernel tells."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def turn(answer: Mapping[str, Any]) -> dict[str, float]:
    """A round as figures per step. `step_s` is the whole round over its steps, so that a full pipeline counts."""
    figures = {"step_s": answer["total"] / answer["steps"]}
    figures["record_s"] = statistics.median(answer["record"])
    figures["cut_s"] = statistics.median(answer["cut"])
    if answer["collect_us"]:
        figures["collect_us"] = statistics.median(answer["collect_us"])
    return figures


def settling(warmup: list[dict[str, Any]], final: float) -> tuple[float, int] | tuple[None, None]:
    """Seconds and steps until 95 % of the final speed.

    From then on the next five steps are that fast by median; the first of them may be no outlier, or the median would
    hide one slow step that comes before many fast ones.
    """
    steps = [r + c for answer in warmup for r, c in zip(answer["record"], answer["cut"], strict=True)]
    if steps:
        # A quieter moment later must not make the whole warm-up look slow.
        final = max(final, statistics.median(steps[-max(5, len(steps) // 4) :]))
    for i in range(len(steps)):
        if steps[i] <= 1.5 * final and statistics.median(steps[i : i + 5]) <= final / 0.95:
            return sum(steps[:i]), i
    return None, None


class Race:
    """Lanes that are compared: `with Race(...) as race`, warm up, take turns, read the results."""

    def __init__(
        self,
        lanes: Iterable[tuple[System, str]],
        say: Callable[[str], None] = lambda _: None,
        deadline: float = math.inf,
    ) -> None:
        """`deadline` is a moment of `time.monotonic` that no warm-up may pass."""
        self._wanted = list(lanes)
        self._say = say
        self._deadline = deadline
        self.lanes: list[Lane] = []

    def __enter__(self) -> Race:
        try:
            # All at once: importing torch takes seconds, and nothing is timed yet.
            for system, workload in self._wanted:
                self.lanes.append(Lane(system, workload))
            for lane in self.lanes:
                self._say(f"{lane.workload}: starting {lane.system.name}")
                lane.ready()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for lane in self.lanes:
            lane.close()

    def warm(self, seconds: float, budget: float, wait: bool = False, rest: bool = False) -> None:
        """Each lane alone: the first step, then rounds for at least `seconds` and until its speed has settled.

        A lane still at it when `budget` ends goes on to its turns as it is, or with `rest` takes no step for as long
        again while its compiler works, which would disturb all lanes' turns; one that is in the middle of a step then
        is cut off, and says so.
        """
        for lane in self.lanes:
            self._say(f"{lane.workload}: warming up {lane.system.name}")
            lane.allow(max(1.0, min(budget, self._deadline - time.monotonic())))
            last = lane.round(1, wait=True)
            while last is not None and lane.left() > seconds and not settled(lane.rounds, seconds):
                last = lane.round(steps_for(lane.rounds, seconds / 5), wait)
            lane.warmup, lane.rounds = lane.rounds, []
            if rest and last is not None and last["busy"]:
                self._say(f"{lane.workload}: the compiler of {lane.system.name} is still at work")
                lane.allow(budget + TURN_BUDGET)
                lane.ask(f"rest {budget}")
                for _ in range(5):  # takes the compiled code into use
                    lane.ask(f"round {steps_for(lane.warmup, seconds / 5)}")

    def alternate(self, turns: int, seconds: float, wait: bool = False) -> None:
        """`turns` rounds of about `seconds` for each lane; who goes first changes from turn to turn."""
        steps = [steps_for(lane.warmup, seconds) for lane in self.lanes]
        order = list(zip(self.lanes, steps, strict=True))
        for number in range(turns):
            for lane, count in order:
                self._say(f"{lane.workload}: turn {number + 1} of {turns}, {lane.system.name}")
                lane.allow(TURN_BUDGET)
                lane.round(count, wait)
            order = order[1:] + order[:1]

    def hide(self, turns: int, seconds: float) -> None:
        """Rounds as in `alternate`, each followed by as many runs of the step's computation alone: the ratio says how
        much of recording shows.
        """
        for lane in self.lanes:
            count = steps_for(lane.warmup, seconds)
            for number in range(turns):
                self._say(f"{lane.workload}: turn {number + 1} of {turns}, {lane.system.name} beside its graph alone")
                lane.allow(TURN_BUDGET)
                step, alone = lane.ask(f"round {count}"), lane.ask(f"alone {count}")
                if step and alone and alone["alone_s"]:
                    lane.shown.append(step["total"] / count / alone["alone_s"])

    def results(self) -> list[dict[str, Any]]:
        """One dict for each lane, in the order given."""
        return [lane.result() for lane in self.lanes]


def first_steps(
    systems: Sequence[System], workload: str, turns: int, say: Callable[[str], None] = lambda _: None
) -> dict[str, list[float]]:
    """Seconds of the first steps of new processes, one alive at a time, in turns.

    In a race the lane that goes first has just seen all the others start, and pays for it.
    """
    found: dict[str, list[float]] = {system.name: [] for system in systems}
    for _ in range(turns):
        for system in systems:
            with Race([(system, workload)], say) as race:
                answer = race.lanes[0].round(1, wait=True)
                if answer is not None:
                    found[system.name].append(answer["total"])
    return found


def steps_for(rounds: list[dict[str, Any]], seconds: float) -> int:
    """How many steps fill that time at the speed of the last round."""
    if not rounds:
        return 1
    return max(1, min(MOST_STEPS, int(seconds * rounds[-1]["steps"] / rounds[-1]["total"])))


def settled(rounds: list[dict[str, Any]], seconds: float) -> bool:
    """Whether a lane has run long enough, is not getting faster any more, and does nothing in the background."""
    if len(rounds) < 6 or rounds[-1]["busy"] or sum(r["total"] for r in rounds) < seconds:
        return False
    speeds: list[float] = [r["total"] / r["steps"] for r in rounds]
    return min(speeds[-2:]) >= 0.95 * min(speeds[:-2])


@contextmanager
def progress(console: Console | None, total: int) -> Iterator[Callable[[str, int], None]]:
    """A bar of `total` parts; the function given says what is being done and how many parts that finished."""
    columns = (SpinnerColumn(), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console or Console(quiet=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda text, finished: bar.update(task, description=text, advance=finished)
