"""Strict mode: everything a backend is forbidden to rely on is made to fail at once.

For authors of backends.  Inside ``with lt.strict():`` each graph is handed over in another legal order; the memory of
inputs is filled with NaN (or the largest integer) as soon as the run is over, unless a result lives in it; cuts that
run in the background start late at random; every result's size, dtype, strides and memory is looked at in every run;
inputs that may not be written are compared with what they were; and one run in ``every`` is compared with the reference
interpreter, down to the first operation that differs.
"""

from __future__ import annotations

import heapq
import logging
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.backend import memory
from lazytensor.backend.contract import Failure, Guard, _failed, misplaced
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.backend.reference import Program
from lazytensor.execute import cut, verify
from lazytensor.execute.pipeline import pipeline
from lazytensor.trace.ir import Node
from lazytensor.trace.shapes import clean

log = logging.getLogger("lazytensor")


class Strict:
    """One use of strict mode: how strict, and what was found."""

    def __init__(self, every: int = 1, seed: int = 0, delay: float = 0.002, tolerance: float | None = None) -> None:
        self.every = every
        self.delay = delay
        self.tolerance = tolerance
        self.random = random.Random(seed)
        self.runs = 0
        self.compared = 0  # runs that were compared with the interpreter
        self.mended: list[str] = []  # results that are allowed, but cost a copy: other strides, or shared memory
        self.problems: list[Exception] = []  # found in the background, raised when the block ends

    def shuffled(self, graph: Graph) -> Graph:
        """The same graph with its operations in another legal order."""
        made = Graph(graph.outputs, dict(graph.replaces), _any_order(graph.nodes, self.random))
        made.data, made.numbers = graph.data, graph.numbers
        return made


def _any_order(nodes: list[Node], chance: random.Random) -> list[Node]:
    """A random order in which every operation still comes after those it uses."""
    inside = set(nodes)
    users: dict[Node, list[Node]] = {}
    waiting: dict[Node, int] = {}
    ready: list[tuple[float, int, Node]] = []
    for number, node in enumerate(nodes):
        above = {v.node for v in node.inputs if v.node in inside}
        waiting[node] = len(above)
        for other in above:
            users.setdefault(other, []).append(node)
        if not above:
            heapq.heappush(ready, (chance.random(), number, node))
    order: list[Node] = []
    number = len(nodes)
    while ready:
        node = heapq.heappop(ready)[2]
        order.append(node)
        for user in users.get(node, ()):
            waiting[user] -= 1
            if not waiting[user]:
                number += 1
                heapq.heappush(ready, (chance.random(), number, user))
    return order


_in_force: Strict | None = None


def computation(backend: Backend, graph: Graph) -> Any:
    """What a cut asks for instead of ``backend.computation`` while strict mode is on."""
    mode = _in_force or _standing()
    made = backend.computation(mode.shuffled(graph))
    made.run = Watched(made.run, backend, graph, mode)
    return made


def _standing() -> Strict:
    """Strict mode switched on by the setting alone."""
    global _in_force
    _in_force = Strict(every=settings.strict)
    return _in_force


