"""What a backend promises, and what happens when it breaks the promise.

A compiled computation is called through a :class:`Guard`.  On its first runs, and always under ``settings.check``, the
guard looks at the results: a wrong count, size or dtype is an error; other strides than declared, or memory shared with
an input or another result, are mended by a copy, for good.  Afterwards a run costs what the backend's own callable
costs.

If the callable raises, the reference interpreter runs the same graph on the same inputs.  If it fails too, the error is
the user's own (an index out of range), and is reported as such, with op and line.  If not, the backend is to blame:
``BackendFailed`` is raised, everything pending stays pending; or, as ``settings.on_backend_failure`` says, the
interpreter's results are taken and the computation stays with the interpreter, with one loud line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.backend import memory
from lazytensor.backend.data import BackendData, Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.trace import source
from lazytensor.trace.ir import Node, Spec, Value, contiguous_stride
from lazytensor.trace.shapes import clean, may_overlap

log = logging.getLogger("lazytensor")
CHECKED_RUNS = 3


class Failure:
    """Stands where a result would be: the op that should have made it, or one before it, failed."""

    def __init__(self, error: Exception, node: Node) -> None:
        self.error = error
        self.node = node

    def __str__(self) -> str:
        return f"{self.node.op.name} at {self.node.line}: {type(self.error).__name__}: {self.error}"


def out_of_memory(error: BaseException) -> bool:
    """Whether there was no memory for something.  That is nobody's mistake: with more memory the same run succeeds."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "DefaultCPUAllocator: " in str(error)


