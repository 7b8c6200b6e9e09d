"""Tiers: a graph is interpreted at once, and moves to TorchInductor's code when that is ready.

The first time a graph is cut nothing is known of it but that it may be the only time, so it goes to the first tier.  A
graph that is seen again is worth compiling: it is sent to the compiling process, and the program goes on.  The compiled
code is taken into use at a later cut.  If it is in the disk cache already, it is used from the first cut on.

Numbers that the code has as constants are compared before each run.  When one changes, that run goes to the first tier;
after a few changes the graph stays there, and a line on the log says so.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lazytensor import settings
from lazytensor._version import __version__
from lazytensor.backend import cpu_only, diskcache, graphfile, hardware, heap, looks, openmp
from lazytensor.backend.contract import misplaced, restrided, undeclared
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.load import Compiled
from lazytensor.backend.inductor.lower import Lowering
from lazytensor.backend.inductor.overwrite import overwritten
from lazytensor.backend.inductor.package import Packaged
from lazytensor.backend.inductor.service import encode, service
from lazytensor.backend.instructions import translated
from lazytensor.backend.reference import Program
from lazytensor.trace import source

log = logging.getLogger("lazytensor")
Runs = Callable[..., list[Any]]
COLD, SENT, READY, STAYS = "cold", "sent", "ready", "stays"
_MOST_VARIANTS = 3  # how often a graph is compiled again for another value of a constant


# Seconds between the wish for compiled code and the start of the compiler: a program of a moment never starts it, and a
# longer one has its first steps, which are slow enough, without another thread and a second process on its cores.
_PATIENCE = 0.5
_UNUSABLE = "the cache of compiled graphs cannot be used"  # a full disk, or a folder that cannot be written


# Runs of a graph before a backend gets to see it.  To make TorchScript's functions takes as long as what they save in
# about so many runs, and most graphs of a program's start come less often or are compiled by then.
_INTERPRETED = 24


class FirstTier:
    """A graph on the first tier: interpreted, by Python until a run was checked and then in C++.

    Where that cannot be, Python goes on until the graph has come often enough to be worth a backend's work.
    """

    def __init__(self, graph: Graph, compile_graph: Callable[[Graph], Runs], in_python: bool = False) -> None:
        """``compile_graph`` gives the graph to that backend; ``in_python``: even where C++ could interpret it."""
        self.graph = graph
        self.compile_graph = compile_graph
        self.in_python = in_python
        self.left = _INTERPRETED
        self.program: Program | None = Program(graph)  # until it was checked
        self.run: Runs = self.program

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the graph."""
        if self.left:
            self._choose()
        return self.run(*inputs)

    def _choose(self) -> None:
        """What the next run is."""
        program = self.program
        if program is not None and program.checked:
            self.program = None
            found = None if self.in_python else translated(self.graph, program)
            if found is not None:
                self.run, self.left = found, 0
                return
            self.run = heap.planned(program, self.graph.nbytes)
        self.left -= 1
        if not self.left:
            self.program = None
            self.run = heap.planned(self.compile_graph(self.graph), self.graph.nbytes)


