"""Which line of the user's program made a node, in which module, and for backward: which forward line it belongs to.

Asked for on a miss only.  Frames of PyTorch, of lazytensor and of the standard library are skipped by rule: the line
is the innermost frame that belongs to neither.  The module path (``model.blocks.3.attn``) comes from the
``nn.Module`` calls on the stack.

In backward the user's frame is the ``backward()`` call, which says little.  The forward line is found in this order:

1. by the autograd node's sequence number, under which the forward op noted its line when it was new;
2. if the forward was not new (it hit, so it noted nothing): by the saved forward values among the arguments, through
   the interned node that made them or that used them;
3. by the forward line of the gradient that comes in: the nearest neighbour.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import sysconfig
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from lazytensor.trace.ir import Op, Value

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_STDLIB = sysconfig.get_paths()["stdlib"] + os.sep
_SITE = tuple({sysconfig.get_paths()[k] + os.sep for k in ("purelib", "platlib")})
_PROGRAMS = (_PACKAGE + "bench" + os.sep, _PACKAGE + "demo" + os.sep)  # programs that come with the package
_generated: set[str] = set()


class Line(NamedTuple):
    """A place in the user's program."""

    file: str
    number: int
    function: str
    forward: tuple[str, int, str] | None = None  # for an op of backward: the forward line it belongs to
    module: str | None = None  # the path of the nn.Module whose call made it, or for backward whose forward did

    def __str__(self) -> str:
        where = f"{self.file}:{self.number} in {self.function}"
        if self.forward is not None:
            where = f"{self.forward[0]}:{self.forward[1]} in {self.forward[2]} (its backward, from {where})"
        return where

    @property
    def place(self) -> tuple[str, int, str]:
        """The line that a reader wants to see: for an op of backward, the forward line."""
        return self.forward or (self.file, self.number, self.function)


UNKNOWN = Line("<unknown>", 0, "<unknown>")


def skip(path: str) -> None:
    """Treat this file as the library's own: generated kernels."""
    _generated.add(path)


_ours: dict[str, bool] = {}


def is_library(path: str) -> bool:
    """Whether this file is PyTorch's, lazytensor's or Python's own."""
    known = _ours.get(path)
    if known is None:
        known = _ours[path] = (
            (path.startswith((_PACKAGE, _TORCH)) and not path.startswith(_PROGRAMS))
            or path in _generated
            or path.startswith("<frozen ")
            or (path.startswith(_STDLIB) and not path.startswith(_SITE))
        )
    return known


def user_frame(frame: FrameType | None = None) -> FrameType | None:
    """The innermost frame that is the user's own, from this one outward, or from where this is called."""
    if frame is None:
        if running is not None:
            return running()
        frame = sys._getframe(1)
    known = _ours.get
    while frame is not None:
        path = frame.f_code.co_filename
        if not (known(path) or is_library(path)):
            return frame
        frame = frame.f_back
    return None


# The same in C++, of the frame that is running, where there is a compiled recorder.
running: Callable[[], FrameType | None] | None = None


# --- modules --------------------------------------------------------------------------------------------------------

CALL = torch.nn.Module._wrapped_call_impl.__code__  # type: ignore[attr-defined]
# For each outermost module seen: its name and the path of each module in it.
roots: weakref.WeakKeyDictionary[torch.nn.Module, tuple[str, dict[int, str]]] = weakref.WeakKeyDictionary()


def module_path(inner: FrameType, outer: FrameType) -> str:
    """The path of the innermost module that is being called, from the outermost one, by the frames of their calls."""
    module, root = _self(inner), _self(outer)
    if root not in roots:
        roots[root] = (_name(root, outer), {})
    name, paths = roots[root]
    path = paths.get(id(module))
    if path is None:
        paths.clear()
        paths.update((id(each), path) for path, each in root.named_modules(remove_duplicate=False))
        path = paths.setdefault(id(module), type(module).__name__)
    return f"{name}.{path}" if path else name


def _self(frame: FrameType) -> torch.nn.Module:
    # Reading the locals of a frame keeps them alive as long as the frame: harmless here, where PyTorch's own frame
    # holds the module and its arguments anyway, and the reason why no frame of the user is read like this.
    return frame.f_locals["self"]  # type: ignore[no-any-return]


def _name(module: torch.nn.Module, frame: FrameType) -> str:
    """The user's name for a module: that of a global variable, else its class."""
    caller = user_frame(frame)
    if caller is not None:
        variables = caller.f_globals.copy()
        values = list(map(id, variables.values()))
        if id(module) in values:
            return list(variables)[values.index(id(module))]
    return type(module).__name__


# --- forward lines for backward -------------------------------------------------------------------------------------

