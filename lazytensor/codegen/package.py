"""From a backend's YAML to its package: parse, check everything, then write all files or none."""

from __future__ import annotations

import ast
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .backend_yaml import ParsedExternalYaml, parse_backend_yaml
from .checks import bound_names, file_problems, kernel_problems
from .gen_functions import native_functions_module
from .gen_nodes import GenLazyIR, GenTSLazyIR, nodes_module, non_native_module
from .gen_registration import handwritten_module, registration_module
from .gen_shapes import GenLazyShapeInferenceDefinition
from .module import module
from .plan import NodePlan, Plan, make_plan
from .yaml_document import CodegenErrors, Problem

TABLE = "ops.json"


@dataclass(frozen=True)
class Written:
    """One file of a package, and what became of it: written, changed, unchanged or only planned."""

    path: Path
    state: str
    lines: int


@dataclass(frozen=True)
class Result:
    """What a run made."""

    plan: Plan
    files: tuple[Written, ...]
    warnings: tuple[Problem, ...]
    dry_run: bool

    @property
    def unchanged(self) -> bool:
        """Whether every file was there already as it should be."""
        return all(file.state == "unchanged" for file in self.files)

    @property
    def counts(self) -> dict[str, int]:
        """How much there is of each kind of thing."""
        ops = self.plan.ops
        return {
            "node classes": len(self.plan.nodes),
            "non-native nodes": len(self.plan.non_native),
            "generated kernels": sum(op.section == "full_codegen" for op in ops),
            "hand-written kernels": sum(op.section in ("supported", "autograd") for op in ops),
            "excluded ops": len(self.plan.parsed.exclusions),
        }

    def summary(self) -> Iterator[str]:
        """What was written, in lines."""
        yield ", ".join(f"{count} {what}" for what, count in self.counts.items() if count)
        for file in self.files:
            yield f"{file.state:>9}  {file.path}  ({file.lines} lines)"
        if self.unchanged:
            yield "unchanged"
        elif self.dry_run:
            yield "nothing was written"


def run(
    source_yaml: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    dry_run: bool = False,
    impl_path: str | os.PathLike[str] | None = None,
    shape_inference: str | os.PathLike[str] | None = None,
    node_base: str | None = None,
    backend_name: str | None = None,
    gen_ts_lowerings: bool = True,
) -> Result:
    """Generate a backend's package (`run_gen_lazy_tensor`).  Raises `CodegenErrors`, and then nothing is written."""
    output = Path(output_dir)
    plan, warnings, files = generate_package(
        source_yaml,
        output,
        impl_path=impl_path,
        shape_inference=shape_inference,
        node_base=node_base,
        backend_name=backend_name,
        gen_ts_lowerings=gen_ts_lowerings,
    )
    written = []
    for name, text in files.items():
        path = output / name
        before = path.read_text(encoding="utf-8") if path.is_file() else None
        state = "unchanged" if before == text else "written" if before is None else "changed"
        if dry_run and state != "unchanged":
            state = "planned"
        elif state != "unchanged":
            output.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        written.append(Written(path, state, text.count("\n")))
    return Result(plan, tuple(written), warnings, dry_run)


def generate_package(
    source_yaml: str | os.PathLike[str],
    output: Path,
    *,
    impl_path: str | os.PathLike[str] | None = None,
    shape_inference: str | os.PathLike[str] | None = None,
    node_base: str | None = None,
    backend_name: str | None = None,
    gen_ts_lowerings: bool = True,
) -> tuple[Plan, tuple[Problem, ...], dict[str, str]]:
    """The plan, what is worth a warning, and the text of every file by name."""
    yaml = Path(source_yaml).name
    try:
        parsed = parse_backend_yaml(source_yaml)
    except CodegenErrors as errors:
        raise CodegenErrors([*errors.errors, *file_problems(impl_path, shape_inference)]) from None
    plan = make_plan(parsed, backend_name)
    shapes = GenLazyShapeInferenceDefinition(plan)
    problems = _argument_problems(parsed, node_base, backend_name)
    problems += kernel_problems(parsed, impl_path, plan) if impl_path is not None else []
    problems += shapes.check(shape_inference)
    if problems:
        raise CodegenErrors(problems)
    generator = (GenTSLazyIR if gen_ts_lowerings else GenLazyIR)(node_base)
    impl = os.fspath(impl_path) if impl_path is not None else None
    rules = os.fspath(shape_inference) if shape_inference is not None else None
    files = {
        "__init__.py": _init(plan, yaml),
        "handwritten.py": handwritten_module(plan, yaml, os.fspath(output), impl, rules),
        "nodes.py": nodes_module(plan, generator, yaml),
        "non_native.py": non_native_module(plan, generator, yaml),
        "native_functions.py": native_functions_module(plan, yaml),
        "registration.py": registration_module(plan, yaml, _shape_functions(plan, rules)),
        TABLE: op_table(plan),
    }
    lacking = shapes.declarations() if rules is None else []
    if lacking:
        files["shape_stubs.py"] = shapes.stubs(yaml)
    return plan, (*parsed.warnings, *_warnings(plan, lacking)), files


