"""From a graph to a folder with what TorchInductor made of it.

Runs in the compiling process, or in this one when asked to wait.  What comes out needs no compiler and no pickle to be
run again: ``wrapper.py``, the Python that calls the kernels in order; ``kernel0.so`` …, one shared object per fused
kernel; ``kernels.cpp``, their sources, for people to read; ``call.json``, what the wrapper is called with.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.lower import Lowered, Lowering

# The kernels are called from Python; this releases the interpreter's lock around each, so that the next step can be
# recorded while this one runs.  It is the template that Inductor fills in.
_CALL = (
    "[](auto... arguments) {{ struct Released {{ PyThreadState* state = PyEval_SaveThread(); "
    "~Released() {{ PyEval_RestoreThread(state); }} }} released; kernel(arguments...); }}({}); Py_RETURN_NONE;"
)
_KERNEL = re.compile(r"^(\w+) = async_compile\.cpp_pybinding\((\[.*?\]), r'''(.*?)'''\)$", re.DOTALL | re.MULTILINE)
_OPTIONS: dict[str, Any] = {
    "fx_graph_cache": False,  # our own cache holds the result
    "cpp_wrapper": False,
    "compile_threads": 1,
    "size_asserts": False,  # inputs have the declared geometry: the cut made them
    "alignment_asserts": False,
    "nan_asserts": False,
}


class TooLarge(RuntimeError):
    """Raised when a graph has more operations than Inductor is given."""


class Unsupported(RuntimeError):
    """Raised when Inductor's result has a part that this backend cannot store."""


def build(graph: Graph, numbers: list[Any], folder: Path) -> None:
    """Compile a graph into a folder.  ``numbers`` holds the values of the graph's numbers, for those that are baked."""
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    lowered = Lowering(graph, numbers).run()
    mode = FakeTensorMode()
    inputs = _fake_inputs(graph, lowered, mode)
    with torch.no_grad(), _kernels_release_the_lock(), config.patch(**_OPTIONS):
        with mode:
            traced = make_fx(lowered.module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
        _keep_strides(traced, graph, lowered)
        compiled: Any = compile_fx_inner(traced, inputs)
        if compiled.constants:
            raise Unsupported("the compiled graph holds tensors of its own")
        _store_kernels(compiled.source_code, folder)
    call = {
        "floats": lowered.floats,
        "ints": lowered.ints,
        "baked": {str(i): _text(numbers[i]) for i in lowered.baked},
        "returned": lowered.returned,
        "operations": len(traced.graph.nodes),
    }
    (folder / "call.json").write_text(json.dumps(call))


def _text(number: Any) -> list[str]:
    return [type(number).__name__, number.hex() if isinstance(number, float) else repr(number)]


def _fake_inputs(graph: Graph, lowered: Lowered, mode: Any) -> list[torch.Tensor]:
    """Tensors without memory that look like what the wrapper will be called with."""
    with mode:
        made = [torch.empty_strided(v.size, v.spec.stride, dtype=v.dtype, device="cpu") for v in graph.data]
        for row, dtype in ((lowered.floats, torch.float64), (lowered.ints, torch.int64)):
            if row:
                made.append(torch.empty(len(row), dtype=dtype, device="cpu"))
    return made


def _keep_strides(traced: torch.fx.GraphModule, graph: Graph, lowered: Lowered) -> None:
    """Tell Inductor that callers look at the outputs' strides."""
    output = next(iter(reversed(traced.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(lowered.returned)))
    output.meta["original_output_strides"] = [graph.outputs[i].spec.stride for i in lowered.returned]


def _store_kernels(source: str, folder: Path) -> None:
    """Keep the compiled kernels, and the wrapper without their sources."""
    from torch._inductor.codecache import CppPythonBindingsCodeCache

    texts: list[str] = []
    names: list[str] = []
    for match in _KERNEL.finditer(source):
        name, types, text = match.groups()
        function = CppPythonBindingsCodeCache.load_pybinding(json.loads(types.replace("'", '"')), text)
        shutil.copyfile(function.__self__.__file__, folder / f"kernel{len(names)}.so")
        names.append(name)
        texts.append(f"// {name}\n{text}")
    stripped = _KERNEL.sub("", source)
    if "async_compile." in stripped.replace("async_compile.wait(globals())", ""):
        raise Unsupported("the compiled graph has a kernel of another kind than C++")
    start = stripped.index("class Runner")
    end = stripped.find("\ndef get_args", start)
    end = end if end >= 0 else stripped.find("\ndef benchmark_compiled_module", start)
    body = stripped[start:end] if end >= 0 else stripped[start:]
    (folder / "wrapper.py").write_text(f"KERNELS = {names!r}\n\n\n{body}\n")
    (folder / "kernels.cpp").write_text("\n".join(texts))


@contextlib.contextmanager
def _kernels_release_the_lock() -> Iterator[None]:
    """Let the kernels compiled in this block release the interpreter's lock while they run.

    Inductor has no option for it.  Symptom without: the thread that records the next step stood still while a kernel
    ran.
    """
    from torch._inductor.codecache import CppPythonBindingsCodeCache as Cache

    before = Cache.call_entry_function
    Cache.call_entry_function = _CALL
    try:
        yield
    finally:
        Cache.call_entry_function = before


def no_compiler() -> str | None:
    """Why kernels cannot be compiled here, or None if they can."""
    chosen = os.environ.get("CXX")
    if chosen and shutil.which(chosen):
        return None
    if any(shutil.which(c) for c in ("g++", "clang++", "c++")):
        return None
    return "no C++ compiler was found (g++, clang++ or $CXX)"
