"""The syntax tree of a function, from its source, if that is the code that runs.

The source is compiled again and must give the same code: a file may have been edited since it was imported.
"""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable

from lazytensor.functions.reads import Refused


@functools.lru_cache(maxsize=512)
def tree_of(function: types.FunctionType) -> ast.FunctionDef:
    """The syntax tree of a function, from its source."""
    code = function.__code__
    try:
        text = textwrap.dedent(inspect.getsource(code))
        tree = ast.parse(text)
    except (OSError, TypeError, SyntaxError, IndentationError) as error:
        raise Refused(f"there is no source of {function.__qualname__}") from error
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef):
        raise Refused(f"{function.__qualname__} is no plain function")
    found.decorator_list.clear()
    if not any(_equal(_compiled(tree, names, code), code) for names in _imported(function)):
        raise Refused(f"the source of {function.__qualname__} is not the code that runs")
    return found


def _imported(function: types.FunctionType) -> Iterable[list[str]]:
    """The names that the function's file may import: calls through such a name are compiled in another way."""
    names = [name for name in function.__code__.co_names if name in function.__globals__]
    yield [name for name in names if isinstance(function.__globals__[name], types.ModuleType)]
    yield []
    yield names


def _compiled(tree: ast.Module, imported: list[str], code: types.CodeType) -> types.CodeType:
    """The code of a function of this tree, in a file with these imports."""
    imports: list[ast.stmt] = [ast.Import([ast.alias(name)], lineno=1, col_offset=0) for name in imported]
    module = ast.fix_missing_locations(ast.Module([*imports, *tree.body], []))
    made = compile(module, code.co_filename, "exec", flags=_future(code), dont_inherit=True)
    return next(c for c in made.co_consts if isinstance(c, types.CodeType) and c.co_name == code.co_name)


def _future(code: types.CodeType) -> int:
    features = (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)
    return sum(flag for flag in features if code.co_flags & flag)


def _equal(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two pieces of code do the same: all but their lines is equal."""
    if one.co_code != other.co_code or len(one.co_consts) != len(other.co_consts):
        return False
    parts = ("co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, part) != getattr(other, part) for part in parts):
        return False
    if (one.co_flags ^ other.co_flags) & ~inspect.CO_NESTED:
        return False
    for number, (a, b) in enumerate(zip(one.co_consts, other.co_consts, strict=True)):
        if number == 0 and isinstance(a, str) and isinstance(b, str):  # the description, which was indented
            if inspect.cleandoc(a) != inspect.cleandoc(b):
                return False
        elif isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
            if not _equal(a, b):
                return False
        elif a.__class__ is not b.__class__ or repr(a) != repr(b):
            return False
    return True
