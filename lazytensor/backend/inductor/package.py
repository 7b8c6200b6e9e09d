"""A graph for the tensors of an accelerator: a shared object by AOTInductor, and how it is run.

TorchInductor's usual code for an accelerator is Python that compiles Triton kernels when it is first run.  AOTInductor
makes what can be kept on disk and run by another process: one C++ function, the kernels' machine code linked into the
same object, which PyTorch loads without Inductor or a compiler.  The form is the same for every device, the CPU
included, where the tests run it.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from lazytensor.backend.inductor.load import Compiled

# The kernels in the object itself: else it would look for a file each, under the path that they were compiled at.
_OPTIONS: dict[str, Any] = {"aot_inductor.embed_kernel_binary": True, "aot_inductor.package": False}


@contextlib.contextmanager
def ahead_of_time() -> Iterator[None]:
    """Within this block TorchInductor makes such objects; its decompositions want to know it, too."""
    from torch._inductor import config
    from torch._inductor.compile_fx import get_cpp_wrapper_config
    from torch._inductor.virtualized import V

    with V.set_aot_compilation(True), config.patch(_OPTIONS | get_cpp_wrapper_config()):
        yield


def compile_into(folder: Path, traced: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
    """Have an FX graph compiled, within that block, into ``graph.so``, ``graph.cpp`` (its source) and, where it has
    operators that only PyTorch's dispatcher can call, ``graph.json``, which names them.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner

    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        made = Path(temporary)
        with config.patch({"aot_inductor.output_path": str(made / "graph.so")}):
            compile_fx_inner(traced, inputs, cpp_wrapper=True)
        shutil.copyfile(made / "graph.so", folder / "graph.so")
        for ending in ("cpp", "json"):
            for found in made.glob(f"*.wrapper.{ending}"):
                shutil.copyfile(found, folder / f"graph.{ending}")


class Packaged(Compiled):
    """Compiled code for the tensors of one device."""

    def __init__(self, folder: Path, replaces: dict[int, int], data_count: int, device: torch.device) -> None:
        self.device = device
        self._there: Any = contextlib.nullcontext()  # in which the device is the current one, and its stream
        if device.type != "cpu":
            self._there = torch.get_device_module(device).device(device)
        super().__init__(folder, replaces, data_count)

    def _opened(self, folder: Path) -> Callable[[list[Any]], list[Any]]:
        """PyTorch's runner of such an object: one for each kind of device."""
        kind = getattr(torch._C._aoti, f"AOTIModelContainerRunner{self.device.type.capitalize()}")
        path = str(folder / "graph.so")
        if self.device.type == "cpu":
            return kind(path, 1).run  # type: ignore[no-any-return]
        # One run after the other in the order of the stream: else each would wait until the device has done the last.
        return kind(path, 1, str(self.device), "", True).run  # type: ignore[no-any-return]

    def _made(self, arguments: list[Any]) -> list[Any]:
        with self._there:
            return self.entry(arguments)

    def _vector(self, numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """From memory that the device reads by itself: an upload from elsewhere would wait for all earlier work."""
        apart = self.device.type != "cpu"
        return torch.tensor(numbers, dtype=dtype, pin_memory=apart).to(self.device, non_blocking=apart)
