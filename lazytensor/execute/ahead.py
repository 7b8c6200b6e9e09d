"""A step that was never seen runs as it is recorded: it has to run op by op anyway, and running an op tells most of it.

To record a new op lazytensor must know what its results look like.  To find that out takes longer than most ops do (0.1
to 0.5 ms: stand-ins, meta kernels).  The data of its arguments is there, so the op itself can tell, exactly; and then
its result is there, too.  Where the backend in force would run a new graph op by op on the CPU (``Backend.runs_ahead``)
this is done for the whole trace, and its cut has nothing left to run.

It is all or nothing.  As soon as the data of an argument is missing, since it was recorded by a hit, since a cut in the
background still makes it, or since the op that should have made it raised, the rest of the trace is only recorded, and
its cut runs all of it.  A program cannot tell the difference: values stay pending until their cut, what was computed is
dropped when no tensor can see it any more, and an error that depends on data is raised at the cut, with its line.

A step that an earlier process of the same program has compiled is not run ahead: it will be found on disk, and so will
what its ops give (:mod:`lazytensor.backend.looks`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import diskcache, registry
from lazytensor.backend.contract import misplaced, restrided
from lazytensor.inspect import events
from lazytensor.trace import record, source, storage
from lazytensor.trace.future import Future
from lazytensor.trace.ir import Number, Op, Spec, Value, values_in
from lazytensor.trace.shapes import DATA_DEPENDENT, call_arguments, clean, root

_FEW = 16  # states that may be pending without data when the first new op comes: else most of the trace is no news
YOUNG_BYTES = 4 << 20  # is made before what nobody can see any more is looked for; 16 take three times the page faults

# The first step of a program that reads values has many cuts, and often the same ones: so many of its cuts at most are
# run ahead though all of their calls were seen before.  To make their graphs takes longer than to do without.
_FIRST_CUTS = 32
first_step = True  # until something pending was cut because the program asked for it, and not for a value

on: bool | None = None  # whether this trace is run ahead; None: it has no new op yet
# Emptied, never replaced: the compiled recorder holds both.
_young: dict[Value, torch.Tensor] = {}  # what was made, since the last look at who can see it
_old: dict[Value, torch.Tensor] = {}  # and before
_young_bytes = 0
_seconds = 0.0  # spent on the ops of this trace here


def run(op: Op, args: tuple[Any, ...]) -> Any:
    """What a new op gives for the data of its arguments; None if it is only recorded."""
    if on is None:
        decide()
    if not on or not _pure(op):
        return None
    data = {}
    for value in values_in(args):
        found = _data(value)
        if found is None:
            found = _made_again(value)
        if found is None:
            stop()
            return None
        data[value] = found
    return _call(op, args, data)


def decide() -> None:
    """The first new op of a trace has come: decide whether it is run ahead."""
    global on
    on = _wanted()
    if on:
        switched(YOUNG_BYTES)


def keep(outputs: tuple[Value | None, ...], result: Any) -> None:
    """Remember what the op that has these outputs gave."""
    global _young_bytes
    for value, tensor in zip(outputs, _flat(result), strict=True):
        if value is None or tensor is None:
            continue
        spec = value.spec
        if tuple(tensor.shape) != spec.size or tensor.dtype is not spec.dtype:
            continue  # its shape rule is wrong: the cut will say so
        if value.node.op.view:
            if not _seen_as(tensor, spec):
                continue
        else:
            if misplaced(tensor, spec):
                with clean():
                    tensor = restrided(tensor, spec)
            _young_bytes += spec.nbytes
        _young[value] = tensor
    if _young_bytes > YOUNG_BYTES:
        look()


# Replaced where there is a compiled recorder, which runs most new ops and makes their nodes (``native/births.h``).
switched: Callable[[int | None], None] = lambda bytes_before_a_look: None  # noqa: E731
_await_first: Callable[[bool], None] = lambda calls: None  # noqa: E731  (ask `decide` when the next new op or call comes)
_results: Callable[[list[Value]], list[torch.Tensor] | None] = lambda values: None  # noqa: E731  (`results`, if all is usual)
_compiled_seconds: Callable[[], float] = lambda: 0.0  # noqa: E731
_newborn: Callable[[Value], torch.Tensor | None] = lambda value: None  # noqa: E731  (what was made there)
_hand_over: Callable[[], None] = lambda: None  # noqa: E731  (and let it be in `_young`)


def use_compiled(extension: Any) -> None:
    """Let C++ run new ops as they are recorded, while that is wanted."""
    global switched, _await_first, _results, _compiled_seconds, _newborn, _hand_over
    _await_first, _results = extension.await_first, extension.results
    switched, _compiled_seconds = extension.run_ahead, extension.ahead_seconds
    _newborn, _hand_over = extension.newborn, extension.hand_over


def spent() -> float:
    """How long the ops of this trace took that were run as they were recorded, in seconds."""
    return _seconds + _compiled_seconds()


def tells(op: Op, result: Any) -> bool:
    """Whether results of an op look like its declared results will: those of views do, others if they lie in memory of
    their own.
    """
    return op.view or not any(
        t is not None and (t.layout is not torch.strided or t.storage_offset() or t.is_conj() or t.is_neg())
        for t in _flat(result)
    )


def results(values: list[Value]) -> list[torch.Tensor] | None:
    """The results of a cut with these values, each in memory of its own, if all are there; asked while ``on``."""
    usual = _results(values)
    if usual is not None:
        return usual
    found = []
    for value in values:
        tensor = _data(value)
        if tensor is None:
            tensor = _made_again(value)
        if tensor is None:
            return None
        found.append(tensor)
    taken = {_place(data) for data in storage.leaf_data if isinstance(data, torch.Tensor)} - {0}
    with clean():
        for number, (tensor, value) in enumerate(zip(found, values, strict=True)):
            memory, needed = tensor.untyped_storage(), storage._extent(value.spec) * value.dtype.itemsize
            place = memory.data_ptr()
            if place in taken or misplaced(tensor, value.spec) or memory.nbytes() > needed:
                found[number] = restrided(tensor, value.spec)
            elif place:
                taken.add(place)
    return found


def stop() -> None:
    """Only record the rest of this trace."""
    global on, _young_bytes
    switched(None)
    on = False
    _young_bytes = 0
    _young.clear()
    _old.clear()


def begin() -> None:
    """A new trace begins."""
    global on, _seconds
    stop()
    on = None
    _await_first(first_step and cuts_made() < _FIRST_CUTS)  # noqa: F821  (set by the layer above)
    _seconds = 0.0


def _wanted() -> bool:
    """Whether to run this trace ahead, asked when its first new op comes."""
    if record.forced or record.recordings:
        return False
    backend = registry.current()
    if not _run_ahead.value or not backend.runs_ahead or backend.own_memory or _strict.value or _check.value:
        return False
    if events.take_over is not None or events.profiling() or storage.effects:
        return False
    storage.adopt()
    if len(storage.fresh) + len(storage.live) > _FEW:
        return False
    frame = source.user_frame()
    file = source.UNKNOWN.file if frame is None else frame.f_code.co_filename
    return not diskcache.compiled_before(file, cuts_made())  # noqa: F821  (set by the layer above)


_run_ahead, _strict, _check = (settings._ALL[name] for name in ("run_ahead", "strict", "check"))
cuts_made: Callable[[], int]

_purity: dict[Op, bool] = {}


def _pure(op: Op) -> bool:
    """Whether nobody can tell how often an op runs, and the shape of its results depends on no data."""
    known = _purity.get(op)
    if known is None:
        ours = op.name.startswith(("aten::", "lazytensor::"))
        known = _purity[op] = ours and not DATA_DEPENDENT & set(op.overload.tags)
    return known


def _data(value: Value) -> torch.Tensor | None:
    found: Any = _young.get(value)
    if found is None:
        found = _old.get(value)
        if found is None and value.leaf:
            found = storage.leaf_data[value.node.args[1]]
            if found.__class__ is Future:
                found = found.now() if found.run.has_run() and found.error is None else None
        elif found is None:
            found = _newborn(value)
    return found if isinstance(found, torch.Tensor) else None


def _made_again(value: Value) -> torch.Tensor | None:
    """The data of a value that was recorded by a hit, or that nobody could see for a while, from that of its node's
    arguments; a view's also by way of other views, which cost nothing to make.
    """
    chain = [value]
    while (parent := _viewed(chain[-1])) is not None and _data(parent) is None:
        chain.append(parent)
    found = None
    for each in reversed(chain):
        found = _made_from_inputs(each)
        if found is None:
            return None
    return found


def is_there(args: tuple[Any, ...]) -> bool:
    """Whether the data of all arguments is there, or could be made again."""
    return all(_is_there(value, _MOST_STEPS) for value in values_in(args))


_MOST_STEPS = 4  # from what is there to a value: a write through a view takes a copy and a scatter


def _is_there(value: Value, steps: int) -> bool:
    if _data(value) is not None:
        return True
    if not steps or not all(_is_there(each, steps - 1) for each in value.node.inputs):
        return False
    return _made_again(value) is not None


def _viewed(value: Value) -> Value | None:
    node = value.node
    return node.inputs[0] if node.op.view and node.inputs else None


def _made_from_inputs(value: Value) -> torch.Tensor | None:
    node = value.node
    if value.leaf or not _pure(node.op):
        return None
    data = {}
    for each in node.inputs:
        found = _data(each)
        if found is None:
            return None
        data[each] = found
    result = _call(node.op, node.args, data)
    if result is None:
        return None
    keep(node.outputs, result)
    return _data(value)


def _call(op: Op, args: tuple[Any, ...], data: dict[Value, torch.Tensor]) -> Any:
    """What an op gives; None if it raises, which may be an error of the user's that its cut will report."""
    global _seconds

    def convert(argument: Any) -> Any:
        kind = argument.__class__
        if kind is Value:
            return data[argument]
        if kind is Number:
            return storage.numbers[argument.index]
        return _CPU if kind is torch.device else argument

    positional, keyword = call_arguments(op, args, convert)
    before = time.perf_counter()
    try:
        with clean():
            return op.overload._op(*positional, **keyword)
    except Exception:
        return None
    finally:
        _seconds += time.perf_counter() - before