# By autograd sequence number: what was new right after that autograd node was made, and where.  The node of an op is
# made just before its kernel runs, so the first entry under a number is usually the op itself; the name tells for
# sure.
forward: dict[int, list[tuple[str, Line]]] = {}
_next_sequence = torch._C._autograd._get_sequence_nr  # type: ignore[attr-defined]
_current_node = torch._C._current_autograd_node  # type: ignore[attr-defined]
_BUILT_IN = re.compile(r"(.+)Backward\d+$")


def here(op: Op, args: tuple[Any, ...]) -> Line:
    """The user's line that is running now, and records this op with these canonical arguments."""
    node = _current_node()
    if node is not None:
        frame = user_frame()
        if frame is None:
            return UNKNOWN
        origin = _origin(node, args)
        place = (None, None) if origin is None else (origin.place, origin.module)
        return Line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name, *place)
    known = _ours.get
    user = inner = outer = None
    each: FrameType | None = sys._getframe(1)
    while each is not None:
        code = each.f_code
        if code is CALL:
            outer = each
            if inner is None:
                inner = each
        elif user is None and not (known(code.co_filename) or is_library(code.co_filename)):
            user = each
        each = each.f_back
    if user is None:
        return UNKNOWN
    module = None if inner is None or outer is None else module_path(inner, outer)
    line = Line(user.f_code.co_filename, user.f_lineno, user.f_code.co_name, None, module)
    if len(forward) > 100_000:
        forward.clear()
    noted = forward.setdefault(_next_sequence() - 1, [])
    if len(noted) < 4:
        noted.append((plain(op.name), line))
    return line


@functools.cache
def plain(name: str) -> str:
    """``aten::_log_softmax.int`` as ``logsoftmax``: comparable with the name of an autograd node."""
    return name.rpartition("::")[2].partition(".")[0].replace("_", "").lower()


@functools.cache
def _built_in(name: str) -> str | None:
    """The op behind an autograd node of this name, in the same form; None for a ``torch.autograd.Function``."""
    found = _BUILT_IN.match(name)
    return None if found is None else found[1].lower()


# Replaced where there is a compiled recorder, which remembers the calls of a program's first steps that were not new.
line_of_found: Callable[[int, str], Line | None] = lambda sequence, name: None  # noqa: E731


def _origin(node: Any, args: tuple[Any, ...]) -> Line | None:
    wanted = _built_in(node.name())
    noted = forward.get(node._sequence_nr(), ())
    if wanted is None:  # a torch.autograd.Function: what its forward recorded first
        return noted[0][1] if noted else None
    for name, line in noted:
        if name.startswith(wanted):
            return line
    line_of_call = line_of_found(node._sequence_nr(), wanted)
    if line_of_call is not None:
        return line_of_call
    from lazytensor.trace.ir import values_in

    values = values_in(args)
    saved = [v for v in values if not v.leaf and v.node.line is not None and v.node.line.forward is None]
    # The first gradient is made from the loss (``ones_like``), so what values were made from counts as well.
    near = [*saved, *(v for value in values if not value.leaf for v in value.node.inputs if not v.leaf)]
    found = next((v.node.line for v in near if plain(v.node.op.name).startswith(wanted)), None)
    if found is not None and found.forward is not None:
        found = None
    found = found or _user_of([v for v in values if v.leaf or v in saved], wanted)
    if found is not None:  # the other ops of the same autograd node have no saved value among their arguments
        forward.setdefault(node._sequence_nr(), []).append((wanted, found))
        return found
    return next((v.node.line for v in values if not v.leaf and v.node.line and v.node.line.forward is not None), None)


def _user_of(saved: Iterable[Value], wanted: str) -> Line | None:
    """The line of a forward node of this name that takes all these values."""
    from lazytensor.trace.record import ops

    needed = set(saved)
    if not needed:
        return None
    for name in _names_like(wanted, len(ops)):
        for key, entry in ops[name].table.items():
            if needed.issubset(_members(key)):
                line = _line(entry)
                if line is not None and line.forward is None:
                    return line
    return None


@functools.cache
def _names_like(wanted: str, count: int) -> list[str]:
    """The ops whose names begin like this, of the ``count`` that there are."""
    from lazytensor.trace.record import ops

    mark = "::" + wanted
    return [n for n, text in zip(ops, _squeezed(count), strict=True) if mark in text and plain(n).startswith(wanted)]


@functools.cache
def _squeezed(count: int) -> list[str]:
    """The names of all ops as autograd nodes are named: in one go, since in the first step of a program it shows."""
    from lazytensor.trace.record import ops

    return "\n".join(ops).replace("_", "").lower().split("\n")


def _members(key: tuple[Any, ...]) -> Iterable[Any]:
    for part in key:
        if part.__class__ is tuple:
            yield from part
        else:
            yield part


def _line(entry: Any) -> Line | None:
    while isinstance(entry, tuple | list):
        entry = next((part for part in entry if part is not None), None)
    return None if entry is None else entry.node.line
