"""One YAML file read node by node, so that every problem is noted with its line instead of stopping at the first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml  # type: ignore[import-untyped,unused-ignore]
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode  # type: ignore[import-untyped,unused-ignore]

from .natives import nearest
from .schema import LazyIrProperties, SchemaError

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong, and where."""

    file: str
    line: int | None
    text: str
    suggestion: str | None = None

    def __str__(self) -> str:
        where = self.file if self.line is None else f"{self.file}:{self.line}"
        return f"{where}: {self.text}" + (f"; did you mean {self.suggestion}?" if self.suggestion else "")


class CodegenErrors(Exception):
    """Raised when a backend's YAML, or a file it depends on, is wrong: `errors` has every problem, in file order."""

    def __init__(self, errors: Iterable[Problem]) -> None:
        self.errors = sorted(errors, key=lambda problem: problem.line or 0)
        super().__init__("\n".join(map(str, self.errors)))


@dataclass
class Document:
    """One YAML file, and what was found wrong with it so far."""

    file: str
    errors: list[Problem] = field(default_factory=list, init=False)
    warnings: list[Problem] = field(default_factory=list, init=False)

    def error(self, line: int, text: str, suggestion: str | None = None) -> None:
        """Note a problem."""
        problem = Problem(self.file, line, text, suggestion)
        if problem not in self.errors:  # one entry may be wrong for each of the many operators it takes
            self.errors.append(problem)

    def load(self) -> Node:
        """The root of the file, which must be a mapping."""
        try:
            text = Path(self.file).read_text(encoding="utf-8")
            root = yaml.compose(text, _LOADER)  # type: ignore[no-untyped-call,unused-ignore]
        except (OSError, UnicodeDecodeError) as error:
            raise CodegenErrors([Problem(self.file, None, f"the file cannot be read: {error}")]) from error
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else None
            raise CodegenErrors([Problem(self.file, line, f"not YAML: {error.problem}")]) from error
        if not isinstance(root, MappingNode):
            text = f'the file must be a mapping with keys such as "backend" and "full_codegen", not {shown(root)}'
            raise CodegenErrors([Problem(self.file, 1, text)])
        return root

    def pairs(self, mapping: Node) -> dict[str, tuple[int, Node]]:
        """The line and the value of each key."""
        found: dict[str, tuple[int, Node]] = {}
        for key, value in mapping.value:
            name = key.value if isinstance(key, ScalarNode) else shown(key)
            if name in found:
                self.error(line_of(key), f'"{name}" is given twice, first on line {found[name][0]}')
            found.setdefault(name, (line_of(key), value))
        return found

    def fields(self, mapping: Node, allowed: tuple[str, ...]) -> dict[str, Node]:
        """The values of the allowed keys; any other key is a problem."""
        pairs = self.pairs(mapping)
        for name, (line, _) in pairs.items():
            if name not in allowed:
                keys = ", ".join(allowed)
                self.error(line, f'unexpected key "{name}"; the keys are {keys}', nearest(name, allowed))
        return {name: value for name, (_, value) in pairs.items() if name in allowed}

    def text(self, keys: Mapping[str, Node], key: str, needed: str = "", within: Node | None = None) -> str:
        """A text; what is `needed` must be there."""
        node = keys.get(key)
        value = string_of(node)
        if value is None and not is_empty(node):
            self.error(line_of(node), f'"{key}" must be text, not {shown(node)}')
        elif needed and not (value or "").strip():
            self.error(line_of(node or within), f'"{key}" is missing or empty: {needed}')
        return (value or "").strip()

    def flag(self, keys: Mapping[str, Node], key: str) -> bool:
        """True or false, and false when it is not there."""
        node = keys.get(key)
        if node is not None and not _has_tag(node, "bool"):
            self.error(line_of(node), f'"{key}" must be true or false, not {shown(node)}')
        return node is not None and str(node.value).lower() in ("true", "yes", "on")

    def items(self, keys: Mapping[str, Node], key: str, of: str) -> list[Node]:
        """The items of a list."""
        node = keys.get(key)
        if isinstance(node, SequenceNode):
            return list(node.value)
        if not is_empty(node):
            self.error(line_of(node), f'"{key}" must be a list of {of}, not {shown(node)}')
        return []

    def names(self, keys: Mapping[str, Node], key: str) -> dict[str, int]:
        """Each name of a list, with its line."""
        found = {}
        for item in self.items(keys, key, "names"):
            name = string_of(item)
            if name:
                found[name] = line_of(item)
            else:
                self.error(line_of(item), f'"{key}" must be a list of names, and {shown(item)} is not one')
        return found

    def properties(self, keys: Mapping[str, Node], default: LazyIrProperties) -> LazyIrProperties:
        """The defaults, changed by what `properties` asks for."""
        asked, valid = self.names(keys, "properties"), LazyIrProperties.names()
        for name, line in asked.items():
            if name not in valid:
                self.error(line, f"there is no property {name}", nearest(name, valid))
        try:
            return default.with_(name for name in asked if name in valid)
        except SchemaError as error:
            self.error(line_of(keys["properties"]), str(error))
            return default


def line_of(node: Node | None) -> int:
    """The line on which a node begins."""
    return 1 if node is None else int(node.start_mark.line) + 1


def _has_tag(node: Node | None, kind: str) -> bool:
    return isinstance(node, ScalarNode) and node.tag == f"tag:yaml.org,2002:{kind}"


def is_empty(node: Node | None) -> bool:
    """Whether nothing stands there."""
    return node is None or _has_tag(node, "null")


def string_of(node: Node | None) -> str | None:
    """The text, if the node is one."""
    return str(node.value) if isinstance(node, ScalarNode) and _has_tag(node, "str") else None


def shown(node: Node | None) -> str:
    """What stands there, for a message."""
    if isinstance(node, (SequenceNode, MappingNode)):
        return "a list" if isinstance(node, SequenceNode) else "a mapping"
    return repr(node.value) if isinstance(node, ScalarNode) else "nothing"