_CPU = torch.device("cpu")


def look() -> None:
    """Drop what no tensor can see any more.  What was made since the last look stays: a kernel may be at work on it."""
    global _young_bytes
    storage.adopt()
    storage.sweep()
    _hand_over()
    states = [reference() for reference in list(storage.live)]
    seen = {state.value for state in states if state is not None}
    for value in [value for value in _old if not _is_seen(value, seen)]:
        del _old[value]
    _old.update(_young)
    _young.clear()
    _young_bytes = 0


def _is_seen(value: Value, seen: set[Value | None]) -> bool:
    """Whether a value may be asked for again.  A view takes no memory and may be, as long as what it sees may."""
    if value in seen:
        return True
    whole = root(value)
    return whole is not value and (whole.leaf or whole in seen)


def _flat(result: Any) -> list[Any]:
    """The tensors of a result, lists opened."""
    if result is None or isinstance(result, torch.Tensor):
        return [result]
    return [tensor for part in result for tensor in _flat(part)]


def _seen_as(tensor: torch.Tensor, spec: Spec) -> bool:
    if tensor.stride() != spec.stride or tensor.storage_offset() != spec.offset:
        return False
    return tensor.is_conj() + 2 * tensor.is_neg() == spec.bits


def _place(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


record.run_ahead = run
record.keep_ahead = keep
record.tells = tells
record.stop_ahead = stop
