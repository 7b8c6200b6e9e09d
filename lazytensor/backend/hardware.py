"""Backends that compute through PyTorch on any of its devices: where their tensors lie, and how they get there.

On the CPU they take and return plain tensors.  On an accelerator a tensor is uploaded once, stays there from graph to
graph as :class:`BackendData`, and is downloaded when it is read.  Its results are ordinary tensors in the order of the
current stream, so nothing waits for the device but a download.  All graphs run on the accelerator's first device, in
whichever ltc device their tensors are: values of several may meet in one cut.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend.contract import Failure, restrided
from lazytensor.backend.data import BackendData, BackendDevice, MemoryInfo
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.trace.ir import Spec
from lazytensor.trace.shapes import clean, may_overlap


def place(device: BackendDevice) -> torch.device:
    """The PyTorch device of tensors on this hardware."""
    return torch.device("cpu") if device.type == "cpu" else torch.device(device.type, device.ordinal)


@functools.cache
def traits(device: torch.device) -> str:
    """What machine code for this device, and for its host, where the kernels are called, depends on."""
    host = f"isa={torch.backends.cpu.get_cpu_capability()}"
    if device.type == "cpu":
        return host
    found = torch.get_device_module(device).get_device_properties(device)
    version = torch.version.hip or torch.version.cuda
    capability = f"{found.major}.{found.minor}"
    return f"{host} {device.type}={version} name={found.name} capability={capability}"


class HardwareBackend(Backend):
    """A backend that runs PyTorch's kernels or the like, on the CPU or on an accelerator that PyTorch has."""

    device_types = ("cpu", "cuda")
    host_types: tuple[str, ...] = ("cpu",)  # those that compute in the host's memory, on plain CPU tensors
    asked_by = "setting hardware or LAZYTENSOR_HARDWARE"  # how the kind is chosen, beside the option
    data_class: type[BackendData] = BackendData

    def __init__(self, device: str | None = None) -> None:
        super().__init__()
        self.device_type = device or self.preferred()

    def preferred(self) -> str:
        """The kind of hardware where the program has not named one: as the setting ``hardware`` says."""
        return str(settings.hardware)

    @property
    def device_type(self) -> str:
        """The kind of hardware in use; assign to change it, before anything runs."""
        return self._device_type

    @device_type.setter
    def device_type(self, kind: str) -> None:
        if kind not in self.device_types:
            raise ValueError(f"the backend {self.name!r} runs on {' or '.join(self.device_types)}, not on {kind!r}")
        if kind != "cpu" and not torch.get_device_module(kind).is_available():
            raise RuntimeError(
                f"the backend {self.name!r} was asked for {kind.upper()} (option device={kind!r}, {self.asked_by}), "
                f"and PyTorch {torch.__version__} finds no {kind.upper()} device"
            )
        if kind != "cpu":
            torch.get_device_module(kind).init()
        self._device_type = kind
        self.own_memory = kind not in self.host_types
        # An accelerator works behind the program's back as it is; its current stream is the program's thread's.
        self.asynchronous = type(self).asynchronous and not self.own_memory

    @property
    def target(self) -> torch.device | None:
        """Where its graphs run, if not on plain CPU tensors."""
        return place(self.devices()[0]) if self.own_memory else None

    def devices(self) -> list[BackendDevice]:
        """Every device of the accelerator, or the CPU once for each ltc device."""
        if self.device_type == "cpu":
            return super().devices()
        return [
            BackendDevice(self.device_type, i) for i in range(torch.get_device_module(self.device_type).device_count())
        ]

    def seed(self, seed: int) -> None:
        """Seed PyTorch's generators of the hardware, from which operators that draw in a graph would."""
        super().seed(seed)
        torch.default_generator.manual_seed(seed)
        if self.device_type != "cpu":
            torch.get_device_module(self.device_type).manual_seed_all(seed)

    def to_device(self, tensor: torch.Tensor, spec: Spec, device: BackendDevice) -> BackendData:
        """A copy on the hardware."""
        with clean():
            if may_overlap(spec):
                placed = restrided(tensor.detach().to(place(device)), spec)
            else:
                placed = torch.empty_strided(spec.size, spec.stride, dtype=spec.dtype, device=place(device))
                placed.copy_(tensor.detach())
        return self.data_class(self, spec, device, placed)

    def to_host(self, data: BackendData, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A copy on the host."""
        with clean():
            if may_overlap(data.spec):
                return restrided(data.value.cpu(), data.spec).to(dtype or data.dtype)
            return super().to_host(data, dtype)

    def on_data(self, run: Callable[..., list[Any]], graph: Graph) -> Callable[..., list[Any]]:
        """A function of tensors on the hardware as one of device data."""
        device = self.devices()[0]
        return lambda *arguments: self.run_on_data(run, graph, arguments, device)

    def run_on_data(
        self, run: Callable[..., list[Any]], graph: Graph, arguments: Sequence[Any], device: BackendDevice
    ) -> list[Any]:
        """Run it on the tensors behind these arguments."""
        results = run(*[a.value if isinstance(a, BackendData) else a for a in arguments])
        return [
            result if result.__class__ is Failure else self.data_class(self, value.spec, device, result)
            for result, value in zip(results, graph.outputs, strict=True)
        ]

    def memory_info(self, device: BackendDevice | None = None) -> MemoryInfo:
        """Of the accelerator, or of the machine."""
        if self.device_type == "cpu":
            return super().memory_info(device)
        module = torch.get_device_module(self.device_type)
        free, total = module.mem_get_info(0 if device is None else device.ordinal)
        return MemoryInfo(total, free)
