"""The file of hand-written kernels that a YAML depends on: each function must be there, once."""

from __future__ import annotations

import ast
import os
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from .backend_yaml import ParsedExternalYaml
from .natives import load_native_functions, nearest
from .yaml_document import CodegenErrors, Problem

if TYPE_CHECKING:
    from .plan import Plan


def check_kernels(parsed: ParsedExternalYaml, impl_path: str | os.PathLike[str]) -> None:
    """Raise `CodegenErrors` unless the Python file at `impl_path` defines each hand-written kernel exactly once.

    A kernel is what the module, or its class `class_name`, binds to the name in the backend index.
    """
    problems = kernel_problems(parsed, impl_path)
    if problems:
        raise CodegenErrors(problems)


def kernel_problems(
    parsed: ParsedExternalYaml, impl_path: str | os.PathLike[str], plan: Plan | None = None
) -> list[Problem]:
    """What is wrong with the file of kernels; with a plan, what its nodes leave to be written by hand counts too."""
    impl = os.fspath(impl_path)
    body = statements(impl, "kernels")
    if isinstance(body, Problem):
        return [body]
    body += [s for c in body if isinstance(c, ast.ClassDef) and c.name == parsed.class_name for s in c.body]
    found = Counter(bound_names(body))
    natives = load_native_functions()
    errors = []
    for key in filter(None, (parsed.backend_key, parsed.autograd_key)):
        for op, metadata in parsed.backend_indices[key].index.items():
            kernel, count = metadata.kernel, found[metadata.kernel]
            if op not in parsed.full_codegen and count != 1:
                text = f"{op} needs one kernel {kernel} in {impl}, which has {count}, for {natives.function(op).func}"
                errors.append(Problem(parsed.file, parsed.lines[op], text, None if count else nearest(kernel, found)))
    for node in (*plan.nodes, *plan.non_native) if plan is not None else ():
        properties = node.schema.properties
        wanted = [f"lower_{node.kernel}"] if node.own else []
        wanted += [f"create_{node.kernel}"] if properties.CreateFnDeclOnly else []
        wanted += [f"can_be_reused_{node.kernel}"] if properties.CanBeReusedDeclOnly else []
        for name in wanted:
            if found[name] != 1:
                text = f"{node.schema.name} needs one function {name} in {impl}, which has {found[name]}"
                line = parsed.lines.get(node.schema.name)
                errors.append(Problem(parsed.file, line, text, None if found[name] else nearest(name, found)))
    return errors


def statements(path: str, what: str) -> list[ast.stmt] | Problem:
    """The statements of a Python file, or what keeps it from being read."""
    try:
        return ast.parse(Path(path).read_text(encoding="utf-8"), path).body
    except (OSError, UnicodeDecodeError) as error:
        return Problem(path, None, f"the file of {what} cannot be read: {error}")
    except SyntaxError as error:
        return Problem(path, error.lineno, f"the file of {what} is not Python: {error.msg}")


def file_problems(
    impl_path: str | os.PathLike[str] | None, shape_inference: str | os.PathLike[str] | None
) -> list[Problem]:
    """What keeps the files written by hand from being read."""
    files = {"kernels": impl_path, "shape functions": shape_inference}
    read = [statements(os.fspath(path), what) for what, path in files.items() if path is not None]
    return [problem for problem in read if isinstance(problem, Problem)]


def bound_names(body: Iterable[ast.stmt]) -> list[str]:
    """The names that statements could give to functions, as often as they do."""
    return [name for statement in body for name in _bound(statement)]


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in statement.names]
    return [statement.name] if isinstance(statement, ast.FunctionDef) else []
