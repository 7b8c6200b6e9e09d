"""The interface of a backend: one class, of which only :meth:`Backend.compile` must be written.

It covers PyTorch's C++ ``BackendImplInterface``; the C++ name of each method stands in its docstring, with who owns
what and when the method is called.  Unless a docstring says otherwise a method is called on the thread that cuts, and
never by two threads at once: lazytensor holds its lock.  :meth:`Backend.execute` may be called on lazytensor's own
worker thread.

    class Mine(lazytensor.Backend):
        def compile(self, graph):
            return graph.to_fx()        # any callable: one argument per graph input, returns the list of results
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from lazytensor import settings
from lazytensor.backend.data import BackendData, BackendDevice, Computation, MemoryInfo
from lazytensor.backend.graph import Graph
from lazytensor.trace import storage
from lazytensor.trace.ir import DATA, LEAF, Node, Spec, contiguous_stride, spec, spec_of

if TYPE_CHECKING:
    from lazytensor.backend.lowering import EmissionMap, IrBuilder, LoweringContext


class Backend(ABC):
    """What compiles and runs graphs.

    The arguments of ``__init__`` are the options of ``lt.set_backend(name, **options)``.
    """

    name = "unnamed"  # under which it was registered
    version = ""
    own_memory = False  # whether it takes and returns BackendData; if not, plain CPU tensors
    asynchronous = False  # whether cuts run on lazytensor's worker thread while the next step is recorded
    runs_ahead = False  # whether a step that was never seen may be run on the CPU as it is recorded, instead of by it
    keeps_computations = True  # whether what it compiled can still run after close() and prepare()
    device_types: tuple[str, ...] = ("cpu",)  # the kinds of hardware it can use
    computation_class: type[Computation] = Computation

    def __init__(self) -> None:
        self._device_type = self.device_types[0]
        self._ordinal = 0
        self.counts: Counter[str] = Counter()

    # --- life ---------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:  # noqa: B027
        """Get ready; called each time the backend comes into force (``InitializeAtenBindings``).

        If it raises, the backend that was in force stays in force, and the user is told why.
        """

    def close(self) -> None:  # noqa: B027
        """Let go of devices and threads; called when another backend replaces this one and at exit (``PrepareToExit``).

        Before, all data in the backend's own memory has been brought to the host.  The backend may be prepared again
        later.
        """

    # --- configuration ------------------------------------------------------------------------------------------------

    def seed(self, seed: int) -> None:
        """Seed the backend's own random numbers (``SetRngSeed``).

        Called by ``lt.seed``.  Random ops draw on the host when they are recorded, so only a
        backend that draws by itself has anything to do here.
        """
        self._seed = seed

    @property
    def device_type(self) -> str:
        """The kind of hardware in use (``GetDefaultDeviceType``); assign to change it (``SetDefaultDeviceType``)."""
        return self._device_type

    @device_type.setter
    def device_type(self, kind: str) -> None:
        if kind not in self.device_types:
            raise ValueError(f"the backend {self.name!r} runs on {', '.join(self.device_types)}, not on {kind!r}")
        self._device_type = kind

    @property
    def device_ordinal(self) -> int:
        """The number that ``ltc`` without a number means (``GetDefaultDeviceOrdinal``); assignable
        (``SetDefaultDeviceOrdinal``).
        """
        return self._ordinal

    @device_ordinal.setter
    def device_ordinal(self, ordinal: int) -> None:
        known = [device.ordinal for device in self.devices()]
        if ordinal not in known:
            raise ValueError(f"the backend {self.name!r} has the devices {known}, and no device {ordinal}")
        self._ordinal = ordinal

    @property
    def fallback_device_type(self) -> str:
        """Where ops run that fall back to eager PyTorch (``EagerFallbackDeviceType``)."""
        return "cpu"

    # --- devices ------------------------------------------------------------------------------------------------------

    def devices(self) -> list[BackendDevice]:
        """The hardware that this backend can use, as of ``device_type`` (``GetBackendDevices``)."""
        return [BackendDevice(self.device_type, ordinal) for ordinal in range(settings.devices)]

    def device(self, device: torch.device) -> BackendDevice:
        """The hardware behind an ltc device (``GetBackendDevice``)."""
        return BackendDevice(self.device_type, self.device_ordinal if device.index is None else device.index)

    def compilation_devices(self, device: BackendDevice, devices: Sequence[BackendDevice]) -> list[BackendDevice]:
        """Which of these devices take part in a computation on ``device`` (``GetCompilationDevices``)."""
        return list(devices) or [device]

    # --- data ---------------------------------------------------------------------------------------------------------

    def to_device(self, tensor: torch.Tensor, spec: Spec, device: BackendDevice) -> BackendData:
        """Upload (``MakeComputationDataFromTensor``); called at a cut, for ``own_memory`` backends, once per tensor.

        The caller keeps the CPU tensor and may change it afterwards: what is returned must not share its memory.
        """
        return BackendData(self, spec, device, tensor.detach().clone(memory_format=torch.preserve_format))

    def scalar_to_device(self, number: complex, device: BackendDevice) -> BackendData:
        """Upload a number as a tensor without dimensions (``MakeComputationDataFromScalar``)."""
        tensor = torch.tensor(number)
        return self.to_device(tensor, spec_of(tensor, device.ordinal), device)

    def placeholder(self, spec: Spec, device: BackendDevice) -> BackendData:
        """Data without a value, to be filled by ``assign`` (``CreateDataPlaceholder``)."""
        return BackendData(self, spec, device)

    def to_host(self, data: BackendData, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Download (``MakeTensorFromComputationData``); called at every read of a value that lives in the backend's
        memory.

        The tensor returned has the geometry ``data.spec`` and belongs to the caller: it must not share memory with the
        data.
        """
        tensor: torch.Tensor = data.value
        return torch.empty_strided(data.spec.size, data.spec.stride, dtype=dtype or data.spec.dtype).copy_(tensor)

    def data_of(self, node: Node) -> BackendData | None:
        """The data behind a node that stands for data in the running trace; None for any other
        (``GetComputationDataFromNode``).
        """
        if node.op is not LEAF or node.args[0] is not DATA or node.args[1] >= len(storage.leaf_data):
            return None
        found = storage.leaf_data[node.args[1]]
        if isinstance(found, BackendData):
            return found
        (value,) = node.outputs
        assert value is not None
        return BackendData(self, value.spec, self.device(torch.device("ltc", max(value.spec.device, 0))), found)

    # --- tracing ------------------------------------------------------------------------------------------------------

    def ir_builder(self) -> IrBuilder:
        """What makes nodes (``GetIrBuilder``): override to record an op in the backend's own way.

        Called when it comes into force.
        """
        from lazytensor.backend.lowering import IrBuilder

        return IrBuilder()

    # --- lowering -----------------------------------------------------------------------------------------------------

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Sequence[Node] = (), emitted: EmissionMap | None = None
    ) -> LoweringContext:
        """A context in which nodes are lowered; those of ``post_order`` are lowered at once (``CreateLoweringContext``,
        both).
        """
        from lazytensor.backend.lowering import LoweringContext

        return LoweringContext(self, name, device, post_order, emitted)

    # --- work ---------------------------------------------------------------------------------------------------------

    @abstractmethod
    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """The graph as a callable: one argument per ``graph.inputs``, returns one result per ``graph.outputs``
        (``Compile``).

        Tensor arguments belong to lazytensor and must not be written, but for ``graph.donatable``.  Results pass into
        lazytensor's hands: each has the size and dtype declared by ``spec`` and, on return, memory of its own.
        (lazytensor mends strides and shared memory; a wrong count, size or dtype is an error.)
        """

    def compile_all(self, computations: Sequence[Computation]) -> list[Computation]:
        """Compile several computations (``Compile`` as it stands in C++); override to compile them together."""
        for computation in computations:
            if computation.callable is None:
                before = time.perf_counter()
                computation.callable = self.compile(computation.graph)
                computation.compile_seconds = time.perf_counter() - before
                self.counts["compiled"] += 1
        return list(computations)

    def execute(self, computation: Computation, arguments: Sequence[Any], device: BackendDevice) -> list[Any]:
        """Run a compiled computation (``ExecuteComputation``); may be called on lazytensor's worker thread."""
        assert computation.callable is not None
        return computation.callable(*arguments)

    def ran_ahead(self, computation: Computation) -> None:  # noqa: B027
        """A computation's first step was run as it was recorded, and not by it (see ``runs_ahead``)."""

    def supports(self, node: Node) -> bool:
        """Whether ``compile`` can take this node.

        What it cannot take is decomposed by PyTorch's decomposition tables; what is then left runs in the reference
        interpreter inside the same computation, and is reported.
        """
        return True

    # --- metrics and debugging ----------------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """The backend's own counters by name (``GetMetrics``)."""
        return dict(self.counts)

    def memory_info(self, device: BackendDevice | None = None) -> MemoryInfo:
        """Total and free memory of a device (``GetMemoryInfo``)."""
        page = os.sysconf("SC_PAGE_SIZE")
        return MemoryInfo(os.sysconf("SC_PHYS_PAGES") * page, os.sysconf("SC_AVPHYS_PAGES") * page)

    def metric_report(self) -> str:
        """Text that ends the metrics report (``CreateMetricReport``)."""
        return "\n".join(f"{self.name}: {name} {value:g}" for name, value in sorted(self.metrics().items()))

    def text(self, computation: Computation) -> str:
        """A compiled computation as text (``GetComputationBackendText``)."""
        return computation.graph.python()

    # --- for lazytensor -----------------------------------------------------------------------------------------------

    def computation(self, graph: Graph) -> Computation:
        """The graph compiled, its promises guarded: what a cut asks for.  Not to be overridden."""
        from lazytensor.backend import contract

        return contract.computation(self, graph)

    def __repr__(self) -> str:
        return f"<backend {self.name} on {self.device_type}>"


__all__ = ["Backend", "contiguous_stride", "spec"]
