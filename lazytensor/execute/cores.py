"""How many cores a cut in the background takes: the number with which the program's steps come fastest.

While a cut runs the next step is recorded, and recording needs a core too.  With a team of OpenMP threads on every core
there is one thread more than cores: a thread of the team or the one that records is put aside in the middle of its
work, and the rest of the team spins until it comes back.  There are three ways:

* **all** cores, for what is one long loop;
* all, but **one fewer while something is recorded**, for a large step of many kernels: compiled code looks before each
  kernel (a GPT step on two cores: 0.84 of eager's time instead of 0.94);
* **one**, for a small step, which is done beside the recording of the next (MLP and Adam: 1.2 ms instead of 1.9).

Neither the graph nor its time alone tells which is best.  The first runs give a guess, later all are tried, and the
time between one run and the next decides.  What was decided is kept beside the compiled code on disk: a restarted
program neither guesses nor tries.

A step that takes less time than to hand it to another thread is not handed over: it runs where it was recorded, on one
core.

Sums are rounded differently by another number of threads.  Under ``torch.use_deterministic_algorithms(True)``, or with
the setting ``share_cores`` off, every run has all cores.
"""

from __future__ import annotations

import math
import statistics
from typing import Protocol

import torch

from lazytensor import settings

RUNS = 8  # of a computation with one number of threads
SETTLING = 2  # of which so many count for nothing
ROUNDS = 2
FIRST = 2  # runs, which give a first guess
LATER = 60  # runs with that guess before the trial: a program that has just started is not to be held up by one
SHORT = 0.008  # seconds on one of the cores; what takes less in all has one core at first, which will be the answer
FINE = 0.001  # seconds; compiled code whose kernels take less on average gives way at first
LARGE = 16 << 20  # bytes; what computes less has one core from the start
FEW = 4  # kernels; with less there is no place to give way
LONG = 0.025  # seconds; what takes longer is not tried on one core
HOPELESS = 4  # times as long as the fastest run, and long: a number of threads that is not tried again
BRIEF = (
    40e-6  # seconds; to hand a cut over and to note its end takes longer (70 µs, and as much until the thread wakes)
)
AGAIN = 3000  # runs after which it is tried again: a machine has other work too
_GAIN = 0.92  # of the time with the guess; what gains less may be noise


class Memory(Protocol):
    """What knows the number of threads that was best for a computation when the program last ran."""

    def threads_of_before(self) -> int | None:
        """That number; None if there is none, or none yet."""

    def keep_threads(self, threads: int) -> None:
        """It was found to be this one."""


def candidates(cores: int) -> list[int]:
    """The numbers of threads that may be best, beginning with all; a negative one gives way to recording."""
    return [cores] if cores == 1 or fixed() else [cores, -cores, 1]


def fixed() -> bool:
    """Whether every run is to have all cores, so that sums are always rounded the same way."""
    return not settings.share_cores or torch.are_deterministic_algorithms_enabled()


def constant(threads: int) -> int:
    """The number of threads for what cannot change it while it runs."""
    return threads if threads > 0 else max(-threads - 1, 1)


class Share:
    """The number of threads for one computation: tries the candidates in turn, then keeps the best."""

    __slots__ = (
        "_guess",
        "_kernels",
        "_least",
        "_memory",
        "_off",
        "_phases",
        "_run",
        "_started",
        "_times",
        "_usual",
        "_warm",
        "cores",
        "runs",
        "small",
        "threads",
    )

    def __init__(self, cores: int, size: int = LARGE, memory: Memory | None = None) -> None:
        """`size`: the bytes of everything that is computed."""
        self.cores = cores
        self._memory = memory
        self.small = size < LARGE
        self._kernels = 0  # of the code that does the work; 0 if that does not look between them
        self._try_again()

    def _try_again(self) -> None:
        tries = candidates(self.cores)
        self.threads = self._guess = tries[-1] if self.small else self.cores
        self.runs = 0
        # The numbers of threads that are to be tried, the present one first; empty once it is decided.
        self._phases = tries * ROUNDS if len(tries) > 1 else []
        self._warm = FIRST + LATER  # runs before the trial
        self._run = 0  # how many have begun in the present phase
        self._times: dict[int, list[float]] = {}  # from one run to the next, by threads
        self._least = math.inf  # seconds that a run took
        self._started = 0.0
        self._usual = 0.0
        self._off = 0

    @property
    def brief(self) -> bool:
        """Whether a run is over sooner than it could be handed to another thread."""
        return 0.0 < self._usual < BRIEF and not self._phases and not fixed()

    def begin(self, now: float) -> int:
        """A run begins; with how many threads."""
        if fixed():
            return self.cores
        self.runs += 1
        if not self._phases or self._warm:
            return self.threads
        if self._run > SETTLING:
            self._times.setdefault(self.threads, []).append(now - self._started)
        self._started = now
        if self._run == RUNS:
            self._run = 0
            del self._phases[0]
            if not self._phases:
                self._decide()
                return self.threads
        self.threads = self._phases[0]
        self._run += 1
        return self.threads

    def end(self, seconds: float, kernels: int = 0) -> None:
        """A run of so many kernels has ended.  Are they others, or do they take another time than they used to, then
        other code does the work now.
        """
        if kernels != self._kernels:
            self._kernels = kernels
            self._try_again()
            self._remember()
        if self._phases:
            if self._warm:
                self._look(seconds)
            elif self.threads != self.cores and seconds > max(HOPELESS * self._least, LONG):
                self._drop(self.threads)
            return
        if not self._usual or self.runs < RUNS:  # the first runs may be slow for reasons of their own
            self._usual = min(self._usual or seconds, seconds)
        self._off = self._off + 1 if not 0.6 < seconds / self._usual < 1.7 else 0
        if self._off > 2 * RUNS or self.runs > AGAIN:
            self._try_again()
        elif not self._off:
            self._usual += (seconds - self._usual) / 16

    def _remember(self) -> None:
        """Begin with what was best when the program last ran, and try nothing."""
        known = None if self._memory is None else self._memory.threads_of_before()
        if known in candidates(self.cores):
            self.threads = self._guess = known
            self._phases = []

    def _look(self, seconds: float) -> None:
        """The runs before the trial tell what to try, and what to begin with: the fastest of them counts, since the
        first ones may be slow for reasons of their own.
        """
        self._warm -= 1
        self._least = min(self._least, seconds)
        if self._warm > LATER:
            return
        short = self._least < SHORT / self.cores
        if short or self._kernels < FEW:
            self._without(-self.cores)
        if self._least >= LONG:
            self._without(1)
        guess = 1 if short else -self.cores if self._least < FINE * self._kernels else self.cores
        self.threads = self._guess = guess
        self._phases.sort(key=lambda threads: threads != guess)

    def _without(self, threads: int) -> None:
        """Do not try this number; where only one is left there is nothing to try."""
        self._phases = [n for n in self._phases if n != threads]
        if len(set(self._phases)) <= 1:
            self._phases = []

    def _drop(self, threads: int) -> None:
        """Try this number no more."""
        self._without(threads)
        self._times.pop(threads, None)
        self._run = 0
        if not self._phases:
            self._decide()

    def _decide(self) -> None:
        usual = {n: statistics.median(times) for n, times in self._times.items()}
        best = min(usual, key=lambda n: usual[n], default=self.cores)
        guessed = usual.get(self._guess)
        self.threads = best if guessed is None or usual[best] < guessed * _GAIN else self._guess
        if self._memory is not None and len(usual) > 1:
            self._memory.keep_threads(self.threads)
