"""From an entry on disk to a callable, without importing TorchInductor or starting a compiler.

The wrapper's Python is executed with the few names it uses; its kernels come from the shared objects beside it.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_KINDS: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "int": int,
    "bool": lambda text: text == "True",
    "complex": complex,
}


class _Externals:
    """Inductor's table of library calls, by name: nearly all of them are functions of torch."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name, None)
        if found is None:
            from torch._inductor.select_algorithm import extern_kernels

            found = getattr(extern_kernels, name)
        setattr(self, name, found)
        return found


class _NoCompiler:
    """Stands for Inductor's compile pool: every kernel is there already."""

    def wait(self, scope: dict[str, Any]) -> None:
        """Nothing to wait for."""


def _names() -> dict[str, Any]:
    guards = torch._C._dynamo.guards  # type: ignore[attr-defined]
    return {
        "torch": torch,
        "math": math,
        "inf": math.inf,
        "nan": math.nan,
        "aten": torch.ops.aten,
        "inductor_ops": torch.ops.inductor,
        "device": torch.device,
        "empty_strided": torch.empty_strided,
        "empty_strided_cpu": guards._empty_strided_cpu,  # type: ignore[attr-defined]
        "reinterpret_tensor": guards._reinterpret_tensor,  # type: ignore[attr-defined]
        "assert_size_stride": guards.assert_size_stride,
        "assert_alignment": guards.assert_alignment,
        "alloc_from_pool": torch.ops.inductor._alloc_from_pool,
        "extern_kernels": _Externals(),
        "async_compile": _NoCompiler(),
        "align": lambda nbytes: (nbytes + 63) & -64,
    }


def _kernel(path: Path) -> Callable[..., None]:
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    spec = importlib.util.spec_from_file_location("kernel", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.kernel  # type: ignore[no-any-return]


class Compiled:
    """A compiled graph: called with the graph's inputs, it gives the results.

    An output that replaces an input is written into that input's memory, and returned as it.
    """

    def __init__(self, folder: Path, replaces: dict[int, int], data_count: int) -> None:
        scope = _names()
        path = folder / "wrapper.py"
        code = compile(path.read_text(), str(path), "exec")
        call = json.loads((folder / "call.json").read_text())
        names = eval(path.read_text().partition("\n")[0].partition("=")[2], {"__builtins__": {}})
        for number, name in enumerate(names):
            scope[name] = _kernel(folder / f"kernel{number}.so")
        exec(code, scope)
        self.call: Callable[[list[Any]], Any] = scope["call"]
        self.floats: list[int] = [data_count + i for i in call["floats"]]
        self.ints: list[int] = [data_count + i for i in call["ints"]]
        self.baked = {data_count + int(i): _KINDS[kind](text) for i, (kind, text) in call["baked"].items()}
        self.returned: list[int] = call["returned"]
        self.replaces = replaces
        self.data_count = data_count
        self.outputs = len(self.returned) + len(replaces)
        self.operations: int = call["operations"]

    def accepts(self, inputs: tuple[Any, ...]) -> bool:
        """Whether the numbers that were compiled as constants still have their values."""
        for position, value in self.baked.items():
            number = inputs[position]
            if number != value and not (number != number and value != value):
                return False
        return True

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the compiled graph."""
        arguments = list(inputs[: self.data_count])
        if self.floats:
            arguments.append(torch.tensor([inputs[i] for i in self.floats], dtype=torch.float64))
        if self.ints:
            arguments.append(torch.tensor([inputs[i] for i in self.ints], dtype=torch.int64))
        made = self.call(arguments)
        if not self.replaces:
            return list(made)
        results: list[Any] = [None] * self.outputs
        for number, result in zip(self.returned, made, strict=True):
            results[number] = result
        for number, position in self.replaces.items():
            results[number] = inputs[position]
        return results
