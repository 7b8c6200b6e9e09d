"""The operator schemas of the installed torch, read once and found by name.

torchgen ships torch's own `native_functions.yaml`; this module has it parsed, adds the functional and out= variants that
torch generates from it, and answers the three questions a backend's YAML asks: does this name exist, what does this
pattern match, and what was probably meant.
"""

from __future__ import annotations

import difflib
import functools
import gc
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torchgen  # type: ignore[import-untyped,unused-ignore]
from torchgen.gen import (  # type: ignore[import-untyped,unused-ignore]
    get_grouped_native_functions,
    parse_native_yaml,
)
from torchgen.model import (  # type: ignore[import-untyped,unused-ignore]
    BackendIndex,
    DispatchKey,
    NativeFunction,
    NativeFunctionsGroup,
    OperatorName,
)


@dataclass(frozen=True, eq=False)
class Natives:
    """Every native operator of the installed torch, in the order of its own YAML, and the kernels torch has for them."""

    functions: Mapping[OperatorName, NativeFunction]
    backend_indices: Mapping[DispatchKey, BackendIndex]

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
        """The function called `name`, with or without the `aten::` prefix."""
        return self.by_text.get(name.removeprefix("aten::"))

    def matching(self, pattern: str) -> list[NativeFunction]:
        """The functions whose name, overload included, matches a shell-style pattern."""
        pattern = pattern.removeprefix("aten::")
        return [function for name, function in self.by_text.items() if fnmatchcase(name, pattern)]

    def nearest(self, name: str) -> str | None:
        """The existing name that `name` was probably meant to be.

        A known operator with a missing or wrong overload is answered with one of that operator's own overloads: `add`
        means `add.Tensor`, although `addr` is spelled more like it.
        """
        name = name.removeprefix("aten::")
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
