"""The TorchScript backend: a graph becomes a function of PyTorch's JIT interpreter, which runs about 1.7 µs an op.

A graph that runs once is not worth building, so its first run is the reference interpreter's; that run also shows which
values the CPU's kernels lay out otherwise than declared, and the function built for the second run has the copies in
it.

The function gets the JIT's *simple* executor: no profiling runs, no specialisation, no fuser.  (The profiling executor
takes 40 to 150 µs an op for its first two runs and is then no faster on small tensors.)  The executor's preparation
grows faster than the graph and recurses in places, so a large graph is divided into several functions.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend.data import BackendData, BackendDevice, Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.hardware import HardwareBackend
from lazytensor.backend.lowering import EmissionMap
from lazytensor.backend.reference import Program
from lazytensor.backend.ts_lowering import TSLoweringContext, lowerable
from lazytensor.trace.ir import Node, Spec, Value

log = logging.getLogger("lazytensor")

CHUNK = 2000  # operations in one function
_profiling = threading.Lock()  # the executor's kind is a setting of the process while a function is first called


class TSData(BackendData):
    """A tensor on the hardware, where that is not the CPU (``TSData``)."""

    __slots__ = ()


class TSComputation(Computation):
    """A graph and its JIT functions (``TSComputation``)."""

    __slots__ = ()


class Function:
    """One JIT function, its executor chosen at its first call."""

    def __init__(self, context: TSLoweringContext, copies: set[int]) -> None:
        self.one = len(context.results) == 1
        self.graph = context.graph
        self.function = context.finish(copies)
        self.first = True

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run it."""
        if self.first:
            with _profiling:
                before = torch._C._jit_set_profiling_mode(False)
                try:
                    result = self.function(*inputs)
                finally:
                    torch._C._jit_set_profiling_mode(before)
            self.first = False
        else:
            result = self.function(*inputs)
        return (result,) if self.one else result


class Interpreted:
    """Operations that TorchScript has no operator for."""

    graph = "# run by the reference interpreter\n"

    def __init__(self, nodes: list[Node], outputs: list[Value], device: torch.device | None) -> None:
        self.program = Program(Graph(outputs, nodes=nodes), device)
        self.names = sorted({n.op.name for n in nodes})
        self.graph = f"# run by the reference interpreter: {', '.join(self.names)}\n"

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run them."""
        results = self.program(*inputs)
        for result in results:
            if not isinstance(result, torch.Tensor):
                raise result.error
        return results


class TSProgram:
    """A compiled graph: called with its inputs, gives the list of its results."""

    def __init__(self, backend: TorchScriptBackend, graph: Graph) -> None:
        self.backend = backend
        self.graph = graph
        self.device = backend.devices()[0]
        self.first: Program | None = None if backend.own_memory else Program(graph)
        self.mends: dict[Value, Spec] = {}
        self.steps: list[tuple[Any, list[int], list[int], list[int]]] = []

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it: by the interpreter at first, then by its functions."""
        if self.first is not None:
            return self._first(self.first, inputs)
        if not self.steps:
            self._build()
        if len(self.steps) == 1:
            return list(self.steps[0][0](inputs))
        have: list[Any] = list(inputs) + [None] * self.slots
        for function, taken, made, dying in self.steps:
            results = function([have[i] for i in taken])
            for slot in dying:
                have[slot] = None
            for slot, result in zip(made, results, strict=True):
                have[slot] = result
        return [have[i] for i in self.results]

    def _first(self, program: Program, inputs: Sequence[Any]) -> list[Any]:
        results = program(*inputs)
        if program.checked:
            self.mends = program.mends
            self.first = None
        return results

    def _build(self) -> None:
        """Divide the graph into functions; values that pass between them have slots after the inputs."""
        graph = self.graph
        chunks = self._chunks()
        slot: dict[Any, int] = {leaf: i for i, leaf in enumerate(graph.inputs)}
        last = {v: number for number, (nodes, _) in enumerate(chunks) for n in nodes for v in n.inputs}
        kept = set(graph.outputs)
        copies = graph.shared_outputs
        for number, (nodes, native) in enumerate(chunks):
            final = number == len(chunks) - 1
            part = Graph(graph.outputs if final else [], nodes=nodes)
            outputs = [
                v
                for n in nodes
                for v in n.outputs
                if v is not None and (last.get(v, number) > number or (v in kept and not final))
            ]
            if final:
                outputs = graph.outputs
            else:
                part.outputs = outputs
            steps = self._function(part, nodes, native or final, copies if final else set())
            taken = [slot[leaf] for leaf in part.inputs]
            # A final result may be one of an earlier function's, so results have slots of their own.
            made = list(range(len(slot), len(slot) + len(outputs)))
            for v, place in zip(outputs, made, strict=True):
                slot[(number, v, place) if final else v] = place
            dying = [
                slot[v] for v in part.data if v not in kept and last.get(v) == number and slot[v] >= len(graph.inputs)
            ]
            self.steps.append((steps, taken, made, dying))
            if final:
                self.results = made
        self.slots = len(slot) - len(graph.inputs)

    def _chunks(self) -> list[tuple[list[Node], bool]]:
        """Runs of nodes that TorchScript has operators for, and of others.

        The last one is TorchScript's: it hands out the results.
        """
        chunks: list[tuple[list[Node], bool]] = []
        for node in self.graph.nodes:
            native = lowerable(node, self.backend)
            if not chunks or chunks[-1][1] != native or len(chunks[-1][0]) >= self.backend.chunk:
                chunks.append(([], native))
            chunks[-1][0].append(node)
        if not chunks or not chunks[-1][1]:
            chunks.append(([], True))
        missing = sorted({n.op.name for nodes, native in chunks if not native for n in nodes})
        if missing:
            self.backend.say_interpreted(missing)
        return chunks

    def _function(self, part: Graph, nodes: list[Node], native: bool, copies: set[int]) -> Any:
        if not native:
            return Interpreted(nodes, part.outputs, self.backend.target)
        context = TSLoweringContext(self.backend, "step", self.device)
        context.mends = self.mends
        for leaf in part.inputs:
            context.add_parameter(leaf)
        context.lower_all(nodes)
        for value in part.outputs:
            context.add_result(value)
        self.backend.counts["emitted nodes"] += context.emitted_count
        return Function(context, copies)

    @property
    def text(self) -> str:
        """The JIT graphs, built if they have not been yet."""
        if not self.steps:
            self._build()
        return "\n".join(str(function.graph) for function, *_ in self.steps)


