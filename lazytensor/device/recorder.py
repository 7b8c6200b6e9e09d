"""The compiled recorder: the hit path of the kernels in C++, used where it has been built, and never needed.

A generated Python kernel takes about 4 µs, of which PyTorch's way into Python and back is 1.5 and the making of the
tensor's Python objects another 1.2.  ``recorder.cpp`` does what such a kernel does on a hit without leaving C++, on the
same tables and states, and hands every other call to the Python kernel.  It is one file over all schemas: what an op
means, its shapes, its nodes and its errors stay in Python.

Where :mod:`lazytensor.native` has been built, ``import lazytensor`` puts it before the Python kernels.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

from lazytensor import native
from lazytensor.backend.contract import Failure
from lazytensor.codegen.runtime import replacing
from lazytensor.device import patches
from lazytensor.execute import ahead, budget, cut, fallback
from lazytensor.functions import watch, whole
from lazytensor.inspect import names
from lazytensor.trace import ir, record, source, storage

module: Any = None  # the extension, once it is installed


def in_use() -> bool:
    """Whether kernels take the compiled path."""
    return module is not None and module.enabled()


def install(kernels: ModuleType) -> bool:
    """Put the compiled hit path before these Python kernels, if it has been built; whether it has."""
    global module
    if module is not None:
        return True
    found = native.extension()
    if found is None:
        return False
    found.begin(_parts())
    with replacing():
        # By the table of a kernel: the op whose nodes it records.
        makers = {id(each.table): each for each in record.ops.values()}
        makers |= {id(each.table): each.functional for each in record.mutations if not each.outs}
        for name, (kind, table) in kernels.hits.items():
            full = "aten::" + name
            own = makers.get(id(table))
            made_by, made_in = (full, table) if own is None else (own.name, own.table)
            found.install(*_split(full), kind, table, *_split(made_by), own, made_in)
        found.install_reader()
    found.enable(True)
    ahead.use_compiled(found)
    ahead.begin()
    cut.use_compiled(found)
    storage.adopt, storage.flush_numbers, storage.view_in_cpp = found.adopt, found.flush_numbers, found.view
    storage.sweep = found.sweep
    record.forget_calls = _forget_calls
    source.line_of_found, source.running = found.line_of_found, found.user_frame
    names.states_in = found.states_in
    patches.ask_cpp_for_states(found.state)
    module = found
    watch.begin(found)
    return True


def _forget_calls() -> None:
    """Forget what was found in the tables, of single calls and of functions."""
    module.forget_calls()
    whole.forget()


def _split(name: str) -> tuple[str, str]:
    """``aten::add.Tensor`` as C++ looks it up: name and overload."""
    stem, _, overload = name.partition(".")
    return stem, overload


def _parts() -> dict[str, Any]:
    """What the compiled path works on: the very objects that the Python kernels do."""
    names = ("State", "ViewedState", "ViewState", "FRESH", "fresh", "numbers", "leaf_data", "leaf_states")
    functions = ("dead", "make", "make_view", "write", "value_of_state")
    parts = {name: getattr(storage, name) for name in (*names, *functions)}
    return parts | {
        "Value": ir.Value,
        "Spec": ir.Spec,
        "rows": ir._number_leaves,
        "data_leaves": ir._data_leaves,
        "specs": ir._specs,
        "aliased": storage._aliased,
        "number_leaf": ir.number_leaf,
        "Node": ir.Node,
        "Op": ir.Op,
        "DATA": ir.DATA,
        "LEAF": ir.LEAF,
        "young": ahead._young,
        "old": ahead._old,
        "look": ahead.look,
        "decide": ahead.decide,
        "stop": ahead.stop,
        "is_there": ahead.is_there,
        "unasked": record.unasked,
        "budget_room": budget.room,
        "ir_globals": vars(ir),
        "here": source.here,
        "Line": source.Line,
        "module_path": source.module_path,
        "is_library": source.is_library,
        "module_call": source.CALL,
        "forward_lines": source.forward,
        "unknown_line": source.UNKNOWN,
        "live": storage.live,
        "effects": storage.effects,
        "data_of": fallback.data_of,
        "data_in": fallback.data_in,
        "Computation": cut.Computation,
        "Failure": Failure,
    }


def disable() -> None:
    """Let the Python kernels do everything from now on: they can take a lock."""
    if module is not None:
        module.enable(False)
