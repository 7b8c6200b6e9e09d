"""One op from YAML to kernel: its schema, node, kernel, shape rule and lowering, as text."""

from __future__ import annotations

import os
from collections.abc import Iterator

from .backend_yaml import parse_backend_yaml
from .gen_functions import write_kernels
from .gen_nodes import GenTSLazyIR
from .generate import SOURCE, device_kernels
from .kernels import Kernel
from .layout import INDENT
from .natives import load_native_functions
from .plan import OpPlan, Plan, make_plan
from .yaml_document import CodegenErrors, Problem


def show(name: str, source_yaml: str | os.PathLike[str] | None = None) -> str:
    """What is generated for one op, by a backend's YAML or by the device's own."""
    path = os.fspath(source_yaml) if source_yaml is not None else os.fspath(SOURCE)
    natives = load_native_functions()
    function = natives.find(name)
    if function is None:
        raise CodegenErrors([Problem(path, None, f"there is no operator {name}", natives.nearest(name))])
    parsed = parse_backend_yaml(path)
    plan = make_plan(parsed, "ltc" if source_yaml is None else None)
    text = str(function.func.name)
    op = next((op for op in plan.ops if op.name == text), None)
    sections = {"schema": str(function.func), "YAML": _entry(plan, op, text)}
    if op is not None:
        sections |= _parts(plan, op, source_yaml is None)
    return "\n\n".join(f"{title}\n{_indented(body)}" for title, body in sections.items())


def _entry(plan: Plan, op: OpPlan | None, name: str) -> str:
    parsed = plan.parsed
    function = load_native_functions().find(name)
    assert function is not None
    if op is not None:
        return f"{op.section}, line {parsed.lines[function.func.name]} of {parsed.file}"
    reason = parsed.exclusions.get(function.func.name)
    if reason is not None:
        return f"excluded: {reason}"
    if function.has_composite_implicit_autograd_kernel:
        return "not needed: PyTorch composes it of other ops"
    return "not in this YAML: the device's own kernel takes it"


def _parts(plan: Plan, op: OpPlan, device: bool) -> dict[str, str]:
    found: dict[str, str] = {}
    if op.node is not None:
        lines = GenTSLazyIR().write(op.node)
        at = next(i for i, line in enumerate(lines) if line.lstrip().startswith("def lower"))
        found["node"] = "\n".join(lines[: at - 1])
    if op.section == "full_codegen":
        kernels = device_kernels(plan.parsed)[0] if device else write_kernels(plan)[0]
        found["kernel"] = _kernel(kernels, op.name)
        found["shape rule"] = op.shape
        if not device and op.counter:
            found["counter"] = op.counter
    elif op.kernel is not None:
        found["kernel"] = f"{op.kernel}, written by hand"
    if op.node is not None:
        found["lowering"] = "\n".join(line.removeprefix(INDENT) for line in lines[at:])
    return found


def _kernel(kernels: list[Kernel], name: str) -> str:
    return next(k.source() for k in kernels if k.name == name).rstrip("\n")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" if line else line for line in _lines(text))


def _lines(text: str) -> Iterator[str]:
    yield from text.split("\n")
