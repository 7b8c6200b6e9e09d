"""The user's names for data: which variable or parameter a leaf of the graph is.

Parameters and buffers are found through the modules that have been called; other tensors through the variables of the
user's frames, one level of containers deep.  Those are there on a miss only, when they are looked at; a module is asked
when somebody wants to know, which for the first steps of a program is mostly nobody.
"""

from __future__ import annotations

import inspect
import itertools
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType, NoneType
from typing import Any, NamedTuple

import torch

from lazytensor.trace import source, storage
from lazytensor.trace.ir import DATA, Value

_names: dict[int, str] = {}  # by id of a state that is alive while names are looked up
_leaves: dict[int, str] = {}  # by number of the data leaf


class Seen(NamedTuple):
    """What can be seen of the data leaves of a trace: the variables that they are, and the states behind them."""

    variables: dict[int, str]
    states: list[weakref.ref[storage.State]]


def look(frame: FrameType | None) -> Seen:
    """What can be seen of the data leaves of what is pending now, from this frame outward."""
    _names.clear()
    depth = 0
    while frame is not None and depth < 20:
        if not source.is_library(frame.f_code.co_filename):
            for name, value in _variables(frame):
                _note_any(value, name)
            depth += 1
        frame = frame.f_back
    states = list(storage.leaf_states)
    return Seen(_named(states), states)


def _named(states: list[weakref.ref[storage.State]]) -> dict[int, str]:
    """The names that were noted, by number of the leaf; they hold for one look only."""
    found = {number: _names[id(state)] for number, each in enumerate(states) if id(state := each()) in _names}
    _names.clear()
    return found


def use(seen: Seen) -> None:
    """Call the data leaves of the graph that is looked at by these names: a module's rather than a variable's."""
    global _leaves
    for root, (name, _) in list(source.roots.items()):
        found = dict([*root.named_parameters(), *root.named_buffers()])
        _note(list(found.values()), [f"{name}.{path}" for path in found])
    _leaves = seen.variables | _named(seen.states)


def forget() -> None:
    """Let the names go."""
    global _leaves
    _leaves = {}


def _variables(frame: FrameType) -> list[tuple[str, Any]]:
    """The variables of a frame.

    Before Python 3.13 looking at them makes a copy that lives as long as the frame, and would keep tensors alive that
    the program has let go.  So it is emptied again; but not under a debugger, which writes that copy back into the
    variables: there nothing is looked at.
    """
    optimized = frame.f_code.co_flags & inspect.CO_OPTIMIZED
    if optimized and (sys.gettrace() is not None or sys.getprofile() is not None):
        return []
    variables = frame.f_locals
    found = [(n, v) for n, v in variables.items() if v.__class__ not in _PLAIN and not n.startswith("_")]
    if optimized and type(variables) is dict:
        variables.clear()
    return found


# Of these are most of a frame's variables, and none of them holds a tensor.
_PLAIN = frozenset((NoneType, bool, int, float, str, type, ModuleType, FunctionType, BuiltinFunctionType))


def _note_any(value: Any, name: str) -> None:
    if isinstance(value, torch.Tensor):
        _note([value], [name])
    elif isinstance(value, dict):
        some = list(value.items())[:_MOST]
        _note([each for _, each in some], (f"{name}[{key!r}]" for key, _ in some))
    elif isinstance(value, list | tuple):
        _note(value[:_MOST], (f"{name}[{index}]" for index in itertools.count()))


_MOST = 64  # of a container's items are looked at


def _note(objects: Sequence[Any], names: Iterable[str]) -> None:
    """Note these names for those of the objects that are tensors with data."""
    states = states_in(objects)
    if any(states):
        for state, name in zip(states, names, strict=False):
            if state is not None:
                _names.setdefault(id(state), name)


def _state_in(value: Any) -> storage.State | None:
    if not isinstance(value, torch.Tensor) or type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return None
    if value.device.type != "ltc" or value.layout is not torch.strided:  # it has no storage of its own
        return None
    state = getattr(value.untyped_storage(), "_lt", None)
    return state if isinstance(state, storage.State) else None


def _states_in(objects: Sequence[Any]) -> list[storage.State | None]:
    return [_state_in(each) for each in objects]


# The states of those of these objects that are tensors of ours, None for the others; replaced by the same in C++.
states_in: Callable[[Sequence[Any]], list[storage.State | None]] = _states_in


def of_leaf(value: Value) -> str:
    """The user's name for a data leaf of the graph that is looked at, in quotes; else its number."""
    kind, index = value.node.args
    name = _leaves.get(index) if kind is DATA else None
    return f"input {value.name}" if name is None else f"`{name}`"