class Watched:
    """A compiled computation, each run of which is looked at from all sides."""

    def __init__(self, run: Any, backend: Backend, graph: Graph, mode: Strict) -> None:
        self.run = run
        self.backend = backend
        self.graph = graph
        self.mode = mode

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it."""
        mode = self.mode
        mode.runs += 1
        background = threading.current_thread() is pipeline.thread
        if background and mode.delay:
            time.sleep(mode.random.random() * mode.delay)
        before = [verify._copy(memory.host(i)) for i in inputs]
        donated = self.graph.donatable
        given = [
            i if n in donated or not isinstance(i, torch.Tensor) else verify._copy(i) for n, i in enumerate(inputs)
        ]
        if isinstance(self.run, Guard):
            self.run.to_check = max(self.run.to_check, 1)
        try:
            results: list[Any] = self.run(*given)
        except BaseException as error:
            if self._restore(given, before) and isinstance(error, Exception):
                error.add_note(
                    "lazytensor: it had already overwritten inputs when it raised; strict mode put them back"
                )
            raise
        with clean():
            problem = self._problem(given, before, results)
            if problem is None:
                if not any(r.__class__ is Failure for r in results):
                    self._poison(given, results)
                return results
            self._restore(given, before)
            if not background:
                raise problem
            # The work has left the trace: the program gets the right results, and the error when the block ends.
            mode.problems.append(problem)
            log.error("lazytensor: %s", problem)
            right = Program(self.graph)(*before)
            if not self.backend.own_memory:
                return right
            return [r if r.__class__ is Failure else memory._fitted(self.backend, r) for r in right]

    # --- what is looked at --------------------------------------------------------------------------------------------

    def _problem(self, given: list[Any], before: list[Any], results: list[Any]) -> Exception | None:
        if isinstance(self.run, Guard) and self.run.mends and not self.run.trusted:
            for number in self.run.mends:
                op = self.graph.outputs[number].node.op.name
                text = f"result {number} of {op} has other strides, or shares memory: it is copied"
                if text not in self.mode.mended:
                    self.mode.mended.append(text)
                    log.warning("lazytensor: %r: %s", self.backend.name, text)
        for number, (now, then) in enumerate(zip(given, before, strict=True)):
            if isinstance(now, torch.Tensor) and number not in self.graph.donatable and not _same_bits(now, then):
                return self._wrong(
                    f"it wrote into input {number} and may write only into {sorted(self.graph.donatable)}"
                )
        if not self.backend.own_memory:
            wrong = self._wrong_memory(given, results)
            if wrong is not None:
                return wrong
        if self.mode.every and self.mode.runs % self.mode.every == 0:
            return self._compare(before, results)
        return None

    def _wrong_memory(self, given: list[Any], results: list[Any]) -> Exception | None:
        """Every result must be what was declared, in memory that nobody else has."""
        if len(results) != len(self.graph.outputs):
            return self._wrong(f"it returned {len(results)} results instead of {len(self.graph.outputs)}")
        donated = self.graph.donatable
        owner = {
            _place(t): f"input {n}" for n, t in enumerate(given) if isinstance(t, torch.Tensor) and n not in donated
        }
        for number, (result, value) in enumerate(zip(results, self.graph.outputs, strict=True)):
            if result.__class__ is Failure:
                continue
            if (
                tuple(result.shape) != value.spec.size
                or result.dtype is not value.spec.dtype
                or misplaced(result, value.spec)
            ):
                return self._wrong(
                    f"result {number} is {verify.geometry(result)} and was declared {value.spec}",
                    value.node,
                )
            place = _place(result)
            if place and place in owner:
                return self._wrong(f"result {number} shares memory with {owner[place]}", value.node)
            owner[place] = f"result {number}"
        return None

    def _compare(self, before: list[Any], results: list[Any]) -> Exception | None:
        self.mode.compared += 1
        right = Program(self.graph)(*[verify._copy(b) for b in before])
        for mine, expected in zip(results, right, strict=True):
            if mine.__class__ is Failure or expected.__class__ is Failure:
                if mine.__class__ is not expected.__class__:
                    return self._wrong(f"it gave {mine!r} where the reference interpreter gives {expected!r}")
                continue
            what = verify.differs(expected, memory.host(mine), self.mode.tolerance)
            if what is not None:
                found = verify.first_difference(self.graph, before, self.backend, self.mode.tolerance)
                if found is None:
                    return errors.ResultsDiffer(
                        f"a result differs in this run ({what}), but not in the next: it depends on memory or time"
                    )
                return errors.ResultsDiffer(str(verify.keep(found)))
        return None

    def _wrong(self, what: str, node: Node | None = None) -> errors.BackendFailed:
        return _failed(self.backend, self.graph, "results", what, node)

    # --- memory -------------------------------------------------------------------------------------------------------

    def _restore(self, given: list[Any], before: list[Any]) -> bool:
        """Put inputs back that were overwritten, so that what is pending can still run.  Says whether any was."""
        changed = False
        for number in self.graph.donatable:
            now, then = given[number], before[number]
            if isinstance(now, torch.Tensor) and not _same_bits(now, then):
                changed = True
                now.untyped_storage().copy_(then.untyped_storage())
        return changed

    def _poison(self, given: list[Any], results: list[Any]) -> None:
        """Nobody may look at these inputs again: the copies the backend was lent, and those whose storage has a new
        value."""
        kept = {_place(r) for r in results if isinstance(r, torch.Tensor)}
        for tensor in given:
            if isinstance(tensor, torch.Tensor) and _place(tensor) not in kept:
                poison(tensor)


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _memory(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a tensor's storage."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def _same_bits(one: torch.Tensor, two: torch.Tensor) -> bool:
    return torch.equal(_memory(one), _memory(two))


def poison(tensor: torch.Tensor) -> None:
    """Fill the whole storage with what no program can mistake for data."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        whole.fill_(float("nan"))
    elif tensor.dtype is torch.bool:
        whole.logical_not_()
    else:
        whole.fill_(torch.iinfo(tensor.dtype).max)


@contextmanager
def strict(every: int = 1, seed: int = 0, delay: float = 0.002, tolerance: float | None = None) -> Iterator[Strict]:
    """Run everything in this block as strictly as the contract of a backend allows.

    ``every``: compare one run in so many with the reference interpreter, 0 for none.  ``seed``: of the orders and
    delays.  ``delay``: the longest wait, in seconds, before a cut that runs in the background.  ``tolerance``: as for
    :func:`lazytensor.verify`.  A broken promise raises :class:`lazytensor.errors.BackendFailed`, a wrong value
    :class:`lazytensor.errors.ResultsDiffer`; what was pending stays pending.
    """
    global _in_force
    before, mode = _in_force, Strict(every, seed, delay, tolerance)
    _swap()
    _in_force = mode
    try:
        with settings.scope(strict=max(every, 1)):
            yield mode
            cut.settle()
    finally:
        _swap()
        _in_force = before
    if mode.problems:
        raise mode.problems[0]


def _swap() -> None:
    """Cuts under way end as they began, and graphs compiled in one mode do not run in another."""
    pipeline.drain()
    cut.computations.clear()
