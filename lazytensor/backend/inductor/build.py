"""From a graph to a folder with what TorchInductor made of it.

Runs in the compiling process, or in this one when asked to wait.  What comes out needs no compiler and no pickle to be
run again: ``graph.so``, the whole step as one C++ function, which holds the interpreter's lock only to take its inputs
and give its results, so that the next step is recorded while it runs; ``graph.cpp``, its source, for people to read;
``call.json``, what it is called with.  For an accelerator the function is AOTInductor's
(:mod:`lazytensor.backend.inductor.package`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from lazytensor.backend import compiler
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor import package
from lazytensor.backend.inductor.lower import Lowered, Lowering, Unsupported

_CPU = torch.device("cpu")
_OPTIONS: dict[str, Any] = {
    "fx_graph_cache": False,  # our own cache holds the result
    "cpp_wrapper": True,
    "compile_threads": 1,
    "size_asserts": False,  # inputs have the declared geometry: the cut made them
    "alignment_asserts": False,
    "nan_asserts": False,
}


def build(graph: Graph, numbers: list[Any], folder: Path, device: torch.device | None = None) -> None:
    """Compile a graph into a folder.

    ``numbers`` holds the values of the graph's numbers, for those that are baked; ``device`` says where all tensors
    are, if they are not plain ones on the CPU.
    """
    from torch._inductor import config
    from torch._inductor.decomposition import select_decomp_table
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    lowered = Lowering(graph, numbers, device).run()
    mode = FakeTensorMode()
    inputs = fake_inputs(graph, lowered, mode, device or _CPU)
    ahead = contextlib.nullcontext() if device is None else package.ahead_of_time()
    with torch.no_grad(), config.patch(**_OPTIONS), ahead:
        with mode:
            traced = make_fx(lowered.module, decomposition_table=select_decomp_table(), tracing_mode="real")(*inputs)
        _keep_strides(traced, graph, lowered)
        if device is None:
            _compile_for_cpu(traced, inputs, folder)
        else:
            package.compile_into(folder, traced, inputs)
    call = {
        "floats": lowered.floats,
        "ints": lowered.ints,
        "baked": {str(i): _text(numbers[i]) for i in lowered.baked},
        "returned": lowered.returned,
        "operations": len(traced.graph.nodes),
    }
    (folder / "call.json").write_text(json.dumps(call))


def _compile_for_cpu(traced: torch.fx.GraphModule, inputs: list[torch.Tensor], folder: Path) -> None:
    """Have the FX graph compiled into the entry function that runs without the interpreter's lock."""
    from torch._inductor.compile_fx import compile_fx_inner

    with _loaded() as functions, _computed_once(), _fast_functions():
        compiled: Any = compile_fx_inner(traced, inputs, cpp_wrapper=True)
    if compiled.constants:
        raise Unsupported("the compiled graph holds tensors of its own")
    if len(functions) != 1:
        raise Unsupported(f"the compiled graph has {len(functions)} entry points")
    shutil.copyfile(functions[0].__self__.__file__, folder / "graph.so")
    (folder / "graph.cpp").write_text(_source(compiled.source_code))


def _text(number: Any) -> list[str]:
    return [type(number).__name__, number.hex() if isinstance(number, float) else repr(number)]


def fake_inputs(graph: Graph, lowered: Lowered, mode: Any, device: torch.device) -> list[torch.Tensor]:
    """Tensors without memory that look like what the wrapper will be called with."""
    with mode:
        made = [torch.empty_strided(v.size, v.spec.stride, dtype=v.dtype, device=device) for v in graph.data]
        for row, dtype in ((lowered.floats, torch.float64), (lowered.ints, torch.int64)):
            if row:
                made.append(torch.empty(len(row), dtype=dtype, device=device))
    return made


def _keep_strides(traced: torch.fx.GraphModule, graph: Graph, lowered: Lowered) -> None:
    """Tell Inductor that callers look at the outputs' strides."""
    output = next(iter(reversed(traced.graph.nodes)))
    output.meta["user_visible_output_idxs"] = list(range(len(lowered.returned)))
    output.meta["original_output_strides"] = [graph.outputs[i].spec.stride for i in lowered.returned]


def _source(wrapper: str) -> str:
    """The C++ in the Python text that Inductor wrote."""
    start = wrapper.find('r"""')
    return wrapper[start + 4 : wrapper.find('"""', start + 4)].lstrip() if start >= 0 else ""


_RELEASE = "py::gil_scoped_release_simple release;"
_LOOK = "lazytensor_between"  # a function that the runner puts there
_KERNEL = re.compile(r"^( +)(cpp_fused_\w+\(|AOTI_TORCH_ERROR_CODE_CHECK\(aoti_torch_cpu_)", re.MULTILINE)