class Tiered:
    """One graph on its way from the first tier to compiled code."""

    def __init__(
        self,
        graph: Graph,
        compile_first: Callable[[Graph], Runs],
        wait: bool,
        after: int,
        device: torch.device | None = None,
    ) -> None:
        self.graph = graph
        self.device = device  # of all tensors, if they are not plain ones on the CPU
        self.compile_first = compile_first
        self._first: Runs | None = None  # only while it is needed: the code of a GPT step takes 4 MB
        self.wait = wait
        self.after = after  # how many runs on the first tier before the graph is sent to be compiled
        self.state = COLD
        self.wished = 0.0  # when compiled code was first wished for and not found; 0 before
        self.runs = 0
        self.compiled: Compiled | None = None
        self.key = ""  # of the compiled code in the disk cache
        self.variants = 0
        self.reason = ""
        self.seconds = 0.0
        # results whose strides are not the declared ones; None before the first run
        self.mends: list[int] | None = None
        self.passed_before: list[int] | None = None  # the results that are copied, if nothing else was wrong with them
        self.looked = False  # whether what an earlier run has left was looked for
        self._arrived = threading.Event()

    @property
    def tier(self) -> str:
        """Which tier the next run will take."""
        return "inductor" if self.compiled is not None else "first"

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the graph on the best tier that is ready."""
        compiled = self.compiled
        if compiled is not None:
            if compiled.accepts(inputs):
                return self._run(compiled, inputs)
            self._varied()
        self.runs += 1
        if self.state is COLD and self._want(inputs):
            if self.wait:
                self._arrived.wait()
            compiled = self.compiled  # from the disk cache at once, from the compiler only if that was waited for
            if compiled is not None and compiled.accepts(inputs):
                return self._run(compiled, inputs)
        results = self.first(inputs)
        if self.wished and self.state is COLD and time.perf_counter() - self.wished > _PATIENCE:
            self._send(inputs)
        return results

    def first(self, inputs: tuple[Any, ...]) -> list[Any]:
        """Run the graph on the first tier."""
        if self._first is None:
            self._first = self.compile_first(self.graph)
        return self._first(*inputs)

    def ready(self, inputs: Sequence[Any]) -> tuple[Compiled, list[int]] | None:
        """The compiled code that would run on these inputs, if it is ready, and which of its results need a copy.

        What an earlier run of the program has left is looked for here, before the first run, on the thread that cuts:
        on the other one, beside the recording of the next step, it takes three times as long.
        """
        if self.compiled is None and self.state is COLD and not self.runs and not self.looked:
            self.looked = True
            if self.wait or self._compiled_before():
                self._look_up(tuple(inputs))
        compiled, mends = self.compiled, self.mends
        return (compiled, mends) if compiled is not None and mends is not None and compiled.accepts(inputs) else None

    def threads_of_before(self) -> int | None:
        """The number of threads that was best for the compiled code when the program last ran."""
        threads = self._learnt().get("threads")
        return threads if isinstance(threads, int) else None

    def keep_threads(self, threads: int) -> None:
        """That number was found to be best."""
        self._learn(threads=threads)

    def passed(self, copied: Sequence[int]) -> None:
        """The results of the compiled code were as declared, once these are copied.  The same code will give the like
        when the program runs again, so this is kept: its first run then needs neither copies of what it replaces nor a
        look at its results.
        """
        self.passed_before = list(copied)
        self._learn(copied=self.passed_before)

    def _learnt(self) -> dict[str, Any]:
        """What is known of the compiled code from running it."""
        try:
            known = json.loads(diskcache.noted(self.key)) if self.key else {}
        except ValueError:
            known = {}
        return known if isinstance(known, dict) else {}

    def _learn(self, **facts: Any) -> None:
        if self.key:
            diskcache.note(self.key, json.dumps(self._learnt() | facts))

    def _run(self, compiled: Compiled, inputs: tuple[Any, ...]) -> list[Any]:
        """Run compiled code; its first results are compared with what was declared."""
        if self.mends is None:
            # If they are wrong the first tier runs instead, on inputs that must be as they were.
            kept = compiled.replaces.values()
            data = self.graph.data
            results = compiled(*[restrided(i, data[n].spec) if n in kept else i for n, i in enumerate(inputs)])
            pairs = list(enumerate(zip(results, self.graph.outputs, strict=True)))
            faults = [fault for i, (r, v) in pairs if (fault := undeclared(i, r, v.spec)) is not None]
            if faults:
                self.compiled = None
                self._stay(f"{faults[0]} by the graph")
                return self.first(inputs)
            self.mends = [i for i, (r, v) in pairs if misplaced(r, v.spec)]
            self._first = None
            heap.empty()  # of what the first tier and these copies needed
        else:
            results = compiled(*inputs)
        for number in self.mends:
            results[number] = restrided(results[number], self.graph.outputs[number].spec)
        return results

    def _varied(self) -> None:
        """A constant has another value."""
        self.variants += 1
        if self.variants < _MOST_VARIANTS:
            self.state = COLD
            self.compiled = self.mends = self.passed_before = None
            return
        self.compiled = None
        self._stay("a number that is compiled as a constant keeps changing")

    def _want(self, inputs: tuple[Any, ...]) -> bool:
        """Ask for compiled code once the graph was seen often enough, and at its first run where an earlier run of the
        program may have left it; whether it is there or will be.
        """
        enough = self.wait or self.runs > self.after
        at_once = self.wait or self._compiled_before()
        if self.wished or (not enough and (self.runs > 1 or not at_once)):
            return False
        if at_once and not (self.looked and self.runs == 1) and self._look_up(inputs):
            return True
        if len(self.graph) > settings.max_compiled_operations:
            self._stay(f"it has {len(self.graph)} operations, more than max_compiled_operations")
            return False
        if self.wait or not self.after:
            self._send(inputs)
        elif enough:
            self.wished = time.perf_counter()
        return self.wait

    def _look_up(self, inputs: tuple[Any, ...]) -> bool:
        """Whether compiled code is on disk, or the disk cannot be used at all; in neither case is there more to ask."""
        if len(self.graph) > settings.max_compiled_operations:
            return False
        try:
            return self._found(entry_key(self.graph, self._numbers(inputs), self.device))
        except OSError as problem:
            self._stay(f"{_UNUSABLE}: {problem}")
            return True

    def _numbers(self, inputs: tuple[Any, ...]) -> list[Any]:
        return list(inputs[len(self.graph.data) :])

    def _send(self, inputs: tuple[Any, ...]) -> None:
        """Let the graph be compiled.  To name it and to start the compiling process takes a while: a thread does it."""
        self.state, self.wished = SENT, 0.0
        self._arrived.clear()
        threading.Thread(target=self._ask, args=(self._numbers(inputs),), daemon=True, name="lazytensor-ask").start()

    def _compiled_before(self) -> bool:
        return diskcache.compiled_before(self._file())

    def _file(self) -> str:
        """The source file in which the graph begins."""
        return getattr(self.graph.first_line(), "file", source.UNKNOWN.file)

    def _found(self, key: str) -> bool:
        """Whether compiled code is in the disk cache; then it is in use from now on."""
        entry = diskcache.find(key)
        if entry is not None:
            self._load(entry)
        return entry is not None

    def _ask(self, numbers: list[Any]) -> None:
        """Look into the disk cache, then ask the compiling process; on a thread of its own."""
        about = {
            "operations": len(self.graph),
            "line": str(self.graph.first_line()),
            "file": getattr(self.graph.first_line(), "file", None),
            "cut": self.graph.first_cut,
            "torch": torch.__version__,
            "lazytensor": __version__,
        }
        self.seconds = time.perf_counter()
        try:
            key = entry_key(self.graph, numbers, self.device)
            if not self._found(key):
                service.submit(key, self.graph, numbers, about, lambda error: self._answer(key, error), self.device)
        except OSError as problem:
            self._stay(f"{_UNUSABLE}: {problem}")
        except Exception as problem:
            self._stay(f"{type(problem).__name__}: {problem}")

    def _answer(self, key: str, error: str | None) -> None:
        """Called on the thread that listens to the compiling process."""
        self.seconds = time.perf_counter() - self.seconds
        if error is not None:
            self._stay(error)
        elif not self._found(key):
            self._stay("the compiled code is not in the cache")
        else:
            with contextlib.suppress(OSError):
                looks.keep(self._file())

    def _load(self, entry: diskcache.Entry) -> None:
        try:
            what = (entry.path, overwritten(self.graph), len(self.graph.data))
            compiled = Compiled(*what) if self.device is None else Packaged(*what, self.device)
            self.key = entry.key
            copied = self._learnt().get("copied")
            if isinstance(copied, list) and all(isinstance(n, int) and 0 <= n < compiled.outputs for n in copied):
                self.mends = self.passed_before = copied
            self.compiled = compiled
            self.state = READY
        except Exception as problem:
            self._stay(f"{type(problem).__name__}: {problem}")
        finally:
            self._arrived.set()

    def _stay(self, reason: str) -> None:
        """Leave the graph on the first tier for good, and say why, once."""
        self.state = STAYS
        self.reason = reason
        log.warning(
            "lazytensor: the graph of %d operations that begins at %s stays on the first tier: %s",
            len(self.graph),
            self.graph.first_line(),
            reason,
        )
        self._arrived.set()


def entry_key(graph: Graph, numbers: list[Any], device: torch.device | None = None) -> str:
    """The name of a compiled graph in the disk cache: structure, constants, and everything the code depends on."""
    baked = Lowering(graph, numbers).baked_positions()
    constants = ",".join(f"{i}={encode(numbers[i])}" for i in baked)
    flags = f"threads={openmp.all_threads()} isa={torch.backends.cpu.get_cpu_capability()}"
    if device is not None:
        flags = f"packaged for {device}: {hardware.traits(device)}"
    dtype = str(torch.get_default_dtype())
    versions = (torch.__version__, __version__, lowering_digest())
    return diskcache.key_of(graphfile.dumps(graph), constants, "inductor", *versions, flags, dtype)


@functools.cache
def lowering_digest() -> str:
    """A digest of the code that turns graphs into Inductor's: what an earlier form of it made is not found."""
    names = ("lower.py", "build.py", "package.py", "functions.h", "overwrite.py")
    files = [*[Path(__file__).with_name(name) for name in names], Path(cpu_only.__file__)]
    return diskcache.key_of(*[file.read_text(encoding="utf-8") for file in files])
