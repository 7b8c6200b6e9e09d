"""Finds the functions that are worth recording as a whole: it watches a few steps for calls that record much.

A step that comes again and again is watched from one cut to the next by Python's own profiling hook, three times in the
life of a program.  Of the calls that recorded many operations the outermost are tried; where one is refused, those that
it made.  Which were found is noted on disk by name, so a restarted program tries them after its first cut.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import threading
import types
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import diskcache
from lazytensor.execute import cut
from lazytensor.functions import whole
from lazytensor.trace import source

MANY = (
    48  # operations that a call must record: a lookup takes about as long as to record five, and reads take their time
)
LOOKS = (24, 200, 2_000)  # cuts that were found before a step is watched
CUTS = 4  # that are watched each time
MISSES = 4  # cuts of a new process after which the functions of the one before are looked for

_tried: set[types.CodeType] = set()


class _Call:
    """A call that was seen: how many operations it recorded, in how many cuts, and the calls that it made."""

    __slots__ = ("calls", "code", "cuts", "namespace", "operations")

    def __init__(self, code: types.CodeType, namespace: dict[str, Any]) -> None:
        self.code = code
        self.namespace = namespace
        self.operations = whole.native.calls_found()
        self.cuts = cut.cuts_made()
        self.calls: list[_Call] = []

    def end(self) -> None:
        """The call has returned."""
        self.operations = whole.native.calls_found() - self.operations
        self.cuts = cut.cuts_made() - self.cuts


class _Watch:
    """The calls of the program's own thread, while it is watched."""

    def __init__(self) -> None:
        self.outermost: list[_Call] = []
        self.open: list[tuple[Any, _Call]] = []
        self.left = CUTS

    def __call__(self, frame: types.FrameType, event: str, argument: Any) -> None:
        if event == "call":
            if not source.is_library(frame.f_code.co_filename):
                self.open.append((frame, _Call(frame.f_code, frame.f_globals)))
        elif event == "return" and self.open and self.open[-1][0] is frame:
            call = self.open.pop()[1]
            call.end()
            if call.operations >= MANY:
                (self.open[-1][1].calls if self.open else self.outermost).append(call)


_watch: _Watch | None = None
_next_sequence = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_sequence: int | None = None  # autograd's, at the cut before the first look


def begin(extension: Any) -> None:
    """Look for such functions from now on; the compiled recorder is in use."""
    whole.native = extension
    whole.proven = _note
    cut.look_at, cut.look, cut.missed, cut.counts_anew = LOOKS[0] - 1, _look, _try_noted, _break_off


def _look() -> None:
    """A cut was found that is to be looked at: begin to watch, go on, or see what was found.

    A program that makes gradients is watched at the last look only: most of what it does cannot be recorded as a whole,
    and to watch it holds up its first steps.
    """
    global _sequence, _watch
    if _sequence is None:
        _sequence, cut.look_at = _next_sequence(), cut.hits + 1
        return
    learns = _next_sequence() != _sequence and cut.hits < LOOKS[-1]
    if _watch is None and not learns and _is_usual():
        _watch = _Watch()
        sys.setprofile(_watch)
    if _watch is not None and _watch.left:
        _watch.left -= 1
        cut.look_at = cut.hits + 1
        return
    cut.look_at = next((each for each in LOOKS if each > cut.hits), 0)
    _try(end())


def _break_off() -> None:
    """What is watched does not come again, or cuts are counted anew: nobody may come by soon to end the watch."""
    if _watch is not None:
        end()
        cut.look_at = next((each for each in LOOKS if each >= cut.look_at), LOOKS[-1])


def _is_usual() -> bool:
    """Whether nobody else watches, and the compiled recorder tells how much is recorded."""
    alone = sys.getprofile() is None and sys.gettrace() is None and whole.native.enabled()
    return alone and settings.whole_functions and threading.current_thread() is threading.main_thread()


def end() -> list[_Call]:
    """Watch no more; the calls that were seen."""
    global _watch
    if _watch is None:
        return []
    if sys.getprofile() is _watch:
        sys.setprofile(None)
    found, _watch = _watch.outermost, None
    return found


def _try(calls: list[_Call]) -> None:
    """Let the functions of these calls be recorded as wholes, or if they cannot be, those that they call."""
    for call in calls:
        function = None if call.cuts or call.code in _tried else _function(call)
        if call.code in _tried:
            continue
        if function is None:
            _try(call.calls)
            continue
        _tried.add(call.code)
        _Attempt(function, call)


class _Attempt:
    """One function that is tried, and what to do if it is refused."""

    def __init__(self, function: types.FunctionType, call: _Call | None) -> None:
        self.call = call
        self.whole = whole.Whole(function, self.refused)

    def refused(self) -> None:
        """Try the functions that it calls, unless it was refused for what they share."""
        if self.call is not None and self.whole.reason != whole.GRADIENTS:
            _try(self.call.calls)


def _function(call: _Call) -> types.FunctionType | None:
    """The function that has this code."""
    for each in _named(call.namespace, call.code.co_qualname):
        if each.__code__ is call.code:
            return each
    owners = [each for each in gc.get_referrers(call.code) if isinstance(each, types.FunctionType)]
    return owners[0] if len(owners) == 1 and owners[0].__code__ is call.code else None


def _named(namespace: dict[str, Any], name: str) -> list[types.FunctionType]:
    """The function of this qualified name, and those that its decorators have put around it."""
    found: Any = namespace
    for part in name.split("."):
        names = found if isinstance(found, dict) else vars(found) if isinstance(found, type) else {}
        found = names.get(part)
    functions = []
    while isinstance(found, types.FunctionType):
        functions.append(found)
        found = getattr(found, "__wrapped__", None)
    return functions


# --- from one process to the next -------------------------------------------------------------------------------------


def _key() -> str | None:
    """The name under which this program's functions are noted."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    return None if file is None else diskcache.key_of("whole functions", str(file))


def _note() -> None:
    """Note the functions that are known to be pure by now."""
    key = _key()
    if key is not None:
        names = [[each.place[0], each.name] for each in whole.wholes if each.proofs]
        diskcache.note(key, json.dumps(names))


def _try_noted() -> None:
    """After one of the first cuts of a process: try the functions that were found to be pure by the one before."""
    if cut.misses >= MISSES:
        cut.missed = _break_off
    if not settings.whole_functions or not whole.native.enabled() or not diskcache.anything_noted():
        return
    key = _key()
    if key is None:
        return
    noted: set[tuple[str, str]] = set()
    with contextlib.suppress(ValueError, TypeError):
        noted = {(str(file), str(name)) for file, name in json.loads(diskcache.noted(key) or "[]")}
    if not noted:
        cut.missed = _break_off
        return
    files = {file for file, _ in noted}
    for module in list(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path in files:
            for name in [name for file, name in noted if file == path]:
                for each in _named(vars(module), name):
                    if each.__code__.co_filename == path and all(each is not known.function for known in whole.wholes):
                        _tried.add(each.__code__)
                        _Attempt(each, None)
