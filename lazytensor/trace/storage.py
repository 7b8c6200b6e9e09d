"""Aliasing lives on the storage: one state object per c10 storage, and tensors that look at it.

A tensor on ``ltc`` is an ordinary ``torch.Tensor`` with true sizes, strides and offset over a storage without memory.
Two Python attributes named ``_lt`` tie it to its value:

* on the storage: the :class:`State`, which holds the storage's current value.  It is shared by every alias, also by
those
  that PyTorch makes in C++ without telling anyone (``detach``, ``.data``, tensors saved for backward), and dies with
  the last of them;
* on the tensor: a shortcut to that state, or to the :class:`ViewState` if the tensor sees only part of the storage.  It
is a
  cache: a tensor without it gets it back from its storage (:func:`state_of`).

``state.value`` is what a kernel reads.  Three cases, which the comments below call by these names:

*pending*   a value of this trace: a node that has not run;
*leaf*      the storage has data, and the data has been used since the last cut: the value is a data leaf;
*unused*    ``None``: for a State, data not used since the last cut; for a ViewState, to be derived from its base again.

The compiled recorder (``native/cells.h``) keeps the values of the tensors that it makes to itself until somebody asks:
:func:`adopt` makes the states of all that are still alive, ``storage._lt`` that of one.

A write never changes a value, it replaces ``state.value``.  A write through a view becomes a new value of the base, in
which the part that the view sees has been replaced (:mod:`lazytensor.trace.scatter`), and every view of it becomes
*unused*.

The base value of a storage always has the geometry ``state.spec``, with offset 0.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from sys import getrefcount
from typing import Any

import torch

from lazytensor import errors
from lazytensor.trace import tensors
from lazytensor.trace.ir import Number, Spec, Value, data_leaf, number_leaf, spec_of


class _Slots:
    """The fields of every kind of state, so that a state can change its kind.

    A field that was never set reads as None.
    """

    __slots__ = ("__weakref__", "base", "data", "error", "number", "parent", "proto", "spec_", "value", "views_")

    value: Value | None  # pending, leaf or unused (see above)
    spec_: Spec | None
    views_: dict[Spec, weakref.ref[ViewState]] | None

    def __getattr__(self, name: str) -> None:
        # Kernels set `value` only, which is what makes a new state cheap.
        return None

    def __deepcopy__(self, memo: dict[int, Any]) -> Forgotten:
        return FORGOTTEN

    def __reduce__(self) -> Any:
        return Forgotten, ()


class State(_Slots):
    """The value of one storage."""

    __slots__ = ()

    data: Any  # device data, when it is not pending; a Future while a cut is still making it
    number: int | None  # which data leaf it is in this trace, or was before it was written
    error: Any  # why there is neither value nor data: the run that should have made it failed

    @property
    def spec(self) -> Spec:
        """The geometry of the base value."""
        if self.spec_ is None:
            assert self.value is not None
            self.spec_ = self.value.spec
        return self.spec_


class ViewedState(State):
    """A State of which views were made: a write has to tell them, so kernels take the slow path for it."""

    __slots__ = ()

    @property
    def views(self) -> dict[Spec, weakref.ref[ViewState]]:
        """The views of this storage by their geometry."""
        if self.views_ is None:
            self.views_ = {}
        return self.views_


class ViewState(_Slots):
    """Part of a storage, as one or more tensors of the same geometry see it."""

    __slots__ = ()

    base: State
    parent: State | ViewState | None  # what the view op was applied to; None: known by its geometry in the base alone
    proto: Value  # how the value was made from the parent's value; never cleared

    @property
    def spec(self) -> Spec:
        """The geometry of the view in its storage."""
        return self.proto.spec


class Forgotten:
    """Stands where a copied ``__dict__`` held the state of the tensor it was copied from: it has no value."""

    __slots__ = ()


FORGOTTEN = Forgotten()

# What has been recorded since the last cut.  Kernels hold these containers, so they are emptied, never replaced.
fresh: list[State | ViewState] = []  # states with a pending value, and views with any value, since the last sweep
live: dict[weakref.ref[State | ViewState], None] = {}  # those that outlived a sweep, in order
numbers: list[Any] = []  # the numbers lifted
leaf_data: list[Any] = []  # the data behind data leaf i
leaf_states: list[weakref.ref[State]] = []  # whose data it was
effects: list[Value] = []  # values that must run although no tensor holds them

uploaded = [0, 0]  # pieces of data given to the device, and their bytes

# Held while a kernel records, once the program has a second thread (lazytensor.device.threads), and during every cut.
lock = threading.RLock()

dead = live.pop
ref = weakref.ref

# Replaced where the compiled recorder is in use, which has states and numbers that are not here yet.
adopt: Callable[[], None] = lambda: None  # noqa: E731  (let them be here)
flush_numbers: Callable[[], None] = lambda: None  # noqa: E731  (only the numbers)
view_in_cpp: Callable[[torch.Tensor], Any] = lambda tensor: None  # noqa: E731  (the view that a tensor sees, if known there)

FRESH = 31  # so many states are held before a sweep: few enough to stay in the nearest cache


def track(state: State | ViewState) -> None:
    """Let the next cut see this state, if a tensor still holds it then."""
    fresh.append(state)
    if len(fresh) > FRESH:
        sweep()


def sweep() -> None:
    """Let go of the fresh states that no tensor holds any more, and hold the others weakly.

    Most states die young.  A weak reference with its callback costs 0.3 µs, three times what a place in this list and
    its share of the sweep do.  A view holds its base, which is then held weakly here and dies when the list is emptied.
    """
    for state in [s for s in fresh if getrefcount(s) > _UNHELD]:
        live[ref(state, dead)] = None
    fresh.clear()


(_UNHELD,) = [getrefcount(s) for s in [State()]]  # counted as above, where only the list holds the state


def lift(number: Any) -> Number:
    """A run-time input for this number, so that its value is not part of the structure."""
    flush_numbers()
    numbers.append(number)
    kind = number.__class__
    try:
        return _number_rows[kind][len(numbers) - 1]
    except (IndexError, KeyError):
        return number_leaf(len(numbers) - 1, kind)


from lazytensor.trace.ir import _number_leaves as _number_rows  # noqa: E402  (the rows themselves, for speed)


def lift_all(values: Any) -> tuple[Number, ...]:
    """Each number of a list lifted."""
    return tuple([lift(v) for v in values])


# --- from tensors to values -----------------------------------------------------------------------------------------


def state_of(tensor: torch.Tensor) -> State | ViewState:
    """The state that this ltc tensor looks at, found through its storage if the tensor lost its shortcut."""
    found = tensor.__dict__.get("_lt")
    if found is None or found is FORGOTTEN:
        base: State = tensor.untyped_storage()._lt  # type: ignore[attr-defined]
        found = view_in_cpp(tensor) or _aliased(base, spec_of(tensor, tensor.device.index))
        tensor._lt = found  # type: ignore[attr-defined]
    return found


def _aliased(base: State, geometry: Spec) -> State | ViewState:
    """The state for a tensor of this geometry over the storage of ``base``."""
    if geometry is base.spec:
        return base
    if base.__class__ is ViewedState:
        view = base.views.get(geometry, _nothing)()
        if view is not None:
            return view
    from lazytensor.trace.scatter import extract

    return new_view(base, None, extract(value_of_state(base), geometry))


def _nothing() -> None:
    return None


def new_view(base: State, parent: State | ViewState | None, value: Value) -> ViewState:
    """A view of ``base`` with the geometry of ``value``; the existing one, if a tensor still has it."""
    if base.__class__ is State:
        base.__class__ = ViewedState
    views = base.views_
    if views is None:
        views = base.views_ = {}
    known = views.get(value.spec, _nothing)()
    if known is not None:
        return known
    view = ViewState()
    view.value = view.proto = value
    view.base = base
    view.parent = parent
    views[value.spec] = ref(view)
    fresh.append(view)
    if len(fresh) > FRESH:
        sweep()
    return view


def value_of(argument: Any) -> Any:
    """The canonical form of a tensor argument: the slow path of what every kernel does in line."""
    if argument is None:
        return None
    if not isinstance(argument, torch.Tensor):
        return lift(argument)
    if argument.device.type != tensors.DEVICE:
        return _foreign(argument)
    return value_of_state(state_of(argument))


def values_of(arguments: Any) -> tuple[Any, ...]:
    """The canonical form of a list of tensors."""
    return tuple([value_of(a) for a in arguments])


def _foreign(tensor: torch.Tensor) -> Value:
    """A tensor of another device as an argument: a CPU scalar is taken along, as CUDA does; all else is an error."""
    if tensor.dim() == 0 and tensor.device.type == "cpu":
        index = len(leaf_data)
        data = tensor.detach().clone()
        leaf_data.append(data)
        leaf_states.append(_nothing)  # type: ignore[arg-type]
        return data_leaf(index, spec_of(data, CPU_SCALAR))
    raise errors.mixed_devices(tensor.device)


CPU_SCALAR = -1  # the device number of a CPU scalar among the leaves: it may meet tensors of any device


def value_of_state(state: State | ViewState) -> Value:
    """The value of a state, made a leaf or derived from its base if it is unused."""
    if state.value is not None:
        return state.value
    chain: list[ViewState] = []
    while state.__class__ is ViewState and state.value is None:
        chain.append(state)
        state = state.parent or state.base
    value = state.value
    if value is None:
        assert isinstance(state, State)
        value = _leaf(state)
    if chain:
        from lazytensor.trace.record import derive
        from lazytensor.trace.scatter import extract

        for view in reversed(chain):
            value = extract(value, view.spec) if view.parent is None else derive(view.proto, value)
            track(view)
            view.value = value
    return value


def _leaf(state: State) -> Value:
    if state.error is not None:
        raise errors.ValueLost(state.error)
    value = data_leaf(len(leaf_data), state.spec)
    state.number = len(leaf_data)
    leaf_data.append(state.data)
    leaf_states.append(ref(state))
    state.value = value
    return value


# --- from values to tensors -----------------------------------------------------------------------------------------


def make(value: Value) -> torch.Tensor:
    """A new tensor over a new storage with this value: the general form of what every kernel does in line."""
    tensor = tensors.new(value.spec)
    state = State()
    state.value = value
    tensor._lt = tensor.untyped_storage()._lt = state  # type: ignore[attr-defined]
    track(state)
    return tensor


def make_optional(value: Value | None) -> torch.Tensor | None:
    """Like :func:`make`; an undefined output stays undefined."""
    return None if value is None else make(value)


def make_data(data: torch.Tensor, device: int) -> torch.Tensor:
    """A new tensor that holds this data.  The caller gives the data away."""
    geometry = spec_of(data, device)
    nbytes = _extent(geometry) * geometry.dtype.itemsize
    if geometry.offset or geometry.bits or data.untyped_storage().nbytes() != nbytes:
        data = data.clone(memory_format=torch.preserve_format)
        geometry = spec_of(data, device)
    uploaded[0] += 1
    uploaded[1] += geometry.nbytes
    tensor = tensors.new(geometry)
    state = State()
    state.value = None
    state.spec_ = geometry
    state.data = data
    tensor._lt = tensor.untyped_storage()._lt = state  # type: ignore[attr-defined]
    return tensor


def _extent(geometry: Spec) -> int:
    if geometry.numel == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(geometry.size, geometry.stride, strict=True))


def make_view(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A new tensor over the storage of ``tensor`` that sees ``value``, which a view op made from the tensor's value.

    That value was read just now, so the tensor has its shortcut.
    """
    parent: Any = tensor._lt  # type: ignore[attr-defined]
    base: Any = parent.base if parent.__class__ is ViewState else parent
    geometry = value.spec
    if tensor.dtype is geometry.dtype:
        with tensors.as_meta:
            alias = tensor.as_strided(geometry.size, geometry.stride, geometry.offset)
    else:
        alias = tensors.alias(tensor, value)
    alias._lt = base if geometry is (base.spec_ or base.spec) else new_view(base, parent, value)  # type: ignore[attr-defined]
    return alias


