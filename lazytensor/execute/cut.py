"""The cut: everything pending that is still alive becomes one graph, runs, and its results become data.

A cut is known by the tuple of its live output values.  Values are interned, so a step that was seen before is found by
one lookup of that tuple, and nothing is done per recorded operation: a warm cut costs O(outputs), not O(nodes).

Nothing is forgotten before the results are there.  If the run fails or is interrupted, everything pending is still
pending.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lazytensor import settings
from lazytensor.backend import memory, openmp, passes, registry
from lazytensor.backend.contract import Failure, Guard
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.execute import ahead
from lazytensor.execute.cores import Share, fixed
from lazytensor.execute.pipeline import pipeline
from lazytensor.inspect import events
from lazytensor.trace import ir, record, storage
from lazytensor.trace.future import Future
from lazytensor.trace.storage import State, ViewState


class Computation:
    """A compiled graph and which leaves it takes.

    A step that ran as it was recorded (:mod:`lazytensor.execute.ahead`) has no use for either, and may never come
    again.  So both are made when somebody asks, which a cut that has to run the graph does at once.
    """

    __slots__ = (
        "__weakref__",
        "backend",
        "built",
        "compile_seconds",
        "compiled",
        "data",
        "graph",
        "info",
        "number",
        "numbers",
        "replaced",
        "route",
        "run",
        "runs",
        "share",
        "values",
    )

    graph: Graph
    compiled: Any  # what the backend made of it
    run: Callable[..., list[Any]]
    data: list[int]
    numbers: list[int]
    share: Share  # how many cores it has in the background

    def __init__(self, backend: Backend, values: list[ir.Value], replaced: list[int | None]) -> None:
        self.backend = backend
        self.values = values
        self.replaced = replaced
        self.number = cuts_made() - 1  # of the cut that made it
        self.built = False
        self.runs = 0
        self.compile_seconds = 0.0
        self.info: events.Known | None = None  # what the ledgers know of it
        self.route: Any = None  # how compiled code runs it on the thread that cuts, once it has (see _made_again)

    def __getattr__(self, name: str) -> Any:
        """What is not there yet."""
        if name == "graph":
            self.graph = _graph(self.values, self.replaced)
            self.graph.first_cut = self.number
        elif name in ("compiled", "run", "data", "numbers", "share"):
            self.build()
        else:
            raise AttributeError(name)
        return getattr(self, name)

    def build(self) -> None:
        """Let the backend compile the graph."""
        before = time.perf_counter()
        graph = self.graph
        self.compiled = _compile(self.backend, graph)
        self.data = [v.node.args[1] for v in graph.data]
        self.numbers = [n.index for n in graph.numbers]
        made = getattr(self.compiled, "callable", None)
        self.share = Share(openmp.all_threads(), graph.nbytes, made if hasattr(made, "threads_of_before") else None)
        self.run = self.compiled.run
        self.built = True
        self.compile_seconds = time.perf_counter() - before
        if self.info is not None:
            self.info.compile_seconds = self.compile_seconds
        for _ in range(self.runs):
            self.backend.ran_ahead(self.compiled)

    def ran_ahead(self) -> None:
        """A step that is this graph ran as it was recorded."""
        if self.built:
            self.backend.ran_ahead(self.compiled)


def _compile(backend: Backend, graph: Graph) -> Any:
    if settings.strict:
        from lazytensor.execute import strict

        return strict.computation(backend, graph)
    return backend.computation(graph)


class CutTiming:
    """How long the parts of the last cut took, in seconds."""

    __slots__ = ("collect", "compile", "execute", "install", "outputs")

    def __init__(self) -> None:
        self.collect = self.compile = self.execute = self.install = 0.0
        self.outputs = 0

    @property
    def collect_us(self) -> float:
        """Everything but compilation and execution, in microseconds."""
        return (self.collect + self.install) * 1e6


computations: dict[tuple[Any, ...], Computation] = {}  # by the backend and the values
hits = 0
misses = 0
cleared = 0  # how often both began anew
last = CutTiming()
# When so many cuts were found, this is called; set by the layer that looks for functions to record as a whole.
look_at = 0
look: Callable[[], None]
missed: Callable[[], None] = lambda: None  # noqa: E731  (and this, when one was not)
counts_anew: Callable[[], None] = lambda: None  # noqa: E731  (and this, when both counts begin anew)


def cuts_made() -> int:
    """How many cuts there were."""
    return hits + misses


ahead.cuts_made = cuts_made


def pending() -> list[State]:
    """The states that wait for a value, in the order in which their values were first recorded."""
    storage.adopt()
    storage.sweep()
    return _collect()[0]


def cut(cause: str = "sync", wait: bool = False) -> None:
    """Run everything pending: in the background, if the backend in force allows it and nobody waits."""
    with storage.lock:
        _run_pending(cause, wait)


def _run_pending(cause: str, wait: bool) -> None:
    global hits, misses
    if _again is not None and _made_again(cause, wait):
        return
    report_failures()
    started = time.perf_counter()
    storage.adopt()
    storage.sweep()
    states, views, values, replaced = _collect()
    if not values and not storage.effects:
        _forget(views)
        if wait:
            settle()
        return
    if events.guard is not None:
        events.guard(cause)
    if ahead.first_step and cause in events.EXPLICIT:
        ahead.first_step = False
    profiled = events.span("lazytensor::cut") if events.profiling() else None  # ends when this call does
    values += storage.effects
    backend = registry.current()
    key = (backend, *values, *replaced)
    timing = CutTiming()
    computation = computations.get(key)
    hit = computation is not None
    ready = ahead.results(values) if ahead.on and events.take_over is None else None
    if computation is None:
        misses += 1
        computation = computations[key] = Computation(backend, values, replaced)
        if ready is None:
            before = time.perf_counter()
            try:
                events.profiled("lazytensor::compile", computation.build)
            except BaseException:
                del computations[key]
                raise
            timing.compile = time.perf_counter() - before
        missed()
        events.on_miss(computation, cause)
    else:
        hits += 1
        if 0 < look_at <= hits:
            look()  # noqa: F821  (set by the layer above)
        if len(computations) > settings.cache_size // 2:  # order matters only when something may have to go
            computations[key] = computations.pop(key)
    if ready is not None:
        timing.collect = time.perf_counter() - started
        timing.execute = ahead.spent()
        computation.ran_ahead()
        _finish(cause, computation, ready, states, views, hit, started, timing)
        return
    leaf_data, numbers = storage.leaf_data, storage.numbers
    inputs = [leaf_data[i] for i in computation.data] if not memory.in_use else memory.fit(backend, computation.data)
    inputs += [numbers[i] for i in computation.numbers]
    timing.collect = time.perf_counter() - started - timing.compile
    brief = False
    apart = backend.asynchronous and settings.run_in_background and events.take_over is None and profiled is None
    if apart:
        wait = wait or cause not in _UNHURRIED
        brief = computation.share.brief and not pipeline.under_way
        if not _habit.at_once(backend, wait, len(computation.graph.nodes)) and not brief:
            _send(cause, computation, inputs, states, views, hit, started, timing, wait)
            if wait:
                settle()
            return
    before = time.perf_counter()
    if pipeline.under_way:
        settle()
    inputs = [now(data) for data in inputs]
    _keep_settled(computation.data)
    try:
        if events.take_over is None and profiled is None:
            results = _run_here(computation, inputs, brief)
        else:
            results = events.run_watched(computation, inputs)
    except BaseException as error:
        events.on_cut(cause, computation, hit, started, timing, error)
        raise
    timing.execute = time.perf_counter() - before
    _finish(cause, computation, results, states, views, hit, started, timing)


def _made_again(cause: str, wait: bool) -> bool:
    """Make a cut that compiled code has run on this thread before, all of it in C++ (``native/cuts.h``).

    A program that reads a value many times in a step has many cuts of few operations, and what is done about each of
    them takes as long as they do.  Whatever is not as usual is left to the long way, before anything has happened.
    """
    global _brief, hits, last
    if events.guard is not None or events.take_over is not None or ahead.on:
        return False
    if memory.in_use or _check.value or pipeline.failures or len(computations) > _cache_size.value // 2:
        return False
    backend = registry.current()
    apart = backend.asynchronous and _background.value
    wait = wait or cause not in _UNHURRIED
    here = pipeline.resting and (not apart or _habit.is_likely(backend, wait))
    if events.profiling() or not (here or (_brief and not pipeline.under_way and not fixed())):
        return False
    started = time.perf_counter()
    done = _again(backend, computations, not here)  # type: ignore[misc]
    if done is None:
        _brief = False
        return False
    timing = CutTiming()
    computation, timing.outputs, timing.collect, timing.execute, timing.install = done
    hits += 1
    if 0 < look_at <= hits:
        look()  # noqa: F821  (set by the layer above)
    computation.runs += 1
    pipeline.ran_elsewhere = True
    last = timing
    if ahead.on is not None:
        ahead.begin()
    if apart:
        _habit.at_once(backend, wait, 0)
    events.on_cut(cause, computation, True, started, timing, None)
    return True


_check, _cache_size, _background = (settings._ALL[name] for name in ("check", "cache_size", "run_in_background"))
# A whole cut in C++, by the route of its computation, for brief ones only or for all; None where there is none.
_again: Callable[[Backend, dict[tuple[Any, ...], Computation], bool], tuple[Any, ...] | None] | None = None
_brief = False  # whether the last cut that ran on this thread did because it is brief


def collect() -> tuple[list[Any], list[ViewState], list[ir.Value], list[int | None]]:
    """The states that wait for a value, the views, these values, and the data leaf whose storage each overwrites.

    What a state is worth and which leaf it was decide its place, not who made it when: the same results are one graph.
    """
    waiting: list[State] = []
    views: list[ViewState] = []
    for reference in list(storage.live):
        state = reference()
        if state is None:
            continue
        if state.__class__ is ViewState:
            views.append(state)
        elif state.value is not None and not state.value.leaf:
            waiting.append(state)  # type: ignore[arg-type]
    waiting.sort(key=_place)
    return waiting, views, [s.value for s in waiting], [s.number for s in waiting]  # type: ignore[misc]


def _place(state: State) -> tuple[int, int, int]:
    value: Any = state.value
    return value.node.seq, value.index, -1 if state.number is None else state.number


_collect = collect  # or the same in C++


def _finish(
    cause: str,
    computation: Computation,
    results: list[Any],
    states: list[State],
    views: list[ViewState],
    hit: bool,
    started: float,
    timing: CutTiming,
) -> None:
    """Let the states have their results, and begin the next trace."""
    global last
    computation.runs += 1
    pipeline.ran_elsewhere = True
    before = time.perf_counter()
    failures = [] if _installed(states, results) else _install(states, results)
    _forget(views)
    timing.install = time.perf_counter() - before
    timing.outputs = len(results)
    last = timing
    events.on_cut(cause, computation, hit, started, timing, failures[0].error if failures else None)
    if not hit:
        _trim()
    if failures:
        _raise(failures)


def _run_here(computation: Computation, inputs: list[Any], alone: bool) -> list[Any]:
    """Run a cut on this thread; compiled code without the layers around it, if it can be, on one core or all."""
    global _brief
    function: Any = computation.run
    if function.__class__ is Guard:
        job = function.job(inputs, int)
        if job is not None and (job.run_alone() if alone else job.run()):
            if _again is not None:
                route = function.route(inputs, computation.data, computation.numbers)
                computation.route = None if route is None else (*route, alone)
                _brief = alone
            return job.results()  # type: ignore[no-any-return]
    return function(*inputs)  # type: ignore[no-any-return]


def _keep_settled(leaves: list[int]) -> None:
    """Let the states of these leaves have what earlier cuts in the background made for them, not its futures."""
    for number in leaves:
        data = storage.leaf_data[number]
        if data.__class__ is Future and data.error is None:
            state = storage.leaf_states[number]()
            if state is not None and state.data is data:
                state.data = now(data)


def _graph(values: list[ir.Value], replaced: list[int | None]) -> Graph:
    """The graph of these outputs, which knows the inputs that may be overwritten: nobody can see their old value
    afterwards.
    """
    graph = Graph(values)
    position = {value.node.args[1]: i for i, value in enumerate(graph.data)}
    for number, leaf in enumerate(replaced):
        at = None if leaf is None else position.get(leaf)
        if at is not None and graph.data[at].spec is values[number].spec:
            graph.replaces[number] = at
    return passes.clean(graph)


def now(data: Any) -> Any:
    """The data behind a future of a cut that has run; after a failure, what was there before."""
    while data.__class__ is Future:
        data = data.now()
    return data


def _send(
    cause: str,
    computation: Computation,
    inputs: list[Any],
    states: list[State],
    views: list[ViewState],
    hit: bool,
    started: float,
    timing: CutTiming,
    wait: bool,
) -> None:
    """Hand a cut to the pipeline and begin the next trace at once, or when it has run."""
    global last
    before = time.perf_counter()

    def done(seconds: float) -> None:
        timing.execute = seconds
        computation.runs += 1

    previous = [state.data for state in states]
    own_memory = computation.compiled.backend.own_memory
    run, futures = pipeline.send(
        computation.run, computation.graph, inputs, previous, own_memory, done, computation.share, wait
    )
    for state, future in zip(states, futures, strict=True):
        if state.spec_ is None:
            state.spec_ = state.value.spec  # type: ignore[union-attr]
        state.data = future
        state.value = None
    _forget(views)
    timing.install = time.perf_counter() - before
    timing.outputs = len(computation.graph.outputs)
    last = timing
    if wait:
        run.wait()
    failures = pipeline.failures if wait else []
    events.on_cut(cause, computation, hit, started, timing, failures[0].error if failures else None)
    if not hit:
        _trim()


# Why a cut may be made for which nobody waits; any other is made because a value is read now.
_UNHURRIED = ("sync", "budget")


class _Habit:
    """Whether a program waits for its cuts all the time, which decides on which thread they run.

    To hand a small graph to another thread and its result back takes longer than to run it.  So where every step has
    many cuts that somebody waits for, all run on the thread that makes them.  They do not take turns: two threads that
    compute have twice the OpenMP threads, which then sleep between loops instead of standing by (8 ms a step instead of
    3 in `lazytensor bench models`' program with control flow).
    """

    MANY = 4  # reads in a step
    SURE = 3  # such steps one after the other
    LARGE = 64  # operations; to hand those over costs nothing, and libraries keep memory for each thread that computes

    def __init__(self) -> None:
        self.backend: Backend | None = None
        self.reads = 0
        self.steps = 0

    def is_likely(self, backend: Backend, wait: bool) -> bool:
        """Whether :meth:`at_once` will say so of a cut that ran here before, while the other thread rests."""
        return backend is self.backend and (wait or self.reads >= self.MANY)

    def at_once(self, backend: Backend, wait: bool, operations: int) -> bool:
        """Whether to run this cut, of so many operations, on the thread that made it."""
        if backend is not self.backend:
            self.backend, self.reads, self.steps = backend, 0, 0
        if wait:
            self.reads += 1
        else:
            self.steps = self.steps + 1 if self.reads >= self.MANY else 0
            self.reads = 0
        if self.steps < self.SURE:  # the other thread has not begun, and such a step gives it no reason to
            return (wait or self.steps > 0) and pipeline.resting and operations < self.LARGE
        pipeline.rest()
        return True


_habit = _Habit()


def settle() -> None:
    """Wait for every cut that is under way; raise what went wrong."""
    pipeline.drain()
    report_failures()


def report_failures() -> None:
    """Raise what went wrong in cuts that ran in the background, once."""
    if pipeline.failures:
        _raise(pipeline.take_failures())


# Results given out in C++, which has happened if it says so.
_installed: Callable[[list[State], list[Any]], bool] = lambda states, results: False  # noqa: E731


def _install(states: list[State], results: list[Any]) -> list[Failure]:
    failures = []
    for state, result in zip(states, results, strict=False):
        if result.__class__ is Failure:
            failures.append(result)
            state.spec_ = state.spec
            if state.data.__class__ is Future:
                state.data = now(state.data)
            if state.data is None:
                state.error = result
            state.value = None
            continue
        if state.spec_ is None:
            state.spec_ = state.value.spec  # type: ignore[union-attr]
        state.data = result
        state.value = None
    failures += [r for r in results[len(states) :] if r.__class__ is Failure]
    return failures


def _forget(views: list[ViewState]) -> None:
    """Begin a new trace."""
    _renumber(views)
    if ahead.on is not None:
        ahead.begin()


def renumber(views: list[ViewState]) -> None:
    """Leaves are numbered anew."""
    for reference in storage.leaf_states:
        state = reference()
        if state is not None:
            state.number = None
            if state.value is not None and state.value.leaf:
                state.value = None
    for view in views:
        view.value = None
    storage.live.clear()
    storage.numbers.clear()
    storage.leaf_data.clear()
    storage.leaf_states.clear()
    storage.effects.clear()


_renumber = renumber  # or the same in C++


def use_compiled(extension: Any) -> None:
    """Let C++ do what a cut does for each state (``native/recorder.cpp``), as it is done here."""
    global _again, _collect, _installed, _renumber
    _again, _collect, _installed, _renumber = (
        extension.again,
        extension.collect,
        extension.install_results,
        extension.forget,
    )


def _raise(failures: list[Failure]) -> None:
    """Raise what eager would have raised, with a note that names the op and the line that recorded it."""
    first = min(failures, key=lambda f: f.node.seq)
    error = first.error
    error.add_note(f"lazytensor: raised by {first.node.op.name}, recorded at {first.node.line}")
    raise error


# --- bounds -----------------------------------------------------------------------------------------------------------


def _trim() -> None:
    """After a compilation: drop the least recently used computations, and the nodes that no computation needs."""
    while len(computations) > settings.cache_size:
        del computations[next(iter(computations))]
    if ir.node_count() > settings.max_nodes:
        sweep()


def sweep() -> None:
    """Drop every interned node that no cached computation needs.  Only at a cut, when nothing is pending."""
    keep: set[ir.Node] = set()
    for key in list(computations)[-settings.cache_size // 2 :]:
        keep.update(computations[key].graph.nodes)
    if len(keep) > settings.max_nodes // 2:
        computations.clear()
        keep.clear()
    record.drop_nodes(keep)
    ir.nodes_dropped(len(keep))


def clear() -> None:
    """Forget every compiled graph and every interned node.  What is pending stays pending."""
    global cleared, hits, misses
    computations.clear()
    hits = misses = 0
    cleared += 1
    counts_anew()
    ahead.first_step = True
    if ahead.on is None:
        ahead.begin()
    record.drop_nodes(set())
    ir.nodes_dropped(0)


def _drop_computations(backend: Backend) -> None:
    """A backend was closed that cannot run again what it compiled."""
    for key in [k for k in computations if k[0] is backend]:
        del computations[key]


registry.on_close.append(_drop_computations)
registry.before_close.append(pipeline.drain)
