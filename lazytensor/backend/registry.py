"""Which backends there are, and which one is in force.

A backend is known by name: built in, registered by :func:`register_backend`, or announced by an installed package under
the entry point group ``lazytensor.backends``.  It is loaded when first chosen.  One instance exists per name and
options, so switching back finds what it compiled.  Switching touches nothing that is pending.
"""

from __future__ import annotations

import atexit
import importlib
import importlib.metadata
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from lazytensor import errors, settings
from lazytensor.backend import memory
from lazytensor.backend.interface import Backend
from lazytensor.trace import record

log = logging.getLogger("lazytensor")

Factory = Callable[..., Backend]

_BUILT_IN = {
    "reference": "lazytensor.backend.reference:ReferenceBackend",
    "ts": "lazytensor.backend.ts:TorchScriptBackend",
    "inductor": "lazytensor.backend.inductor:InductorBackend",
    "auto": "lazytensor.backend.inductor:AutoBackend",
}
_registered: dict[str, Factory] = {}
_instances: dict[tuple[str, str], Backend] = {}
_prepared: list[Backend] = []  # in the order in which they came into force
_current: Backend | None = None

# Called with a backend that was closed and cannot run again what it compiled: the cut drops its computations.
on_close: list[Callable[[Backend], None]] = []
# Called before a backend is closed: cuts that run in the background have to end first.
before_close: list[Callable[[], None]] = []


def register_backend(name: str, backend: Factory) -> None:
    """Make a backend known under a name: a class, or any function that makes one from the options."""
    if not callable(backend):
        raise TypeError(f"a backend is registered by its class, not by a {type(backend).__name__}")
    _registered[name] = backend
    for key in [k for k in _instances if k[0] == name]:
        del _instances[key]


def _announced() -> dict[str, importlib.metadata.EntryPoint]:
    return {point.name: point for point in importlib.metadata.entry_points(group="lazytensor.backends")}


def backends() -> list[str]:
    """The names of all backends that can be chosen."""
    return sorted({*_BUILT_IN, *_registered, *_announced()})


def factory(name: str) -> Factory:
    """What makes the backend of this name.  Raises what loading it raises."""
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return getattr(importlib.import_module(module), attribute)  # type: ignore[no-any-return]
    announced = _announced()
    if name in announced:
        return announced[name].load()  # type: ignore[no-any-return]
    raise errors.UnknownBackend(name, backends())


def origin(name: str) -> str:
    """Where a backend comes from."""
    if name in _registered:
        return "registered"
    return "built in" if name in _BUILT_IN else f"package {_announced()[name].value.partition(':')[0]}"


def instance(name: str, **options: Any) -> Backend:
    """The backend of this name with these options, made when first asked for."""
    key = (name, repr(sorted(options.items())))
    found = _instances.get(key)
    if found is None:
        try:
            found = factory(name)(**options)
            if not isinstance(found, Backend):
                raise TypeError(f"it is a {type(found).__name__}, not a lazytensor.Backend")
        except errors.UnknownBackend:
            raise
        except Exception as error:
            raise errors.BackendNotLoaded(name, error) from error
        found.name = name
        _instances[key] = found
    return found


def current() -> Backend:
    """The backend in force."""
    if _current is None:
        _enter(instance(settings.backend))
        assert _current is not None
    return _current


def set_backend(backend: str | Backend, **options: Any) -> Backend:
    """Let this backend compile and run everything from now on.  What is pending stays pending; data is carried over."""
    chosen = backend if isinstance(backend, Backend) else instance(backend, **options)
    before = _current
    if chosen is before:
        return chosen
    _enter(chosen)
    settings.backend = chosen.name
    if before is not None:
        _close(before)
    return chosen


@contextmanager
def scope(backend: str | Backend, **options: Any) -> Iterator[Backend]:
    """``with lt.backend("ts"):`` another backend for a block; the one before is not closed meanwhile."""
    chosen = backend if isinstance(backend, Backend) else instance(backend, **options)
    before = current()
    if chosen is not before:
        _enter(chosen)
    try:
        yield chosen
    finally:
        if _current is not before:
            _enter(before)


def _enter(chosen: Backend) -> None:
    """Bring a backend into force; if it cannot get ready, everything stays as it is."""
    global _current
    try:
        if chosen not in _prepared:
            chosen.prepare()
        recordings = chosen.ir_builder().recordings()
    except Exception as error:
        raise errors.BackendNotLoaded(chosen.name, error) from error
    if chosen not in _prepared:
        _prepared.append(chosen)
    if chosen.own_memory:
        memory.in_use = True
    _switch_recordings(_current, chosen, recordings)
    _current = chosen


# what the tables of ops recorded otherwise held under a backend
_tables: dict[tuple[Backend | None, str], dict[Any, Any]] = {}


def _switch_recordings(before: Backend | None, chosen: Backend, recordings: dict[str, Callable[..., Any]]) -> None:
    """An op that a backend records in its own way has, under that backend, other table entries than under the rest."""
    for name in {*record.recordings, *recordings}:
        table = record.op(name).table
        _tables[(before if name in record.recordings else None, name)] = dict(table)
        table.clear()
        table.update(_tables.get((chosen if name in recordings else None, name), {}))
    if record.recordings or recordings:
        record.drop_mutations()
    record.recordings.clear()
    record.recordings.update(recordings)


def _close(backend: Backend) -> None:
    """Close a backend that was replaced."""
    if backend not in _prepared:
        return
    for wait in before_close:
        wait()
    _prepared.remove(backend)
    memory.bring_home(backend)
    try:
        backend.close()
    except Exception:
        log.exception("lazytensor: the backend %r failed to close", backend.name)
    if not backend.keeps_computations:
        for tell in on_close:
            tell(backend)


@atexit.register
def close_all() -> None:
    """At exit: close every backend that is ready, the last one first."""
    for wait in before_close:
        wait()
    for backend in reversed(list(_prepared)):
        _prepared.remove(backend)
        try:
            backend.close()
        except Exception:
            log.exception("lazytensor: the backend %r failed to close", backend.name)


class BackendInfo(NamedTuple):
    """What ``lazytensor backends`` shows about one backend."""

    name: str
    origin: str
    version: str
    devices: list[str]
    options: dict[str, str]
    problem: str  # why it cannot be loaded


def describe(name: str) -> BackendInfo:
    """Load a backend, without bringing it into force, and say what it is."""
    try:
        maker = factory(name)
        options = {
            p.name: "" if p.default is p.empty else repr(p.default)
            for p in inspect.signature(maker).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        }
        made = instance(name)
        return BackendInfo(name, origin(name), made.version, [str(d) for d in made.devices()], options, "")
    except Exception as error:
        return BackendInfo(name, origin(name), "", [], {}, str(error))
