"""What generated code needs at run time beside the device's own runtime: types, hand-written functions, registration.

Nothing here imports torchgen or yaml.
"""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace import record, source, tensors
from lazytensor.trace.ir import Const, Number, const

create: Any = tensors.create
Scalar = Any  # a Python number, or the leaf that it was lifted to

if TYPE_CHECKING:

    class LazyTensor(torch.Tensor):
        """A tensor of ltc as its kernels see it."""

        _lt: Any

else:
    LazyTensor = torch.Tensor

# The ops whose generated kernels run eagerly, by name: what `torch._lazy.config.set_force_fallback` says.
forced: set[str] = set()


@contextmanager
def force_fallback(*names: str) -> Iterator[None]:
    """Let the generated kernels of these ops (`aten::add.Tensor`) run eagerly for a block."""
    added = {name if "::" in name else f"aten::{name}" for name in names} - forced
    forced.update(added)
    try:
        yield
    finally:
        forced.difference_update(added)


class HandWritten:
    """The functions of a file written by hand, loaded when the first of them is needed."""

    def __init__(self, path: str, beside: str, class_name: str = "") -> None:
        self._path = (Path(beside).parent / path).resolve() if path else None
        self._class_name = class_name
        self._module: ModuleType | None = None

    def find(self, name: str) -> Callable[..., Any] | None:
        """The function of this name, in the module or in its class of kernels; None if there is none."""
        if self._path is None:
            return None
        if self._module is None:
            spec = importlib.util.spec_from_file_location(self._path.stem, self._path)
            if spec is None or spec.loader is None or not self._path.is_file():
                raise FileNotFoundError(f"{self._path}, where {name} should be, cannot be loaded as a Python file")
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            source.skip(str(self._path))
            self._module = module
        holder = getattr(self._module, self._class_name, None) if self._class_name else None
        found: Callable[..., Any] | None = getattr(self._module, name, None) or getattr(holder, name, None)
        return found

    def __call__(self, name: str) -> Callable[..., Any]:
        """A function that is looked up when it is first called."""

        def call(*args: Any, **kwargs: Any) -> Any:
            found = self.find(name)
            if found is None:
                where = self._path or "a file given by --impl-path"
                raise NotImplementedError(f"{name} has to be written by hand, in {where}")
            return found(*args, **kwargs)

        call.__name__ = name
        call.exists = lambda: self.find(name) is not None  # type: ignore[attr-defined]
        return call


def number(value: Any, default: Any = None) -> Any:
    """A number as an operand: the default stays itself, any other is lifted to run time."""
    if value is None or isinstance(value, Number | Const):
        return value
    if type(value) is type(default) and value == default:
        return value
    from lazytensor.trace.storage import lift

    return lift(value)


def constant(value: Any) -> Any:
    """A number as part of the structure."""
    return value if value is None or isinstance(value, Number | Const) else const(value)


def cached(shape: Callable[..., Any]) -> Callable[..., Any]:
    """A shape function that is asked once for each geometry of its arguments (`ShapeCache`)."""
    known: dict[Any, Any] = {}

    def geometry(argument: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return tuple(argument.shape), argument.stride(), argument.dtype
        if isinstance(argument, list | tuple):
            return tuple(map(geometry, argument))
        return type(argument), argument

    @functools.wraps(shape)
    def ask(*args: Any, **kwargs: Any) -> Any:
        key = (geometry(args), tuple((k, geometry(v)) for k, v in kwargs.items()))
        if key not in known:
            known[key] = shape(*args, **kwargs)
        return known[key]

    return ask


@contextmanager
def replacing() -> Iterator[None]:
    """Take the place of registered kernels, without PyTorch's warning that somebody does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel")
        yield


class Registration:
    """A backend's kernels on ltc, from :meth:`register` to :meth:`unregister`.

    While they are registered they take the place of the device's own kernels for the same ops; every other op keeps
    the device's.  Both record into the same trace.  ``tables`` maps a dispatch key to the kernels by qualified op name.
    """

    def __init__(self, name: str, tables: Callable[[], Mapping[str, Mapping[str, Callable[..., Any]]]]) -> None:
        self.name = name
        self._tables = tables
        self._libraries: list[Any] = []

    @property
    def registered(self) -> bool:
        """Whether the kernels are in force."""
        return bool(self._libraries)

    def register(self) -> None:
        """Put the kernels in force; a second call does nothing."""
        if self._libraries:
            return
        import lazytensor  # noqa: F401  (the device has to be there first)
        from lazytensor.device import threads

        if self._again not in threads.on_lock:
            threads.on_lock.append(self._again)
        tables = self._tables()
        kernels = [kernel for table in tables.values() for kernel in table.values()]
        missing = [k.__name__ for k in kernels if hasattr(k, "exists") and not k.exists()]
        if missing:
            raise NotImplementedError(
                f"the backend {self.name} cannot be registered: {', '.join(missing)} must be written by hand; "
                "generate it with --impl-path, which lists what is missing"
            )
        libraries: dict[str, Any] = {}
        try:
            for key, table in tables.items():
                for name, kernel in table.items():
                    namespace = name.partition("::")[0]
                    if namespace not in libraries:
                        libraries[namespace] = torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]
                    with replacing():
                        call = threads.guarded(kernel) if threads.locked else kernel
                        libraries[namespace].m.impl(name, key, call, False)
                    if hasattr(kernel, "__code__"):
                        source.skip(kernel.__code__.co_filename)
        except BaseException:
            for library in libraries.values():
                library._destroy()
            raise
        self._libraries = list(libraries.values())
        record.forget(name for table in tables.values() for name in table)

    def _again(self) -> None:
        """A second thread is about to start: from now on the kernels take the lock."""
        if self._libraries:
            self.unregister()
            self.register()

    def unregister(self) -> None:
        """Give the ops back to the device's own kernels."""
        for library in self._libraries:
            library._destroy()
        if self._libraries:
            record.forget(name for table in self._tables().values() for name in table)
        self._libraries = []
