"""Shape functions: for ops that torch has no shape rule for (`GenLazyShapeInferenceDefinition`).

A structured op, one with a meta kernel and one composed of others needs no function: torch's own rule is asked, on a
miss only.  For each of the rest, and for each that asks for a function of its own, a declaration comes out::

    def compute_shape_nonzero(self: torch.Tensor) -> torch.Tensor: ...

A shape function gets the op's arguments, tensors as meta tensors, and returns what the op returns, as meta tensors.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from torchgen.model import FunctionSchema

from .checks import bound_names, statements
from .classify import annotation, in_order, result_type, safe
from .layout import wrapped
from .module import module
from .natives import nearest
from .plan import Plan
from .yaml_document import Problem


@dataclass(frozen=True)
class Declaration:
    """One shape function that has to be written."""

    name: str
    schema: FunctionSchema
    op: str
    line: int
    required: bool  # asked for by the YAML; the others only keep their op from falling back

    def text(self) -> str:
        """The declaration, ready to be filled in."""
        runtime_types = [f"{safe(a.name)}: {_meta(annotation(a.type))}" for a in in_order(self.schema)]
        line = f"def {self.name}({', '.join(runtime_types)}) -> {result_type(self.schema)}: ..."
        return "\n".join(wrapped(line))


class GenLazyShapeInferenceDefinition:
    """Finds the shape functions that a plan needs, and writes their declarations."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def declarations(self) -> list[Declaration]:
        """Each function once, in the order of the YAML."""
        found: dict[str, Declaration] = {}
        for op in self.plan.ops:
            if op.shape_function is not None and op.function is not None:
                name = op.function.func.name
                line = self.plan.parsed.lines[name]
                required = op.shape.endswith("by hand")
                entry = Declaration(op.shape_function, op.function.func, op.name, line, required)
                found.setdefault(op.shape_function, entry)
        return list(found.values())

    def check(self, path: str | os.PathLike[str] | None) -> list[Problem]:
        """What is missing from the file of shape functions: one problem that lists exactly the declarations to add."""
        file = self.plan.parsed.file
        wanted = self.declarations()
        if path is None:
            wanted = [d for d in wanted if d.required]
            where, defined = "a file given by --shape-inference", set[str]()
        else:
            where = os.fspath(path)
            body = statements(where, "shape functions")
            if isinstance(body, Problem):
                return [body]
            defined = set(bound_names(body))
        missing = [d for d in wanted if d.name.partition(".")[0] not in defined]
        if not missing:
            return []
        declarations = "\n".join(f"    {line}" for d in missing for line in d.text().split("\n"))
        text = f"missing shape inference function; add to {where}:\n{declarations}"
        return [Problem(file, missing[0].line, text, nearest(missing[0].name, defined))]

    def stubs(self, yaml: str) -> str:
        """`shape_stubs.py`: what to copy to the file of shape functions, for ops that otherwise fall back."""
        body: list[str] = []
        for declaration in self.declarations():
            header = declaration.text().removesuffix(" ...")
            reason = f'"{declaration.op} has no shape rule"'
            body += ["", "", *header.split("\n"), f'    """The shapes of {declaration.schema.name}."""']
            body += [f"    raise NotImplementedError({reason})"]
        doc = (
            f"Shape functions that {self.plan.backend_name} lacks: fill them in, and give them as --shape-inference.\n"
            "\n"
            "Each gets meta tensors and returns meta tensors. Until then these ops fall back."
        )
        return module(doc, body, yaml)


def _meta(kind: str) -> str:
    return kind.replace("LazyTensor", "torch.Tensor").replace("Scalar", "complex")
