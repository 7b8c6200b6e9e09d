"""What happened: every cut, compiled graph and fallback, noted as plain facts while the program runs.

``execute`` calls the ``on_…`` functions; everything else in ``inspect`` reads.  A warm cut appends one tuple of
references to a list: lines, sizes and prices are worked out when somebody asks.  Nothing here imports ``execute``.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from operator import attrgetter
from types import CodeType
from typing import Any, NamedTuple

import torch

from lazytensor import settings
from lazytensor.inspect import places
from lazytensor.trace import source
from lazytensor.trace.future import settled
from lazytensor.trace.ir import Value

log = logging.getLogger("lazytensor.diagnostics")

profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled  # type: ignore[attr-defined]
epoch = time.time() - time.perf_counter()  # what to add to a time noted here to get wall-clock time

# What the scopes of lazytensor.inspect put in the way of a cut; None almost always.
guard: Callable[[str], None] | None = None  # asked before a cut; raises to forbid it
take_over: Callable[[Any, list[Any]], list[Any]] | None = None  # runs the graph instead of the compiled computation
after_cut: Callable[[Any], None] | None = None  # told the graph of each cut: the save-tensors file

step = 0  # how often lazytensor.sync() was called
_diagnostics = settings._ALL["diagnostics"]


class Known:
    """A graph that was compiled: what stays known of it when its nodes are gone.

    A graph that ran as it was recorded has not been made yet; it and what it is like are worked out when somebody asks.
    """

    graph: Any
    nodes: int
    ops: Counter[str]
    inputs: int
    numbers: int
    outputs: int
    results: int
    bytes_in: int
    bytes_out: int
    fresh: Counter[str]  # nodes that were new with this graph

    def __init__(self, computation: Any, cause: str, where: tuple[CodeType | None, int], before: int) -> None:
        self._made_of = computation
        self._before = before  # the newest node of the graphs known before
        self.newest = max((value.node.seq for value in computation.values), default=0)
        self.number = 0
        self.computation = weakref.ref(computation)
        self.cause = cause
        self.where = where
        self.compile_seconds = float(computation.compile_seconds)
        self.backend = str(computation.backend.name)
        self.runs = 0
        self.hits = 0
        self.step = step
        self._blame: Any = None

    @property
    def blame(self) -> Any:
        """Why it was compiled; None if that is not known."""
        if self._blame is None:
            from lazytensor.inspect import blame

            blame.compare_all()
        return self._blame

    @blame.setter
    def blame(self, found: Any) -> None:
        self._blame = found

    @property
    def size(self) -> int:
        """How many nodes it has; as long as that is not known, how many were made since the last graph was."""
        return int(vars(self).get("nodes", self.newest - self._before))

    def __getattr__(self, name: str) -> Any:
        """What has not been asked for yet."""
        if name not in Known.__annotations__ or "_made_of" not in vars(self):
            raise AttributeError(name)
        graph = self.graph = vars(self).pop("_made_of").graph
        self.nodes = len(graph.nodes)
        self.ops = Counter(node.op.name for node in graph.nodes)
        self.inputs = len(graph.data)
        self.numbers = len(graph.numbers)
        self.outputs = len(graph.outputs)
        self.results = sum(len(node.outputs) for node in graph.nodes if not node.op.view)
        self.bytes_in = sum(v.spec.nbytes for v in graph.data)
        self.bytes_out = sum(v.spec.nbytes for v in graph.outputs)
        self.fresh = Counter(node.op.name for node in graph.nodes if node.seq > self._before)
        return getattr(self, name)

    @property
    def is_slim(self) -> bool:
        """Whether its nodes are forgotten."""
        return vars(self).get("graph", self) is None

    def let_go(self) -> None:
        """Forget the nodes."""
        self.nodes  # noqa: B018  (everything else is known from here on)
        self.graph = None

    @property
    def name(self) -> str:
        """How the graph is called in ledgers."""
        return f"G{self.number}"


class Cut(NamedTuple):
    """One cut, as noted."""

    cause: str
    code: CodeType | None
    instruction: int
    known: Known
    hit: bool
    started: float
    timing: Any
    step: int
    error: str | None  # as text: an exception holds its frames, and they the tensors of the program
    background: bool  # whether the program went on while it ran

    @property
    def place(self) -> places.Place:
        """The user's line that made the cut."""
        return places.place(self.code, self.instruction)

    @property
    def reason(self) -> str:
        """The cause in the user's words: ``loss.item()`` rather than ``item``."""
        return places.reason(self.cause, self.code, self.instruction)

    @property
    def seconds(self) -> float:
        """How long the program waited for this cut."""
        timing = self.timing
        return float(timing.collect + timing.compile + timing.install + (0.0 if self.background else timing.execute))

    @property
    def explicit(self) -> bool:
        """Whether the program asked for it, and not for a value."""
        return self.cause in EXPLICIT