# --- writes ---------------------------------------------------------------------------------------------------------


def write(tensor: torch.Tensor, value: Value) -> None:
    """Let the tensor have this value, which has the tensor's own geometry: every alias sees it."""
    state = state_of(tensor)
    if isinstance(state, ViewState):
        from lazytensor.trace.scatter import replace

        base = state.base
        value = replace(state, value)
    else:
        base = state
    if base.value is None or base.value.leaf:
        track(base)
    base.value = value
    if base.error is not None:
        base.error = None
    if base.__class__ is ViewedState:
        forget_views(base)


def forget_views(base: State) -> None:
    """Make every view of this storage derive its value again; drop the views that no tensor holds."""
    views: dict[Spec, weakref.ref[ViewState]] = base.views  # type: ignore[assignment]
    for geometry, reference in list(views.items()):
        view = reference()
        if view is None:
            del views[geometry]
        else:
            view.value = None


def set_data(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Let a whole-storage tensor hold this data from now on."""
    state = state_of(tensor)
    assert isinstance(state, State)
    assert data.stride() == state.spec.stride
    state.value = None
    state.error = None
    state.data = data
    if state.__class__ is ViewedState:
        forget_views(state)


def rebase(old: Any, memory: torch.UntypedStorage, value: Value) -> State:
    """Give a storage another base value, of another geometry: what was the base becomes a view of it."""
    from lazytensor.trace.scatter import extract

    geometry = old.spec
    new = ViewedState()
    new.value = value
    track(new)
    memory._lt = new  # type: ignore[attr-defined]
    views = old.views if old.__class__ is ViewedState else {}
    for reference in views.values():
        view = reference()
        if view is not None:
            view.base = new
            view.value = None
            new.views[view.spec] = reference
    old.__class__ = ViewState
    old.base = new
    old.parent = None
    old.data = old.views_ = None
    old.proto = old.value = extract(value, geometry)
    new.views[geometry] = ref(old)
    track(old)
    return new