def _adapted(source: str) -> str:
    """Let the entry function be called with the interpreter's lock, which it gives up, or by a thread without it; and
    let the runner look before each kernel whether a core is needed elsewhere.
    """
    if _RELEASE not in source:
        return source
    held = f"std::optional<{_RELEASE.split()[0]}> release; if (PyGILState_Check()) release.emplace();"
    source = _KERNEL.sub(rf"\1if ({_LOOK}) {_LOOK}();\n\1\2", source.replace(_RELEASE, held))
    if f"{_NAMESPACE}::" in source:
        source = source.replace(_PREFIX, f"{_PREFIX}\n{FUNCTIONS.read_text(encoding='utf-8')}", 1)
    return f'extern "C" {{ void (*{_LOOK})() = nullptr; }}\n{source}'


@contextlib.contextmanager
def _loaded() -> Iterator[list[Any]]:
    """The entry functions of what Inductor compiles and loads in this block: it tells no other way where they are."""
    from torch._inductor.codecache import CppWrapperCodeCache as Cache

    found: list[Any] = []
    load = Cache.load_pybinding

    def noted(*args: Any, **kwargs: Any) -> Any:
        parts = [_adapted(part) if isinstance(part, str) else part for part in args]
        kwargs = {key: _adapted(part) if isinstance(part, str) else part for key, part in kwargs.items()}
        try:
            found.append(load(*parts, **kwargs))
        except ImportError as problem:
            # A process that was ended while it linked has left part of a library ("file too short"), which Inductor
            # would load whenever this graph comes again.
            if problem.path is None or not problem.path.endswith(".so"):
                raise
            Path(problem.path).unlink(missing_ok=True)
            Cache.cache_clear()
            found.append(load(*parts, **kwargs))
        return found[-1]

    Cache.load_pybinding = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        del Cache.load_pybinding


# What costs more to compute than to write down and read again.  Inductor's own list for the CPU is without these: two
# LayerNorms with GELU, forward and backward, had the error function eight times, and took twice as long.
_COSTLY = {"erf", "erfc", "erfinv", "expm1", "lgamma", "pow", "sin", "cos", "tan", "sinh", "cosh", "atan", "atan2"}


@contextlib.contextmanager
def _computed_once() -> Iterator[None]:
    """Within this block a value that took a costly function is kept for its other uses instead of computed for each."""
    from torch._inductor.ir import Pointwise, StorageBox

    usual = StorageBox.should_realize_on_reuse

    def should_realize(self: Any, users: int, **options: Any) -> bool:
        costly = users > 1 and isinstance(self.data, Pointwise) and not _COSTLY.isdisjoint(_functions(self.data))
        return costly or usual(self, users, **options)

    StorageBox.should_realize_on_reuse = should_realize  # type: ignore[method-assign]
    try:
        yield
    finally:
        StorageBox.should_realize_on_reuse = usual  # type: ignore[method-assign]


def _functions(value: Any) -> Any:
    return value.inner_fn_opcount().used_ops


FUNCTIONS = Path(__file__).with_name("functions.h")
_NAMESPACE = "lazytensor"  # of what it defines
_PREFIX = "#include <torch/csrc/inductor/cpp_prefix.h>"  # what it needs


@contextlib.contextmanager
def _fast_functions() -> Iterator[None]:
    """Within this block vectors of floats have our ``exp``, ``tanh`` and ``erf``."""
    from torch._inductor.codegen.cpp import CppVecOverrides

    ours: dict[str, Any] = {
        "exp": lambda x: f"{_NAMESPACE}::exp({x})",
        "erf": lambda x: f"{_NAMESPACE}::erf({x})",
        "tanh": lambda x: f"{_NAMESPACE}::tanh({x})",
        "sigmoid": lambda x: f"decltype({x})(1) / (decltype({x})(1) + {_NAMESPACE}::exp({x}.neg()))",
    }
    usual = {name: CppVecOverrides.__dict__[name] for name in ours}
    for name, function in ours.items():
        function.__name__ = name  # by which Inductor finds the scalar form, where all arguments are scalars
        setattr(CppVecOverrides, name, staticmethod(function))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(CppVecOverrides, name, function)


def no_compiler(device: torch.device | None = None) -> str | None:
    """Why kernels for this device cannot be compiled here, or None if they can."""
    if compiler.find() is None:
        return compiler.MISSING
    if device is not None and device.type != "cpu" and importlib.util.find_spec("triton") is None:
        return f"Triton, in which TorchInductor writes kernels for {device.type.upper()}, is not installed"
    return None