class Wait(NamedTuple):
    """One read that waited for a cut in the background."""

    cause: str
    code: CodeType | None
    instruction: int
    started: float
    seconds: float
    step: int


EXPLICIT = frozenset(("sync", "synchronize"))
BUDGET = "budget"


class Fallback:
    """One op that ran eagerly on the CPU."""

    __slots__ = ("bytes_in", "bytes_out", "code", "instruction", "name", "reason", "seconds", "started", "step")

    def __init__(self, name: str, reason: str, code: CodeType | None, instruction: int, bytes_in: int) -> None:
        self.name = name
        self.reason = reason
        self.code = code
        self.instruction = instruction
        self.bytes_in = bytes_in
        self.bytes_out = 0
        self.seconds = 0.0
        self.started = time.perf_counter()
        self.step = step

    def done(self, result: Any) -> None:
        """Note what came back."""
        self.seconds = time.perf_counter() - self.started
        self.bytes_out = _bytes([result])

    @property
    def place(self) -> places.Place:
        """The user's line that called the op."""
        return places.place(self.code, self.instruction)


cuts: list[Any] = []  # Cut fields as plain tuples, the latest last
graphs: dict[int, Known] = {}
fallbacks: list[Fallback] = []
waits: list[Wait] = []
read_bytes = 0  # from the device to the host
_numbered = 0
_last_node = 0  # the newest node that a known graph has


class Totals:
    """What was folded away from the lists, so that totals stay true."""

    def __init__(self) -> None:
        self.metrics: dict[str, list[float]] = {}  # name -> [samples, sum]
        self.counters: Counter[str] = Counter()
        self.ops: Counter[str] = Counter()
        self.reused: Counter[str] = Counter()


folded = Totals()


# --- called by execute ----------------------------------------------------------------------------------------------


def on_cut(cause: str, computation: Any, hit: bool, started: float, timing: Any, error: BaseException | None) -> None:
    """A cut is done, or failed."""
    if not _diagnostics.value:
        return
    frame = source.user_frame()
    known = computation.info
    if known is None:
        known = _know(computation, cause, places.where(frame))
    known.runs += 1
    if hit:
        known.hits += 1
    background = timing.execute == 0.0 and error is None  # still running, or about to
    failed = None if error is None else f"{type(error).__name__}: {error}"
    if frame is None:
        cuts.append((cause, None, 0, known, hit, started, timing, step, failed, background))
    else:
        cuts.append((cause, frame.f_code, frame.f_lasti, known, hit, started, timing, step, failed, background))
    if len(cuts) >= 2 * settings_ledger.value:
        _fold()
    if after_cut is not None:
        after_cut(computation.graph)


settings_ledger = settings._ALL["ledger_size"]


def on_miss(computation: Any, cause: str) -> None:
    """A graph was compiled and is about to run; its leaves are still there to look at."""
    if not _diagnostics.value:
        return
    frame = source.user_frame()
    known = _know(computation, cause, places.where(frame))
    from lazytensor.inspect import blame

    diagnose(blame.miss, known)


def diagnose(function: Callable[[Known], None], known: Known) -> None:
    """Look why a graph was new; a mistake in a diagnosis must not become the program's."""
    try:
        function(known)
    except Exception:
        if settings.check:
            raise
        log.exception("lazytensor: could not compare this recompilation with the graphs known before")


def on_fallback(name: str, reason: Any, arguments: Iterable[Any]) -> Fallback:
    """An op is about to run eagerly on the CPU."""
    frame = source.user_frame()
    code, instruction = places.where(frame)
    event = Fallback(name, str(reason), code, instruction, _bytes(arguments))
    if _diagnostics.value:
        fallbacks.append(event)
        if len(fallbacks) >= 2 * settings_ledger.value:
            del fallbacks[: settings_ledger.value]
    return event


def wait_for(cause: str, state: Any) -> Any:
    """The data of a state that a cut in the background is making, waited for if it is not there yet."""
    if state.data.run.has_run():
        return settled(state)
    if guard is not None:
        guard(cause)
    before = time.perf_counter()
    data = settled(state)
    if _diagnostics.value:
        code, instruction = places.where(source.user_frame())
        waits.append(Wait(cause, code, instruction, before, time.perf_counter() - before, step))
        if len(waits) >= 2 * settings_ledger.value:
            del waits[: settings_ledger.value]
    return data


def on_step() -> None:
    """``lazytensor.sync()`` was called: a step ends."""
    global step
    step += 1


def run_watched(computation: Any, inputs: list[Any]) -> list[Any]:
    """Run a computation under a profiler's range, or as a scope of ``inspect`` wants it run."""
    if profiling():
        with torch._C._profiler._RecordFunctionFast("lazytensor::execute"):  # type: ignore[attr-defined]
            return take_over(computation, inputs) if take_over is not None else computation.run(*inputs)  # type: ignore[no-any-return]
    return take_over(computation, inputs) if take_over is not None else computation.run(*inputs)  # type: ignore[no-any-return]


