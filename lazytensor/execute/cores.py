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

RUNS = 8  # of a computation with one number of threads, of which the first two count for nothing
ROUNDS = 2
FIRST = 2  # runs on all cores before the trial
SHORT = 0.002  # seconds; what takes less is tried on one core first, which will be the answer
LONG = 0.025  # seconds; what takes longer is left on all cores without a trial
AGAIN = 3000  # runs after which it is tried again: a machine has other work too
_GAIN = 0.96


def candidates(cores: int) -> list[int]:
    """The numbers of threads that may be best, beginning with all."""
    if not settings.share_cores or torch.are_deterministic_algorithms_enabled():
        return [cores]
    return sorted({cores, max(cores - 1, 1), 1}, reverse=True)


class Share:
    """The number of threads for one computation: tries the candidates in turn, then keeps the best."""

    __slots__ = ("_at", "_least", "_off", "_started", "_times", "_tries", "_usual", "cores", "runs", "threads")

    def __init__(self, cores: int) -> None:
        self.cores = cores
        self._try_again()

    def _try_again(self) -> None:
        self.threads = self.cores
        self.runs = 0
        self._tries = candidates(self.cores)
        self._times: dict[int, list[float]] = {n: [] for n in self._tries}
        self._at: int | None = -FIRST if len(self._tries) > 1 else None  # which run of the trial is next
        self._least = LONG
        self._started = 0.0
        self._usual = 0.0
        self._off = 0

    def begin(self, now: float) -> int:
        """A run begins; with how many threads."""
        self.runs += 1
        at = self._at
        if at is None:
            return self.threads
        if at > 0 and at % RUNS not in (1, 2):
            self._times[self.threads].append(now - self._started)
        self._started = now
        if at == RUNS * ROUNDS * len(self._tries):
            self._decide()
            return self.threads
        if at == 0 and self._least >= LONG:
            self._at = None
            return self.threads
        if at == 0 and self._least < SHORT:
            self._tries.reverse()
        if at >= 0:
            self.threads = self._tries[at // RUNS % len(self._tries)]
        self._at = at + 1
        return self.threads

    def _decide(self) -> None:
        usual = {n: statistics.median(times) for n, times in self._times.items()}
        best = min(usual, key=lambda n: usual[n])
        self.threads = best if usual[best] < usual[self.cores] * _GAIN else self.cores
        self._at = None

    def end(self, seconds: float) -> None:
        """A run has ended.  If runs take another time than they used to, other code does the work now."""
        if self._at is not None:
            self._least = min(self._least, seconds)
            return
        if not self._usual:
            self._usual = seconds
        self._off = self._off + 1 if not 0.6 < seconds / self._usual < 1.7 else 0
        if self._off > 2 * RUNS or self.runs > AGAIN:
            self._try_again()
        elif not self._off:
            self._usual += (seconds - self._usual) / 16
