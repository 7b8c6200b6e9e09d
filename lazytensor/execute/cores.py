"""How many cores a cut in the background takes: the number with which the program's steps come fastest.

While a cut runs the next step is recorded, and recording needs a core too.  With a team of OpenMP threads on every core
there is one thread more than cores: a thread of the team or the one that records is put aside in the middle of its
work, and the rest of the team spins until it comes back.  A small step that is computed on one core beside its
recording is done earlier (MLP and Adam, two cores: 1.9 ms instead of 2.7); a large one is better off with all of them.
Neither the graph nor its time alone tells which, so both are tried, and the time between one run and the next decides.

Sums are rounded differently by another number of threads.  Under ``torch.use_deterministic_algorithms(True)``, or with
the setting ``share_cores`` off, every run has all cores.
"""

from __future__ import annotations

import statistics

import torch

from lazytensor import settings

RUNS = 8  # of a computation with one number of threads
SETTLING = 2  # of which so many count for nothing
ROUNDS = 2
FIRST = 2  # runs on all cores, which give a first guess
LATER = 60  # runs with that guess before the trial: a program that has just started is not to be held up by one
SHORT = 0.002  # seconds; what takes less has one core at first, which will be the answer
LONG = 0.025  # seconds; what takes longer is left on all cores without a trial
HOPELESS = 4  # times as long as on all cores, and long: a number of threads that is not tried again
AGAIN = 3000  # runs after which it is tried again: a machine has other work too
_GAIN = 0.96


def candidates(cores: int) -> list[int]:
    """The numbers of threads that may be best, beginning with all."""
    if not settings.share_cores or torch.are_deterministic_algorithms_enabled():
        return [cores]
    return sorted({cores, max(cores - 1, 1), 1}, reverse=True)


class Share:
    """The number of threads for one computation: tries the candidates in turn, then keeps the best."""

    __slots__ = (
        "_least",
        "_off",
        "_phases",
        "_run",
        "_started",
        "_times",
        "_usual",
        "_warm",
        "cores",
        "runs",
        "threads",
    )

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._try_again()

    def _try_again(self) -> None:
        self.threads = self.cores
        self.runs = 0
        tries = candidates(self.cores)
        # The numbers of threads that are to be tried, the present one first; empty once it is decided.
        self._phases = tries * ROUNDS if len(tries) > 1 else []
        self._warm = FIRST + LATER  # runs before the trial
        self._run = 0  # how many have begun in the present phase
        self._times: dict[int, list[float]] = {}  # from one run to the next, by threads
        self._least = LONG  # seconds that a run took on all cores
        self._started = 0.0
        self._usual = 0.0
        self._off = 0

    def begin(self, now: float) -> int:
        """A run begins; with how many threads."""
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

    def end(self, seconds: float) -> None:
        """A run has ended.  If runs take another time than they used to, other code does the work now."""
        if self._phases:
            if self._warm:
                self._look(seconds)
            elif self.threads != self.cores and seconds > max(HOPELESS * self._least, LONG):
                self._drop(self.threads)
            return
        if not self._usual:
            self._usual = seconds
        self._off = self._off + 1 if not 0.6 < seconds / self._usual < 1.7 else 0
        if self._off > 2 * RUNS or self.runs > AGAIN:
            self._try_again()
        elif not self._off:
            self._usual += (seconds - self._usual) / 16

    def _look(self, seconds: float) -> None:
        """The first runs tell whether to try, and what to begin with."""
        self._warm -= 1
        if self._warm >= LATER:
            self._least = min(self._least, seconds)
        if self._warm == LATER and self._least >= LONG:
            self._phases = []
        elif self._warm == LATER and self._least < SHORT:
            self._phases.reverse()
            self.threads = self._phases[0]

    def _drop(self, threads: int) -> None:
        """Try this number no more."""
        self._phases = [n for n in self._phases if n != threads]
        self._times.pop(threads, None)
        self._run = 0
        if all(n == self.cores for n in self._phases):
            self._phases = []
            self._decide()

    def _decide(self) -> None:
        usual = {n: statistics.median(times) for n, times in self._times.items()}
        best = min(usual, key=lambda n: usual[n], default=self.cores)
        everything = usual.get(self.cores)
        self.threads = best if everything is not None and usual[best] < everything * _GAIN else self.cores