def _argument_problems(parsed: ParsedExternalYaml, node_base: str | None, backend_name: str | None) -> list[Problem]:
    found = []
    if node_base is not None and ("." not in node_base.replace(":", ".") or not _dotted(node_base)):
        text = f"--node-base must name a class with its module, such as my_backend.base.MyNode, not {node_base}"
        found.append(Problem(parsed.file, None, text))
    if backend_name is not None and not backend_name.isidentifier():
        found.append(Problem(parsed.file, None, f"--backend-name must be a Python identifier, not {backend_name}"))
    return found


def _dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.replace(":", ".").split("."))


def _shape_functions(plan: Plan, rules: str | None) -> dict[NodePlan, str]:
    """The nodes whose shapes a hand-written function computes; for one of the backend's own, if there is a function."""
    if rules is None:
        return {}
    defined = set(bound_names(ast.parse(Path(rules).read_text(encoding="utf-8")).body))
    found: dict[NodePlan, str] = {}
    for op in plan.ops:
        if op.shape_function is not None and op.node is not None and op.kind.name == "functional":
            found[op.node] = op.shape_function
    for node in plan.non_native:
        if f"compute_shape_{node.kernel}" in defined:
            found[node] = f"compute_shape_{node.kernel}"
    return found


def _warnings(plan: Plan, lacking: list[Any]) -> Iterator[Problem]:
    parsed = plan.parsed
    for declaration in lacking:
        text = f"{declaration.op} has no shape rule, so it falls back; see shape_stubs.py"
        yield Problem(parsed.file, declaration.line, text)
    for op in plan.ops:
        if op.section == "full_codegen" and op.kind.name == "fallback" and op.function is not None:
            text = f"{op.name} always falls back: {op.kind.reason}"
            yield Problem(parsed.file, parsed.lines[op.function.func.name], text)


def _init(plan: Plan, yaml: str) -> str:
    name = plan.backend_name
    doc = f"""The backend {name} on ltc, generated.

`register()` puts its kernels in force and `unregister()` takes them back; `nodes` and `non_native` hold the classes of
what they record, and `{TABLE}` lists every op."""
    body = ['__all__ = ["nodes", "non_native", "register", "unregister"]']
    text = module(doc, body, yaml)
    imports = "from . import nodes, non_native\nfrom .registration import register, unregister\n"
    return text.replace("\n__all__", f"\n{imports}\n__all__")


def op_table(plan: Plan) -> str:
    """The table of all ops as JSON, for documentation: op, kind, node, kernel, shape rule and counter."""
    rows = [
        {
            "op": op.name if "::" in op.name else f"aten::{op.name}",
            "section": op.section,
            "kind": op.kind.name if op.section in ("full_codegen", "ir_gen") else "by hand",
            "kernel": op.kernel,
            "node": op.node.class_name if op.node else None,
            "shape": op.shape or None,
            "counter": op.counter,
        }
        for op in plan.ops
    ]
    rows += [
        {
            "op": node.target,
            "section": "non_native",
            "kind": "non-native",
            "kernel": f"lower_{node.kernel}",
            "node": node.class_name,
            "shape": "its meaning, on meta tensors",
            "counter": None,
        }
        for node in plan.non_native
    ]
    rows += [
        {"op": f"aten::{op}", "section": "exclude", "kind": "excluded", "reason": reason}
        for op, reason in plan.parsed.exclusions.items()
    ]
    index = plan.parsed.backend_indices[plan.parsed.backend_key]
    head = {
        "backend": plan.backend_name,
        "key": index.dispatch_key.name,
        "class": plan.parsed.class_name,
        "use_out_as_primary": index.use_out_as_primary,
        "device_guard": index.device_guard,
    }
    return json.dumps({**head, "ops": rows}, indent=1) + "\n"
