"""The operator schemas of the installed torch, read once and found by name.

torchgen ships torch's own `native_functions.yaml`; this module has it parsed, adds the functional and out= variants
that torch generates from it, and answers the three questions a backend's YAML asks: does this name exist, what does
this pattern match, and what was probably meant.
"""

from __future__ import annotations

import difflib
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path

import torch
import torchgen  # type: ignore[import-untyped,unused-ignore]
from torchgen.gen import (  # type: ignore[import-untyped,unused-ignore]
    get_grouped_native_functions,
    parse_native_yaml,
)
from torchgen.model import (  # type: ignore[import-untyped,unused-ignore]
    BackendIndex,
    BaseOperatorName,
    DispatchKey,
    Location,
    NativeFunction,
    NativeFunctionsGroup,
    OperatorName,
)

from .schema import SchemaError


@dataclass(frozen=True)
class QualifiedName(OperatorName):  # type: ignore[misc,unused-ignore]
    """The name of an operator of another namespace than `aten`, which may well be called like one of torch's own."""

    namespace: str = ""

    def __str__(self) -> str:
        return f"{self.namespace}::{OperatorName.__str__(self)}"

    def unambiguous_name(self) -> str:
        """The name as a Python identifier."""
        return f"{self.namespace}_{OperatorName.unambiguous_name(self)}"


def qualified(name: OperatorName | str) -> str:
    """The name with its namespace: `aten::add.Tensor`."""
    text = str(name)
    return text if "::" in text else f"aten::{text}"


@dataclass(frozen=True, eq=False)
class Natives:
    """Every native operator of the installed torch, in the order of its own YAML, and torch's kernels for them."""

    functions: Mapping[OperatorName, NativeFunction]
    backend_indices: Mapping[DispatchKey, BackendIndex]
    loaded: dict[str, NativeFunction] = field(default_factory=dict)  # what torch's YAML lacks and its dispatcher has

    @functools.cached_property
    def by_text(self) -> dict[str, NativeFunction]:
        """The same functions, keyed by the text of their name: `add.Tensor`."""
        return {str(name): function for name, function in self.functions.items()}

    @functools.cached_property
    def groups(self) -> tuple[NativeFunction | NativeFunctionsGroup, ...]:
        """The functions with the functional, in-place, out= and mutable variants of one operator put together."""
        with _collector_paused():
            return tuple(get_grouped_native_functions(list(self.functions.values())))

    def find(self, name: str) -> NativeFunction | None:
        """The function called `name`, with or without the `aten::` prefix, or a loaded library's: `mylib::op`."""
        name = name.removeprefix("aten::")
        found = self.by_text.get(name) or self.loaded.get(name)
        if found is None:
            found = _from_dispatcher(name)
            if found is not None:
                self.loaded[name] = found
        return found

    def function(self, name: OperatorName) -> NativeFunction:
        """The function of a name that :meth:`find` has given."""
        return self.functions.get(name) or self.loaded[str(name)]

    def matching(self, pattern: str) -> list[NativeFunction]:
        """The functions whose name, overload included, matches a shell-style pattern."""
        pattern = pattern.removeprefix("aten::")
        if "::" in pattern:
            names = sorted(name for name in torch._C._dispatch_get_all_op_names() if fnmatchcase(name, pattern))
            return [function for name in names if (function := self.find(name)) is not None]
        return [function for name, function in self.by_text.items() if fnmatchcase(name, pattern)]

    def nearest(self, name: str) -> str | None:
        """The existing name that `name` was probably meant to be.

        A known operator with a missing or wrong overload is answered with one of that operator's own overloads: `add`
        means `add.Tensor`, although `addr` is spelled more like it.
        """
        name = name.removeprefix("aten::")
        if "::" in name:
            return nearest(name, torch._C._dispatch_get_all_op_names())
        base, _, overload = name.partition(".")
        siblings = [text for text in self.by_text if text.partition(".")[0] == base]
        if siblings:
            return (nearest(name, siblings) if overload else None) or siblings[0]
        return nearest(name, self.by_text)


def nearest(word: str, options: Iterable[str]) -> str | None:
    """The option most like `word`, upper and lower case being the same, or None when nothing is like it."""
    folded = {option.casefold(): option for option in options}
    close = difflib.get_close_matches(word.casefold(), folded, n=1)
    return folded[close[0]] if close else None


def _from_dispatcher(name: str) -> NativeFunction | None:
    """An operator that a library has defined in this process, as if torch's YAML had it."""
    full, _, overload = name.partition(".")
    namespace, _, base = full.partition("::")
    if not base or name not in torch._C._dispatch_get_all_op_names():
        return None
    schema = str(torch._C._get_schema(full, overload)).removeprefix(f"{namespace}::")
    # An explicit kernel says that the operator is not composed of others; torch finds the real one.
    entry: dict[str, object] = {"func": schema, "dispatch": {"CompositeExplicitAutograd": "of_its_library"}}
    tags = {str(tag).removeprefix("Tag.") for tag in getattr(getattr(torch.ops, namespace), base).default.tags}
    tags |= {"nondeterministic_seeded"} if "Generator" in schema else set()
    try:
        function, _ = NativeFunction.from_yaml(entry | {"tags": sorted(tags)}, Location(namespace, 0), tags)
        op = function.func.name
        named = QualifiedName(BaseOperatorName.parse(str(op.name)), op.overload_name, namespace)
        return replace(function, func=replace(function.func, name=named), namespace=namespace)
    except (AssertionError, RuntimeError, ValueError, LookupError) as error:  # what torchgen's parser trips over
        raise SchemaError(f"the schema {namespace}::{schema} cannot be read ({error})") from error


@functools.cache
def load_native_functions() -> Natives:
    """Parse torch's own schemas. The first call costs about a second; later ones return the same object."""
    folder = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    with _collector_paused():
        parsed = parse_native_yaml(str(folder / "native_functions.yaml"), str(folder / "tags.yaml"))
    return Natives({f.func.name: f for f in parsed.native_functions}, dict(parsed.backend_indices))


@contextmanager
def _collector_paused() -> Iterator[None]:
    # Parsing makes some 10^5 objects that all stay alive; scanning them again and again takes a third of its time.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
