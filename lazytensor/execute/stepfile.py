"""A step in a file: the graph, its inputs and the results it gave, to be run again anywhere without the model.

The file is a ``safetensors`` file, so any program can read its tensors and reading it can run no code.  Tensor
``input.3`` is the memory of input 3 (one dimension, as long as its storage), ``output.0`` that of output 0.  The
metadata has ``format`` (this format's number), ``graph`` (the text described in :mod:`lazytensor.backend.graphfile`),
``numbers`` (the lifted numbers, as ``[type, text]``), ``lines`` (the user's line of each operation), ``torch`` and
``backend`` (what made the results).
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

from lazytensor import errors
from lazytensor.backend import graphfile, registry
from lazytensor.backend.contract import Failure
from lazytensor.backend.graph import Graph
from lazytensor.backend.interface import Backend
from lazytensor.execute import cut
from lazytensor.inspect import events
from lazytensor.trace.ir import Spec

FORMAT = "lazytensor-step-1"
_KINDS: dict[str, Any] = {
    "float": float.fromhex,
    "int": int,
    "bool": {"True": True, "False": False}.__getitem__,
    "complex": complex,
}


def _library() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise errors.LazyTensorError(
            "steps are kept in safetensors files: install them with pip install 'lazytensor[steps]'"
        ) from None
    return safetensors


class Step:
    """A step that was saved: run it on any backend, or check a backend against the results it gave."""

    def __init__(self, graph: Graph, inputs: list[Any], outputs: list[torch.Tensor], about: dict[str, str]) -> None:
        self.graph = graph
        self.inputs = inputs  # tensors, then numbers
        self.outputs = outputs
        self.about = about

    def run(self, backend: str | Backend = "reference") -> list[torch.Tensor]:
        """The results of this step on a backend.  Raises what the step raises there."""
        chosen = backend if isinstance(backend, Backend) else registry.instance(backend)
        chosen.prepare()
        computation = chosen.computation(self.graph)
        results = computation.run(*[i.clone() if isinstance(i, torch.Tensor) else i for i in self.inputs])
        for result in results:
            if isinstance(result, Failure):
                raise result.error
        return results

    def check(self, backend: str | Backend = "reference", rtol: float = 0.0, atol: float = 0.0) -> None:
        """Run the step and compare with the results in the file."""
        torch.testing.assert_close(self.run(backend), self.outputs, rtol=rtol, atol=atol, equal_nan=True)


def save_step(path: str | os.PathLike[str]) -> Path:
    """Run what is pending and write it to a file: structure, inputs and results."""
    library = _library()
    target = Path(path)
    if not target.suffix:
        target = target.with_suffix(".step")
    written = False

    def run(computation: Any, inputs: list[Any]) -> list[Any]:
        nonlocal written
        before = [i.clone() if isinstance(i, torch.Tensor) else i for i in inputs]
        results: list[Any] = computation.run(*inputs)
        if not any(isinstance(r, Failure) for r in results):
            _write(library, target, computation.graph, before, results)
            written = True
        return results

    before, events.take_over = events.take_over, run
    try:
        cut.cut("save_step", wait=True)
    finally:
        events.take_over = before
    if not written:
        raise errors.LazyTensorError("there is nothing pending to save: call save_step before the step is cut")
    return target


def write(target: Path, graph: Graph, inputs: list[Any], results: list[torch.Tensor]) -> None:
    """Write any graph whose inputs are leaves, with its inputs and results, as a step."""
    _write(_library(), target, graph, inputs, results)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor, from its first element to its last, in one dimension."""
    extent = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((extent,), (1,)).clone()


def _write(library: Any, target: Path, graph: Graph, inputs: list[Any], results: list[torch.Tensor]) -> None:
    count = len(graph.data)
    tensors = {f"input.{i}": _flat(t) for i, t in enumerate(inputs[:count])}
    tensors |= {f"output.{i}": _flat(t) for i, t in enumerate(results)}
    numbers = [[type(n).__name__, n.hex() if isinstance(n, float) else repr(n)] for n in inputs[count:]]
    metadata = {
        "format": FORMAT,
        "graph": graphfile.dumps(graph),
        "numbers": json.dumps(numbers),
        "lines": json.dumps([str(node.line) for node in graph.nodes]),
        "torch": torch.__version__,
        "backend": registry.current().name,
    }
    temporary = target.with_name(target.name + ".part")
    library.torch.save_file(tensors, temporary, metadata=metadata)
    os.replace(temporary, target)


def load_step(path: str | os.PathLike[str]) -> Step:
    """Read a step.  A file that is not one, or is damaged, raises :class:`lazytensor.errors.BadStepFile`, and nothing
    else happens."""
    library = _library()
    try:
        with library.safe_open(os.fspath(path), "pt") as file:
            about = dict(file.metadata() or {})
            if about.get("format") != FORMAT:
                raise ValueError(f"its format is {about.get('format')!r}, not {FORMAT!r}")
            graph = graphfile.loads(about.pop("graph"))
            numbers = [_KINDS[kind](text) for kind, text in json.loads(about["numbers"])]
            if [type(n) for n in numbers] != [n.kind for n in graph.numbers]:
                raise ValueError("its numbers are not those of its graph")
            inputs = [_shaped(file.get_tensor(f"input.{i}"), v.spec) for i, v in enumerate(graph.data)]
            outputs = [_shaped(file.get_tensor(f"output.{i}"), v.spec) for i, v in enumerate(graph.outputs)]
            for node, line in zip(graph.nodes, json.loads(about.get("lines", "[]")), strict=False):
                node.line = str(line)
    except FileNotFoundError:
        raise
    except Exception as problem:
        raise errors.BadStepFile(os.fspath(path), problem) from None
    return Step(graph, [*inputs, *numbers], outputs, about)


def _shaped(memory: torch.Tensor, spec: Spec) -> torch.Tensor:
    """The tensor of this geometry over memory read from a file; a geometry that does not fit is an error."""
    if memory.dtype is not spec.dtype or memory.dim() != 1:
        raise ValueError(f"a tensor is {memory.dtype}{list(memory.shape)} and should be the memory of {spec}")
    return memory.as_strided(spec.size, spec.stride, 0)
