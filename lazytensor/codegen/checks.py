"""The files that a YAML depends on: the hand-written kernels and shape functions must be there, each once."""

from __future__ import annotations

import ast
import os
from collections import Counter
from pathlib import Path

from .backend_yaml import ParsedExternalYaml
from .natives import load_native_functions, nearest
from .yaml_document import CodegenErrors, Problem

def check_kernels(parsed: ParsedExternalYaml, impl_path: str | os.PathLike[str]) -> None:
    """Raise `CodegenErrors` unless the Python file at `impl_path` defines each hand-written kernel exactly once.

    A kernel is what the module, or its class `class_name`, binds to the name in the backend index.
    """
    impl = os.fspath(impl_path)
    try:
        body = ast.parse(Path(impl).read_text(encoding="utf-8"), impl).body
    except (OSError, UnicodeDecodeError) as error:
        raise CodegenErrors([Problem(impl, None, f"the file of kernels cannot be read: {error}")]) from error
    except SyntaxError as error:
        raise CodegenErrors([Problem(impl, error.lineno, f"the file of kernels is not Python: {error.msg}")]) from error
    body += [s for c in body if isinstance(c, ast.ClassDef) and c.name == parsed.class_name for s in c.body]
    found = Counter(name for statement in body for name in _bound(statement))
    functions = load_native_functions().functions
    errors = []
    for key in filter(None, (parsed.backend_key, parsed.autograd_key)):
        for op, metadata in parsed.backend_indices[key].index.items():
            kernel, count = metadata.kernel, found[metadata.kernel]
            if op not in parsed.full_codegen and count != 1:
                text = f"{op} needs one kernel {kernel} in {impl}, which has {count}, for {functions[op].func}"
                errors.append(Problem(parsed.file, parsed.lines[op], text, None if count else nearest(kernel, found)))
    if errors:
        raise CodegenErrors(errors)


def _bound(statement: ast.stmt) -> list[str]:
    """The names that a statement could give to a kernel."""
    if isinstance(statement, ast.Assign):
        return [target.id for target in statement.targets if isinstance(target, ast.Name)]
    if isinstance(statement, ast.ImportFrom):
        return [alias.asname or alias.name for alias in statement.names]
    return [statement.name] if isinstance(statement, ast.FunctionDef) else []