class TorchScriptBackend(HardwareBackend):
    """PyTorch's JIT interpreter (``TSBackendImpl``)."""

    name = "ts"
    version = torch.__version__
    asked_by = f"{HardwareBackend.asked_by}, ts_cuda or LTC_TS_CUDA"
    data_class = TSData
    computation_class = TSComputation

    def __init__(self, device: str | None = None, chunk: int = CHUNK) -> None:
        """``device``: cpu or cuda, by default as the settings ``hardware`` and ``ts_cuda`` say.

        ``chunk``: operations in one JIT function.
        """
        super().__init__(device)
        self.chunk = chunk
        self._said: set[str] = set()

    def preferred(self) -> str:
        """``ts_cuda`` is PyTorch's own setting for this backend; otherwise as for the others."""
        return "cuda" if settings.ts_cuda else super().preferred()

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Sequence[Node] = (), emitted: EmissionMap | None = None
    ) -> TSLoweringContext:
        """A context that builds a ``torch._C.Graph``."""
        return TSLoweringContext(self, name, device, post_order, emitted)

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """The graph as JIT functions, built when it runs for the second time."""
        return TSProgram(self, graph)

    def execute(self, computation: Computation, arguments: Sequence[Any], device: BackendDevice) -> list[Any]:
        """Run the functions; on hardware with memory of its own, on the tensors behind the data."""
        assert computation.callable is not None
        self.counts["executed"] += 1
        if not self.own_memory:
            return computation.callable(*arguments)
        return self.run_on_data(computation.callable, computation.graph, arguments, device)

    def text(self, computation: Computation) -> str:
        """The JIT graph."""
        program = computation.callable
        return program.text if isinstance(program, TSProgram) else super().text(computation)

    def say_interpreted(self, names: list[str]) -> None:
        """Report, once each, the ops that the interpreter runs."""
        new = [n for n in names if n not in self._said]
        self.counts["interpreted"] += len(names)
        if new:
            self._said.update(new)
            log.warning(
                "lazytensor: TorchScript has no operator for %s: the reference interpreter runs it", ", ".join(new)
            )
