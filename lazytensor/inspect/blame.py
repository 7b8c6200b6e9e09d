"""Recompile blame: why a cut found no compiled graph, and which line of the program made the difference.

The new graph is compared with the nearest known one; of the places where a difference begins, the one recorded first is
blamed.  What the sizes of the data have been is learnt on the way, for advice.

The graphs of a program's first steps are all new, and nobody reads why.  So what is needed to tell is kept, and they
are compared when somebody asks, or when a cut misses that should not.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Iterator
from types import FrameType
from typing import Any

from lazytensor.inspect import events, names, places
from lazytensor.inspect.difference import Difference, compare, first_uses, origin
from lazytensor.inspect.events import Known
from lazytensor.trace import source

log = logging.getLogger("lazytensor.recompile")

SHOWN = 200  # differences that a blame keeps
WARM_UP = 2  # misses of one cut that are expected: the first step, and the first with optimizer state
LOUD = 8  # warnings about one line before they become quiet


class Blame:
    """Why one cut missed."""

    def __init__(self, new: Known | None, nodes: int | None, old: Known | None, differences: list[Difference]) -> None:
        self.graph = "this graph" if new is None else new.name
        self.old = None if old is None else old.name
        self.cause = "" if new is None else new.cause
        self.cut = (None, 0) if new is None else new.where
        self.step = events.step if new is None else new.step
        self._new, self._nodes = new, nodes
        self.backends = None if new is None or old is None else (old.backend, new.backend)
        self.differences = ([d for d in differences if not d.follows] or differences)[:SHOWN]
        self.total = len(differences)
        self.advice = _advice(differences[0]) if differences else ""

    @property
    def nodes(self) -> int:
        """How many operations the graph has."""
        return self._nodes if self._nodes is not None or self._new is None else self._new.nodes  # type: ignore[return-value]

    @property
    def seconds(self) -> float:
        """How long it took to compile; 0 for a graph that ran as it was recorded."""
        return 0.0 if self._new is None else self._new.compile_seconds

    @property
    def first(self) -> Difference | None:
        """The difference that was recorded first."""
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        place = places.place(*self.cut)
        done = f"compiled in {self.seconds * 1e3:.1f} ms" if self.seconds else "run as it was recorded"
        head = f"{self.graph} ({self.nodes} ops) {done} at {place} ({self.cause})"
        if self.old is None:
            return f"{head}: nothing like it was known"
        if self.first is None:
            if self.backends is not None and self.backends[0] != self.backends[1]:
                return f"{head}: it is {self.old}, which was known to the backend '{self.backends[0]}' only"
            return f"{head}: it has the operations of {self.old}, but other results are alive"
        return f"{head} because it differs from {self.old}: {self.first}" + (f". {self.advice}" if self.advice else "")

    @property
    def full(self) -> str:
        """Every difference found, one a line."""
        lines = [str(self), *(f"  {d}" for d in self.differences)]
        if self.total > len(self.differences):
            lines.append(f"  and {self.total - len(self.differences)} more, which follow from these")
        return "\n".join(lines)

    @property
    def data(self) -> dict[str, Any]:
        """As plain data."""
        return {
            "graph": self.graph,
            "old": self.old,
            "cause": self.cause,
            "step": self.step,
            "cut": places.data(places.place(*self.cut)),
            "nodes": self.nodes,
            "seconds": self.seconds,
            "text": str(self),
            "differences": [d.data for d in self.differences],
            "total": self.total,
            "advice": self.advice,
        }


# --- the nearest known graph ----------------------------------------------------------------------------------------


def nearest(graph: Any, where: Any = None, before: int | None = None) -> Known | None:
    """The known graph most like this one: one cut at the same line if there is a good one, then the latest."""
    ops = Counter(node.op.name for node in graph.nodes)
    best: tuple[float, int] | None = None
    chosen = None
    recent = [k for k in events.graphs.values() if not k.is_slim and (before is None or k.number < before)]
    for known in recent[-32:]:
        likeness = _likeness(ops, known.ops) + (0.2 if where is not None and known.where == where else 0.0)
        if likeness > 0.3 and (best is None or (likeness, known.number) >= best):
            best, chosen = (likeness, known.number), known
    return chosen


def _likeness(one: Counter[str], other: Counter[str]) -> float:
    """How much of two graphs is the same kind of operation.  Their order says little: what hit is older."""
    return (one & other).total() / max(one.total(), other.total(), 1)


# --- what a leaf's dimension has been -------------------------------------------------------------------------------

_sizes: dict[tuple[Any, ...], list[int]] = {}  # by first use and dimension: the sizes it took, in order of appearance


def learn(graph: Any) -> None:
    """Remember the sizes of the data that a new graph takes."""
    for value, (user, position) in first_uses(graph).items():
        where = origin(user, position)
        for dim, size in enumerate(value.size):
            row = _sizes.setdefault((*where, dim), [])
            if size not in row:
                row.append(size)


def _advice(first: Difference) -> str:
    if first.kind == "shape" and first.leaf is not None:
        taken = _sizes.get(first.leaf, [])
        dim, name = first.leaf[-1], first.what.partition(" of ")[2].rstrip(":")
        said = f"dim {dim} of {name} took {len(taken)} values {{{', '.join(map(str, taken[-8:]))}}}"
        if len(taken) > 2 and all(n > m for m, n in itertools.pairwise(taken)):
            return f"{said} and grows: preallocate it and write into a slice, or pad to a few fixed sizes"
        if dim == 0:
            return f"{said}: pad or drop the last batch (DataLoader(drop_last=True))"
        return f"{said}: pad to a fixed size or to a few buckets"
    return _ADVICE.get(first.kind, "")


_ADVICE = {
    "op": "the program took another branch here: keep the operations of a step the same, for example with torch.where",
    "attribute": "this argument is part of the structure: keep it constant, or pass it as a tensor",
    "inputs": "a list of tensors changed its length: keep it constant, or preallocate one tensor and write into it",
    "number": "a number changed its Python type, which changes type promotion: keep it int or float",
    "data": "what one step made, a later one takes as data: usual in the second step, when optimizer state exists",
    "dtype": "keep the dtype of the data constant",
    "results": "a tensor that is kept alive is a result of the graph: drop references that are not needed, or keep "
    "them from the first step on",
    "input": "other data is used here: the same tensors have to be used in the same order at every step",
}


# --- at a miss ------------------------------------------------------------------------------------------------------

_sites: Counter[Any] = Counter()  # by line of the cut: misses
_warned: dict[Any, int] = {}


def reset() -> None:
    """Forget what was learnt about sizes and lines."""
    _sizes.clear()
    _waiting.clear()
    _sites.clear()
    _warned.clear()


# Graphs that were not compared yet, with the names of their data.
_waiting: list[tuple[Known, names.Seen]] = []
_MOST_WAITING = 64


def miss(known: Known) -> None:
    """A graph was just compiled: say why in the log, or keep what tells why until somebody asks."""
    _sites[known.where] += 1
    _waiting.append((known, names.look(source.user_frame())))
    warm = any(k.hits and k.where == known.where for k in events.graphs.values())
    unexpected = warm or _sites[known.where] > WARM_UP
    if unexpected or log.isEnabledFor(logging.INFO):
        compare_all()
        _say(known, unexpected)
    elif len(_waiting) > _MOST_WAITING:
        compare_all()


def compare_all() -> None:
    """Compare the graphs that were not compared yet with the nearest one known before each, in their order."""
    while _waiting:
        known, seen = _waiting.pop(0)
        names.use(seen)
        try:
            events.diagnose(_compare, known)
        finally:
            names.forget()


def _compare(known: Known) -> None:
    graph, old, differences = known.graph, None, []
    if graph is not None:  # else its nodes are forgotten
        learn(graph)
        old = nearest(graph, known.where, known.number)
        differences = [] if old is None else compare(old.graph, graph)
    known.blame = Blame(known, known.nodes, old, differences)


def why_not(graph: Any) -> Blame | None:
    """What would be blamed if this graph, which is not known, were cut now."""
    frame: FrameType | None = source.user_frame()
    names.use(names.look(frame))
    try:
        old = nearest(graph)
        if old is None:
            return None
        return Blame(None, len(graph.nodes), old, compare(old.graph, graph))
    finally:
        names.forget()


def _say(known: Known, unexpected: bool) -> None:
    """One line in the log: loud when a cut that was warm compiles again, quiet while it warms up."""
    blame = known.blame
    if blame is None:
        return
    level = logging.INFO
    if blame.old is not None and unexpected:
        about = blame.first.place if blame.first is not None else known.where
        _warned[about] = _warned.get(about, 0) + 1
        if _warned[about] <= LOUD:
            level = logging.WARNING
    log.log(level, "lazytensor: %s", blame)


class Blames:
    """The recompilations in the ledger, the latest last; printing shows the last one in full."""

    def __init__(self, blames: list[Blame]) -> None:
        self.blames = blames

    def __iter__(self) -> Iterator[Blame]:
        return iter(self.blames)

    def __len__(self) -> int:
        return len(self.blames)

    def __getitem__(self, index: int) -> Blame:
        return self.blames[index]

    def __str__(self) -> str:
        return self.blames[-1].full if self.blames else "nothing was compiled"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        from html import escape

        return f"<pre>{escape(str(self))}</pre>"

    @property
    def data(self) -> list[dict[str, Any]]:
        """As plain data."""
        return [b.data for b in self.blames]


def blame() -> Blames:
    """Why graphs were compiled: the comparison of each with the nearest one known before."""
    compare_all()
    return Blames([k.blame for k in events.graphs.values() if k.blame is not None])


__all__ = ["Blame", "Difference", "blame", "compare", "miss", "nearest", "why_not"]