def restrided(tensor: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The same elements in memory laid out as declared."""
    made = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=tensor.device)
    if not may_overlap(spec):
        return made.copy_(tensor)
    extent = made.untyped_storage().nbytes() // made.element_size()
    memory = made.as_strided((extent,), (1,))
    # elements that share memory are equal: any may win
    places = torch.arange(extent).as_strided(spec.size, spec.stride)
    memory[places.reshape(-1)] = tensor.reshape(-1)
    return made


def lazy_bits(tensor: torch.Tensor) -> bool:
    """Whether a conjugation or negation is still to be applied to the memory."""
    return tensor.is_conj() or tensor.is_neg()


def misplaced(tensor: torch.Tensor, spec: Spec) -> bool:
    """Whether a tensor of the right size and dtype lies in memory otherwise than declared."""
    return tensor.stride() != spec.stride or bool(tensor.storage_offset()) or lazy_bits(tensor)


def undeclared(number: int, result: Any, spec: Spec) -> str | None:
    """What is wrong with a result of another size or dtype than declared; None if it has both."""
    if tuple(result.shape) == spec.size and result.dtype is spec.dtype:
        return None
    given = f"{str(result.dtype).removeprefix('torch.')}{list(result.shape)}"
    return f"result {number} is {given} and was declared {spec}"


def computation(backend: Backend, graph: Graph) -> Computation:
    """Compile a graph, in parts where the backend does not support an op, and guard it."""
    from lazytensor.backend import plan

    made = backend.computation_class(backend, graph, backend.device(torch.device("ltc", 0)))
    made.in_mark_step = True
    before = time.perf_counter()
    try:
        with clean():
            if type(backend).supports is Backend.supports or all(map(backend.supports, graph.nodes)):
                backend.compile_all([made])
            else:
                made.callable = plan.compile_parts(backend, made)
    except Exception as error:
        failed = _failed(backend, graph, "compile", f"it raised {type(error).__name__}: {error}")
        made.run = made.callable = _instead(failed, error, graph)
    else:
        assert made.callable is not None
        made.run = getattr(made.callable, "guarded", None) or Guard(made)
    made.compile_seconds = time.perf_counter() - before
    return made


def _failed(backend: Backend, graph: Graph, phase: str, what: str, node: Node | None = None) -> errors.BackendFailed:
    line = graph.first_line() if node is None else node.line
    place = f"{node.op.name}, recorded at {line}" if node is not None else f"which begins at {line}"
    frame = source.user_frame()
    if frame is not None:
        place += f", run at {frame.f_code.co_filename}:{frame.f_lineno}"
    return errors.BackendFailed(backend.name, phase, repr(graph), place, what)


def _instead(failed: errors.BackendFailed, error: Exception | None, graph: Graph) -> Any:
    """The reference interpreter's program for a graph, if the setting lets it take over; else raise."""
    from lazytensor.backend.reference import Program

    if settings.on_backend_failure != "reference":
        raise failed from error
    log.error(
        "lazytensor: %s  It runs on the backend 'reference' from now on (on_backend_failure='reference').", failed
    )
    return Program(graph)


class Guard:
    """A compiled computation whose results are what was declared."""

    def __init__(self, computation: Computation) -> None:
        self.computation = computation
        self.backend = computation.backend
        assert computation.callable is not None
        self.function: Callable[..., list[Any]] = computation.callable
        if type(self.backend).execute is not Backend.execute:
            self.function = self._execute
        self.to_check = CHECKED_RUNS
        self.mends: dict[int, Spec] = {}  # results that need a copy
        self.trusted = False  # whether the reference interpreter has taken over

    def _execute(self, *inputs: Any) -> list[Any]:
        return self.backend.execute(self.computation, inputs, self.computation.device)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it; what it returns has been checked or mended."""
        try:
            with clean():
                results = self.function(*inputs)
                if self.to_check or (settings.check and not self.trusted):
                    results = self._checked(inputs, results)
                elif self.mends:
                    results = list(results)
                for number, spec in self.mends.items():
                    results[number] = restrided(results[number], spec)
                return results
        except errors.BackendFailed as failed:
            return self._take_over(failed, failed.__cause__, inputs)
        except Exception as error:
            what = f"it raised {type(error).__name__}: {error}"
            return self._take_over(_failed(self.backend, self.computation.graph, "execute", what), error, inputs)

    def job(self, inputs: list[Any], threads: Callable[[], int]) -> Any:
        """The next run as something that needs no Python: compiled code whose results were as declared.  Else None."""
        found = self._ready(inputs)
        return None if found is None else found[0].job(inputs, threads, found[1])

    def route(self, inputs: list[Any], data: list[int], numbers: list[int]) -> Any:
        """How the run on these inputs, which lie behind these leaves, can be made again (``native/cuts.h``).  Else
        None.
        """
        found = self._ready(inputs)
        return None if found is None else found[0].route(data, numbers, found[1])

    def _ready(self, inputs: list[Any]) -> tuple[Any, tuple[int, ...]] | None:
        ready = getattr(self.function, "ready", None)
        found = None if ready is None or settings.check else ready(inputs)
        if found is None:
            return None
        if self.to_check == CHECKED_RUNS:
            if self.function.passed_before is None:  # type: ignore[attr-defined]
                return None
            self.to_check = 0
        compiled, copied = found
        if copied or self.mends:
            copied = [*copied, *self.mends]
            specs = [self.computation.graph.outputs[number].spec for number in copied]
            if any(spec.stride != contiguous_stride(spec.size) for spec in specs):
                return None
        if self.function.passed_before is None:  # type: ignore[attr-defined]
            self.function.passed(copied)  # type: ignore[attr-defined]
        return compiled, tuple(copied)

    def _take_over(self, failed: errors.BackendFailed, error: Any, inputs: tuple[Any, ...]) -> list[Any]:
        """After a failure: find out whose it is, and give the interpreter's results if they are to be taken."""
        from lazytensor.backend.reference import Program

        graph = self.computation.graph
        results = Program(graph)(*map(memory.host, inputs))
        if failed.phase == "execute" and any(isinstance(r, Failure) for r in results):
            return results
        program = _instead(failed, error, graph)
        self.function = lambda *given: program(*map(memory.host, given))  # type: ignore[no-any-return]
        self.to_check, self.mends, self.trusted = 0, {}, True
        return results

    def _checked(self, inputs: tuple[Any, ...], results: Any) -> list[Any]:
        """Compare the results with what the graph declares; note which need a copy."""
        graph = self.computation.graph
        if not isinstance(results, list | tuple):
            raise self._wrong(
                f"it returned a {type(results).__name__} instead of a list of {len(graph.outputs)} results"
            )
        if len(results) != len(graph.outputs):
            raise self._wrong(f"it returned {len(results)} results instead of {len(graph.outputs)}")
        for number, (result, value) in enumerate(zip(results, graph.outputs, strict=True)):
            if result.__class__ is not Failure:
                self._compare(number, result, value)
        if not self.backend.own_memory:
            self._separate(inputs, results)
        self.to_check = max(0, self.to_check - 1)
        return list(results)

    def _compare(self, number: int, result: Any, value: Value) -> None:
        spec = value.spec
        kind: Any = BackendData if self.backend.own_memory else torch.Tensor
        if not isinstance(result, kind):
            raise self._wrong(f"result {number} is a {type(result).__name__} instead of a {kind.__name__}", value.node)
        if (fault := undeclared(number, result, spec)) is not None:
            raise self._wrong(fault, value.node)
        if kind is torch.Tensor:
            if result.device.type != "cpu":
                raise self._wrong(f"result {number} is on {result.device} instead of the CPU", value.node)
            if misplaced(result, spec):
                self.mends[number] = spec

    def _separate(self, inputs: tuple[Any, ...], results: Any) -> None:
        """Results that share memory with an input or with an earlier result get memory of their own."""
        graph = self.computation.graph
        donated = graph.donatable
        taken = {
            t.untyped_storage().data_ptr()
            for i, t in enumerate(inputs)
            if isinstance(t, torch.Tensor) and i not in donated
        }
        taken.discard(0)
        for number, result in enumerate(results):
            if result.__class__ is Failure:
                continue
            place = result.untyped_storage().data_ptr()
            extra = result.untyped_storage().nbytes() > result.numel() * result.element_size() and not misplaced(
                result, graph.outputs[number].spec
            )
            if place in taken or (extra and graph.outputs[number].spec.plain):
                self.mends[number] = graph.outputs[number].spec
            elif place:
                taken.add(place)

    def _wrong(self, what: str, node: Node | None = None) -> errors.BackendFailed:
        return _failed(self.backend, self.computation.graph, "results", what, node)
