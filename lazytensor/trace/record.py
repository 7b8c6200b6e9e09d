"""What happens when a kernel's table lookup misses: infer the outputs, make the node, remember it.

A kernel's hit path is generated code (:mod:`lazytensor.codegen.kernels`).  Everything here runs once for each new piece
of structure, so it can afford PyTorch's meta kernels (20 to 1,300 µs), a walk up the Python stack for the source line,
and asking the CPU for the exact error.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from lazytensor import errors, settings
from lazytensor.trace import shapes, source
from lazytensor.trace.ir import Node, Op, Spec, Value, flatten, make_node, spec, spec_of, values_in
from lazytensor.trace.storage import CPU_SCALAR, make, make_view

ops: dict[str, Op] = {}

# Set by the layer above, which knows how to cut: trace knows nothing of execution.
run_eagerly: Callable[[Any, tuple[Any, ...], Exception], Any]
# Called with a new table entry, and only when nothing but tensors holds values any more: it may cut.
check_budget: Callable[[Any], None] = lambda entry: None  # noqa: E731  (replaced, not called by its name)
# What a new op gives where it is run as it is recorded (lazytensor.execute.ahead), else None; where to keep that; and
# whether it tells what the op's results look like.
run_ahead: Callable[[Op, tuple[Any, ...]], Any] = lambda op, args: None  # noqa: E731
keep_ahead: Callable[[tuple[Value | None, ...], Any], None]
tells: Callable[[Op, Any], bool]
stop_ahead: Callable[[], None] = lambda: None  # noqa: E731


# How the backend in force records some ops otherwise than as themselves (see lazytensor.backend.lowering.IrBuilder).
recordings: dict[str, Callable[..., Any]] = {}


def op(name: str, view: bool = False) -> Op:
    """The one Op of this name."""
    found = ops.get(name)
    if found is None:
        found = ops[name] = Op(name, view)
    return found


mutations: list[Mutation] = []
# Replaced where the compiled recorder is in use, which remembers what the tables told it.
forget_calls: Callable[[], None] = lambda: None  # noqa: E731


def drop_nodes(keep: set[Node]) -> None:
    """Forget every interned node but these.  Leaves stay: they are few and shared by all."""
    forget_calls()
    _inferred.clear()
    unasked.clear()
    shapes.inferred_mutations.clear()
    for each in ops.values():
        if each.table:
            kept = {k: v for k, v in each.table.items() if keep and _nodes(v) <= keep}
            each.table.clear()
            each.table.update(kept)
    for mutation in mutations:
        mutation.apart.clear()
        mutation.assumed.clear()
        if mutation.table:
            kept = {k: v for k, v in mutation.table.items() if keep and _nodes(v) <= keep}
            mutation.table.clear()
            mutation.table.update(kept)


def drop_mutations() -> None:
    """Forget how mutating ops were recorded, when the ops under them are recorded in another way from now on."""
    forget_calls()
    for mutation in mutations:
        mutation.table.clear()


def _nodes(entry: Any) -> set[Node]:
    if entry.__class__ is Value:
        return set() if entry.leaf else {entry.node}
    return set().union(*map(_nodes, entry)) if entry else set()


def intern(op: Op, args: tuple[Any, ...]) -> Any:
    """The outputs of this op on these canonical arguments: a Value, or a tuple or list of values.

    Raises what eager would raise, or :class:`shapes.CannotInfer`.
    """
    entry = op.table.get(args)
    if entry is None:
        entry = op.table[args] = _build(op, args)
    return entry


# The ops, by name without overload, that are not to be recorded but run eagerly (see force_fallback).
forced: frozenset[str] = frozenset()


def force_fallback(names: Iterable[str]) -> None:
    """Let exactly these ops run eagerly from now on: ``aten::sub`` means every overload, in place too.

    Views cannot be forced.
    """
    global forced
    changed = forced ^ frozenset(names)
    forced = frozenset(names)
    forget(changed)


def forget(names: Iterable[str]) -> None:
    """Look at calls of these ops as if they were new, since they are recorded in another way from now on.

    ``aten::sub`` means every overload, in place too.
    """
    stop_ahead()
    forget_calls()
    stems = {name.partition(".")[0] for name in names}
    for each in ops.values():
        if each.name.partition(".")[0] in stems:
            each.table.clear()
    for mutation in mutations:
        if mutation.functional.name.partition(".")[0] in stems:
            mutation.table.clear()
            mutation.apart.clear()
            mutation.assumed.clear()


def _build(op: Op, args: tuple[Any, ...]) -> Any:
    if forced and not op.view and op.name.partition(".")[0] in forced:
        raise shapes.CannotInfer("it is forced to")
    device = _common_device(args)
    data = run_ahead(op, args)
    told = data is not None and tells(op, data)  # noqa: F821
    layout, specs = _look_of(data, device) if told else _inferred_look(op, args, device)
    if op.name in recordings:
        return _as_recorded(recordings[op.name](*args), layout, specs)
    node = make_node(op, shapes.settle(op, args, specs), specs, source.here(op, args))
    if data is not None:
        keep_ahead(node.outputs, data)  # noqa: F821
    entry = _fill(layout, node.outputs)
    if told:
        unasked.append(node)
    return entry


Question = tuple[Op, int, tuple[Any, ...]]
Look = tuple[Any, list[Spec | None]]
# What was inferred, by what the arguments look like: a new structure is often a known op on tensors of known geometry.
_inferred: dict[Question, Look] = {}
# Asked before something is inferred: whether more is known now, from an earlier run of the program.
recall_looks: Callable[[], bool] = lambda: False  # noqa: E731
# New nodes that nobody had to ask about, since running them told it; what they tell is noted when somebody asks.
unasked: list[Node] = []


def _look_of(result: Any, device: int) -> Look:
    """What the tensors of a result look like, and how they stand in it."""
    specs: list[Spec | None] = []
    return _structure(result, device, specs), specs


def _inferred_look(op: Op, args: tuple[Any, ...], device: int) -> Look:
    _inferred.update(_told(unasked))
    unasked.clear()
    question = (op, device, shapes.looks(args))
    known = _inferred.get(question)
    if known is None and recall_looks():
        known = _inferred.get(question)
    if known is None:
        known = _look_of(shapes.infer(op, args), device)
        know_look(question, known)
    return known


def _told(nodes: list[Node]) -> Iterator[tuple[Question, Look]]:
    """What new nodes tell, as questions that need not be asked, with their answers."""
    for node in nodes:
        entry = node.op.table.get(node.args)
        if entry is not None:
            asked = (node.op, _common_device(node.args), shapes.looks(node.args))
            yield asked, (_positions(entry), [None if v is None else v.spec for v in node.outputs])


def known_looks() -> dict[Question, Look]:
    """What is known of the results of ops, by op, device and what the arguments look like; from any thread."""
    return dict(_inferred) | dict(_told(list(unasked)))


def know_look(question: Question, look: Look) -> None:
    """From now on this need not be asked."""
    if len(_inferred) > 100_000:
        _inferred.clear()
    _inferred[question] = look


def _positions(entry: Any) -> Any:
    """A table entry with the number of each output in place of its value."""
    numbers = itertools.count()

    def each(part: Any) -> Any:
        return type(part)(map(each, part)) if isinstance(part, tuple | list) else next(numbers)

    return each(entry)


def _structure(result: Any, device: int, specs: list[Spec | None]) -> Any:
    """Replace each tensor of a meta result by its number among the outputs."""
    if result is None or isinstance(result, torch.Tensor):
        specs.append(None if result is None else spec_of(result, device))
        return len(specs) - 1
    if isinstance(result, tuple | list):
        kind = list if isinstance(result, list) else tuple
        return kind(_structure(r, device, specs) for r in result)
    raise shapes.CannotInfer(f"it returns a {type(result).__name__}")


def _as_recorded(entry: Any, layout: Any, specs: list[Spec | None]) -> Any:
    """What a backend's own recording of an op gave, which must look like the op's own results."""
    values = [entry] if entry.__class__ is Value else list(flatten(tuple(entry)))
    for value, wanted in zip(values, specs, strict=True):
        if wanted is not None and (value.size, value.dtype) != (wanted.size, wanted.dtype):
            raise RuntimeError(f"the backend recorded {value!r} for a result of {wanted}")
    laid = [v if w is None or v.spec is w else conform(v, w) for v, w in zip(values, specs, strict=True)]
    return _fill(layout, tuple(laid))


def _fill(layout: Any, outputs: tuple[Value | None, ...]) -> Any:
    if isinstance(layout, int):
        return outputs[layout]
    return type(layout)(_fill(part, outputs) for part in layout)


def _common_device(args: tuple[Any, ...]) -> int:
    device = None
    for argument in args:
        if argument.__class__ is torch.device:  # a factory: tensors among the arguments give their geometry only
            index = argument.index or 0
            if index >= settings.devices:
                raise errors.NoSuchDevice(index, settings.devices)
            return index
    for argument in values_in(args):
        index = argument.spec.device
        if index in (CPU_SCALAR, device):
            continue
        if device is not None:
            raise errors.mixed_devices(torch.device("ltc", index), f"ltc:{device}")
        device = index
    return 0 if device is None else device


# --- entry points of generated kernels --------------------------------------------------------------------------------


def record(op: Op, args: tuple[Any, ...]) -> Any:
    """Record a functional op that was not in its table; the result is tensors."""
    try:
        entry = intern(op, args)
    except shapes.CannotInfer as reason:
        return run_eagerly(op.overload, args, reason)  # noqa: F821  (set by the layer above)
    tensors = wrap(entry)
    check_budget(entry)
    return tensors


def record_view(op: Op, tensor: torch.Tensor, args: tuple[Any, ...]) -> Any:
    """Record a view op that was not in its table; the result aliases ``tensor``."""
    entry = intern(op, args)
    if entry.__class__ is Value:
        return make_view(tensor, entry)
    return [make_view(tensor, v) for v in entry]


def wrap(entry: Any) -> Any:
    """New tensors for a table entry: a value, or a tuple or list of values."""
    if entry.__class__ is Value:
        return make(entry)
    if entry is None:
        return None
    return type(entry)(wrap(part) for part in entry)


def derive(proto: Value, parent: Value) -> Value:
    """The value that the view op behind ``proto`` makes from another value of its parent."""
    node = proto.node
    args = (parent, *node.args[1:])
    entry = intern(node.op, args)
    return entry if entry.__class__ is Value else entry[proto.index]  # type: ignore[no-any-return]


class Mutation:
    """An op that writes into some of its arguments, seen as a functional op whose results replace them.

    ``table`` maps the canonical arguments to ``(returns, written)``: the values to return and the values the written
    arguments take, each already of the written tensor's own geometry and dtype.  ``apart`` maps them likewise where
    this is true only if the tensors behind them do not share memory, which the values alone cannot tell.  ``assumed``
    has those of them of which it may be true for any, which is looked into when they come again.
    """

    __slots__ = ("_overload", "apart", "assumed", "functional", "name", "outs", "positions", "table")

    def __init__(self, name: str, functional: str, positions: tuple[int, ...] = (), outs: int = 0) -> None:
        self.name = name
        self.functional = op(functional)
        self.positions = positions  # which arguments are written; for an out= op none of its functional arguments
        self.outs = outs  # how many out= arguments follow
        self.table: dict[tuple[Any, ...], Any] = {}
        self.apart: dict[tuple[Any, ...], Any] = {}
        self.assumed: set[tuple[Any, ...]] = set()
        self._overload: Any = None
        mutations.append(self)

    @property
    def overload(self) -> Any:
        """The mutating ``OpOverload`` itself."""
        if self._overload is None:
            self._overload = Op(self.name).overload
        return self._overload

    @property
    def keywords(self) -> tuple[str, ...]:
        """The names of the keyword-only arguments, those of out= left out."""
        return tuple(a.name for a in self.overload._schema.arguments if a.kwarg_only and not a.is_out)

    def _functional_arguments(self, args: tuple[Any, ...], outs: tuple[Spec, ...]) -> tuple[Any, ...]:
        """The same call of the functional op: a factory's out= form has no dtype and no device, they are its out
        tensor's.
        """
        wanted = self.functional.overload._schema.arguments
        if len(wanted) == len(args):
            return args
        names = [a.name for a in self.overload._schema.arguments if not a.is_out]
        given = dict(zip(names, args, strict=True))
        given |= {"dtype": outs[0].dtype, "device": torch.device("ltc", outs[0].device)}
        return tuple([given.get(a.name) for a in wanted])

    def miss(
        self,
        args: tuple[Any, ...],
        outs: tuple[Spec, ...] = (),
        shared: Callable[[], bool] = lambda: False,
        out_values: tuple[Value, ...] = (),
    ) -> Any:
        """Work out and remember the table entry for these arguments.  Raises what eager would.

        ``shared`` says whether what is written shares memory with another argument; ``out_values`` are given if out=
        does.
        """
        known = self.apart.get(args) if not outs else None
        if known is not None and args not in self.assumed and not shared():
            return known
        written = [args[i] for i in self.positions]
        for value in values_in(written):
            if value.spec.device == CPU_SCALAR:
                raise errors.mixed_devices(torch.device("cpu"))
        device = outs[0].device if outs else values_in(written)[0].spec.device
        asked = outs
        if outs:
            shapes.check_overlap(self, args, outs)
            # An out= tensor of another size is resized: to ask about an empty one spares PyTorch's warning, which is
            # ours.
            results = _listed(intern(self.functional, self._functional_arguments(args, outs)))
            asked = tuple([o if o.size == v.size else _empty(o) for o, v in zip(outs, results, strict=True)])
        else:
            twice, itself = shapes.suspicions(args, written)
            again = args in self.assumed
            self.assumed.discard(args)
            if not itself and (not twice or not (again or shared())):
                found = self._in_place(args, written)
                if found is not None and twice:
                    # True here.  To find out whether it is for any takes a hundred times as long, and may be for this
                    # one step: the gradient of x * x is the sum of two that are the same.
                    self.assumed.add(args)
                    self.apart[args] = found
                elif found is not None:
                    self.table[args] = found
                if found is not None:
                    return found
        wanted, general = shapes.infer_mutation(self, args, asked, device, shared, out_values)
        results = _listed(intern(self.functional, self._functional_arguments(args, outs)))
        count = len(wanted)
        if outs and any(v.dtype is not o.dtype for v, o in zip(results, outs, strict=True)):
            shapes.check_out(self, args, outs, results)
        if outs:
            wanted = [w if w is o else _resized(w, v.spec) for w, o, v in zip(wanted, outs, results, strict=True)]
        new = [_conform_all(v, w) for v, w in zip(results[len(results) - count :], wanted, strict=True)]
        found = (results[: len(results) - count], new)
        if general:
            self.table[(*args, *outs, *out_values)] = found
        elif not outs:
            self.apart[args] = found
        return found

    def _in_place(self, args: tuple[Any, ...], written: list[Any]) -> Any:
        """The table entry, if the functional op's results look like what they are written to.  If nothing else shares
        the memory of that, there is nothing that the mutating op could refuse.
        """
        try:
            results = _listed(intern(self.functional, args))
        except Exception:  # what the mutating op has to say about it is asked next
            return None
        split = len(results) - len(written)
        for value, old in zip(results[split:], written, strict=True):
            if old.__class__ is tuple:
                if any(not _fits(v, o) for v, o in zip(value, old, strict=True)):
                    return None
            elif not _fits(value, old):
                return None
        return results[:split], results[split:]


def _fits(value: Value | None, written: Value) -> bool:
    """Whether a value can be written as it is: see :func:`conform`."""
    return value is not None and value.spec is written.spec and not value.leaf and not value.node.op.view


def _listed(entry: Any) -> list[Any]:
    return list(entry) if entry.__class__ is tuple else [entry]


def _empty(out: Spec) -> Spec:
    return spec((0,), (1,), 0, out.dtype, out.device)


def _resized(wanted: Spec, result: Spec) -> Spec:
    """The geometry of an out= tensor that was resized: it is laid out as a new result would be."""
    if wanted.size != result.size or wanted.offset:
        return wanted
    return spec(result.size, result.stride, 0, wanted.dtype, wanted.device)


def _conform_all(value: Any, wanted: Any) -> Any:
    if wanted.__class__ is Spec:
        return conform(value, wanted)
    return [conform(v, w) for v, w in zip(value, wanted, strict=True)]


def conform(value: Value, wanted: Spec) -> Value:
    """The same elements with this dtype and these strides: what a write into existing memory does to them."""
    have = value.spec
    if have is wanted and not value.leaf and not value.node.op.view:
        return value
    layout = intern(
        op("aten::empty_strided"),
        (wanted.size, wanted.stride, wanted.dtype, None, torch.device("ltc", wanted.device), None),
    )
    return intern(op("aten::copy"), (layout, value, False))  # type: ignore[no-any-return]
