"""From an entry on disk to a callable, without importing TorchInductor or starting a compiler."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from lazytensor import native, settings
from lazytensor.backend import compiler

_KINDS: dict[str, Callable[[str], Any]] = {
    "float": float.fromhex,
    "int": int,
    "bool": lambda text: text == "True",
    "complex": complex,
}


_ENTRY = "inductor_entry_cpp"
_handles = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors  # type: ignore[attr-defined]
_tensors = torch._C._aoti.alloc_tensors_by_stealing_from_void_ptrs  # type: ignore[attr-defined]


def _entry(path: Path) -> Callable[[list[Any]], list[Any]]:
    """The compiled function: it takes over the handles of its inputs and gives away those of its results."""
    # Inductor's modules look here for the one function of PyTorch that they do not link to.
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(
        torch._C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]
    )
    return getattr(compiler.load(_ENTRY, path), _ENTRY)  # type: ignore[no-any-return]


class Compiled:
    """A compiled graph: called with the graph's inputs, it gives the results.

    An output that replaces an input is written into that input's memory, and returned as it.
    """

    def __init__(self, folder: Path, replaces: dict[int, int], data_count: int) -> None:
        call = json.loads((folder / "call.json").read_text())
        self.path = str(folder / "graph.so")
        self.entry = self._opened(folder)
        self.floats: list[int] = [data_count + i for i in call["floats"]]
        self.ints: list[int] = [data_count + i for i in call["ints"]]
        self.baked = {data_count + int(i): _KINDS[kind](text) for i, (kind, text) in call["baked"].items()}
        self.returned: list[int] = call["returned"]
        self.replaces = replaces
        self.data_count = data_count
        self.outputs = len(self.returned) + len(replaces)
        self.operations: int = call["operations"]
        self._codes: dict[tuple[int, ...], Any] = {}  # for the compiled queue, by the results that it copies

    def _opened(self, folder: Path) -> Callable[[list[Any]], list[Any]]:
        """The compiled function."""
        return _entry(folder / "graph.so")

    def _made(self, arguments: list[Any]) -> list[Any]:
        """What the compiled function returns for these tensors."""
        handles = _handles(arguments)
        arguments.clear()
        return _tensors(self.entry(handles))  # type: ignore[no-any-return]

    def _vector(self, numbers: list[Any], dtype: torch.dtype) -> torch.Tensor:
        """Lifted numbers as the compiled function takes them."""
        return torch.tensor(numbers, dtype=dtype)

    def accepts(self, inputs: Sequence[Any]) -> bool:
        """Whether the numbers that were compiled as constants still have their values."""
        for position, value in self.baked.items():
            number = inputs[position]
            if number != value and not (number != number and value != value):
                return False
        return True

    def job(self, inputs: list[Any], threads: Callable[[], int], copied: tuple[int, ...]) -> Any:
        """The same as something that runs without Python, later, on inputs that may not be there yet: then these are
        futures of other such jobs.  None if they are others, or where the extension has not been built.  ``copied``
        results get memory of their own.
        """
        extension = native.extension()
        if extension is None:
            return None
        floats, ints = [inputs[i] for i in self.floats], [inputs[i] for i in self.ints]
        return extension.Job.of(self._code(extension, copied), inputs, self.data_count, floats, ints, threads())

    def route(self, data: list[int], numbers: list[int], copied: tuple[int, ...]) -> Any:
        """The code and the leaves that it takes, by which ``native/cuts.h`` runs it; None if its numbers have to be
        compared before each run.
        """
        extension = native.extension()
        if extension is None or self.baked:
            return None
        floats, ints = (tuple([numbers[i - self.data_count] for i in row]) for row in (self.floats, self.ints))
        return self._code(extension, copied), tuple(data), floats, ints

    def _code(self, extension: Any, copied: tuple[int, ...]) -> Any:
        code = self._codes.get(copied)
        if code is None:
            replaced = list(self.replaces.items())
            extension.open_arena(settings.keep_bytes)
            code = self._codes[copied] = extension.Code(self.path, self.returned, replaced, list(copied))
        return code

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run the compiled graph."""
        arguments = list(inputs[: self.data_count])
        if self.floats:
            arguments.append(self._vector([inputs[i] for i in self.floats], torch.float64))
        if self.ints:
            arguments.append(self._vector([inputs[i] for i in self.ints], torch.int64))
        made = self._made(arguments)
        if not self.replaces:
            return made
        results: list[Any] = [None] * self.outputs
        for number, result in zip(self.returned, made, strict=True):
            results[number] = result
        for number, position in self.replaces.items():
            results[number] = inputs[position]
        return results