def span(name: str) -> Any:
    """A range in the profiler that ends when the object returned dies."""
    return torch.ops.profiler._record_function_enter_new(name, None)


def profiled(name: str, function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, as a range of its own if a profiler is on."""
    if not profiling():
        return function(*args)
    with torch._C._profiler._RecordFunctionFast(name):  # type: ignore[attr-defined]
        return function(*args)


# --- keeping --------------------------------------------------------------------------------------------------------


def _know(computation: Any, cause: str, where: tuple[CodeType | None, int]) -> Known:
    global _numbered, _last_node
    known = computation.info = Known(computation, cause, where, _last_node)
    _numbered += 1
    known.number = _numbered
    _last_node = max(_last_node, known.newest)
    graphs[known.number] = known
    _slim()
    return known


def _slim() -> None:
    """Let go of the nodes of old graphs, and of graphs that cannot run again."""
    room = settings.max_nodes // 2
    for number in reversed(graphs):
        known = graphs[number]
        if not known.is_slim:
            room -= known.size
            if room < 0 and number != _numbered:
                known.let_go()
    if len(graphs) > settings_ledger.value:
        for number, known in list(graphs.items())[: len(graphs) // 2]:
            if known.computation() is None:
                folded.ops.update({op: n * known.runs for op, n in known.ops.items()})
                folded.reused.update(reused(known))
                folded.counters["CreateLtcTensor"] += known.results * known.runs
                del graphs[number]


def reused(known: Known) -> Counter[str]:
    """How often a node of this graph was recorded again instead of made."""
    return Counter({op: n * known.runs - known.fresh[op] for op, n in known.ops.items()})


def samples(cut: Cut, cuts: int = 1) -> Iterable[tuple[str, float]]:
    """The metrics that a cut gives a sample of, or the sums of so many cuts whose times are summed in this one."""
    timing, known = cut.timing, cut.known
    yield "TensorsGraphSize", known.nodes * cuts
    yield "ExecuteTime", timing.execute
    yield f"ExecuteTime.{known.backend}", timing.execute
    yield "IrValueTensorToDataHandle", timing.collect
    yield "CutTime", cut.seconds
    if not cut.hit:
        yield "CompileTime", timing.compile
        yield f"CompileTime.{known.backend}", timing.compile
    if not cut.explicit:
        yield "DeviceLockWait", cut.seconds


def counts(cut: Cut, cuts: int = 1) -> Iterable[tuple[str, int]]:
    """The counters that a cut adds to, or that many whose results are counted together in this one."""
    yield ("CachedCompile" if cut.hit else "UncachedCompile"), cuts
    yield "SyncedTensorsWithIR", cut.timing.outputs
    yield "DeviceDataCacheMiss", cut.known.numbers * cuts
    yield f"Cut.{'sync' if cut.explicit else 'read'}", cuts
    if cut.cause == BUDGET:
        yield "TrimIrGraph", cuts
    if not cut.hit and cut.known.blame is not None and cut.known.blame.old is not None:
        yield "TrieForked", cuts
    if cut.error is not None:
        yield "FailedCut", cuts


def _fold() -> None:
    """Add the older half of the ledger to the totals: cuts that are named alike in one go, for there are many."""
    old = cuts[: settings_ledger.value]
    del cuts[: settings_ledger.value]
    alike: dict[tuple[Any, ...], list[Any]] = {}
    for raw in old:
        alike.setdefault((raw[0], raw[3], raw[4], raw[8] is None, raw[9]), []).append(raw)
    for group in alike.values():
        timings = [raw[6] for raw in group]
        total = type(timings[0])()
        for name in total.__slots__:
            setattr(total, name, sum(map(attrgetter(name), timings)))
        all_of_them = Cut(*group[0])._replace(timing=total)
        for name, value in samples(all_of_them, len(group)):
            metric = folded.metrics.setdefault(name, [0, 0.0])
            metric[0] += len(group)
            metric[1] += value
        for name, by in counts(all_of_them, len(group)):
            folded.counters[name] += by


def all_cuts() -> list[Cut]:
    """The cuts in the ledger, the latest last."""
    return [Cut(*raw) for raw in cuts]


def reset() -> None:
    """Forget everything that was noted."""
    global folded, read_bytes, step
    cuts.clear()
    fallbacks.clear()
    waits.clear()
    read_bytes = step = 0
    folded = Totals()
    for known in graphs.values():
        computation = known.computation()
        if computation is not None:
            computation.info = None
    graphs.clear()


def _bytes(arguments: Iterable[Any]) -> int:
    total = 0
    for argument in arguments:
        if isinstance(argument, list | tuple):
            total += _bytes(argument)
        elif argument.__class__ is Value:
            total += argument.spec.nbytes
        elif isinstance(argument, torch.Tensor) and argument.layout is torch.strided:
            total += argument.numel() * argument.element_size()
    return total
