"""A function that is recorded as a whole: a call with known values is one lookup, and gives what it gave before.

The function's code is replaced by one that hands its arguments to :meth:`Whole.call`; the function itself, its
signature and its place in the program stay.  Calls are handed on to the original code where anything is unusual (a
debugger, a profiler, a mode, a second thread, gradients), and where what it reads or the values it is given are new.

What is remembered of a call is what recording it did: the values of its results, and the numbers that were lifted on
the way.  Since values are interned, the evaluation that proves a function pure can be held against what the function
itself gave: both must give the very same values.
"""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch

from lazytensor import settings
from lazytensor.execute import cut
from lazytensor.functions import evaluate
from lazytensor.functions.allowed import is_data
from lazytensor.functions.reads import GRADIENTS as GRADIENTS
from lazytensor.functions.reads import Reads, Refused, Unsuitable, geometry
from lazytensor.inspect import events
from lazytensor.trace import ir, shapes, storage
from lazytensor.trace.ir import Value
from lazytensor.trace.storage import ViewState
from lazytensor.trace.tensors import DEVICE

MOST_PROOFS = 4  # ways through one function
MOST_CALLS = 64  # calls that are remembered of each
TRIES = 8  # calls in a row that recorded something new or could not be remembered

native: Any = None  # the extension (lazytensor.native), once it is installed
wholes: list[Whole] = []  # every function that was ever looked at
proven: Callable[[], None] = lambda: None  # noqa: E731  (called when one was found to be pure)

_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
_is_traced: Callable[[], Any] = torch._C._get_tracing_state
_is_compiling = torch.compiler.is_dynamo_compiling
_check = settings._ALL["check"]
_wanted = settings._ALL["whole_functions"]


def _values(tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """What tensors are worth."""
    key = native.key_of(tuple(tensors))
    if key is None:
        raise Unsuitable("it works on tensors of another kind")
    return key[1:]  # type: ignore[no-any-return]


def _mode() -> tuple[Any, ...]:
    """What PyTorch's operations depend on beside their arguments, where it may differ."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
    )


class Results:
    """What a call returned, so that it can be given again: values, the views of them, and how they are arranged."""

    __slots__ = ("_storages", "kept", "layout", "single", "values", "views")

    def __init__(self, result: Any, inputs: set[int]) -> None:
        self.values: list[Value] = []
        self.views: list[tuple[Value, ...]] = []
        self._storages = inputs
        self.layout = self._arrange(result)
        del self._storages
        self.single = self.layout == 0 and self.layout.__class__ is int and not self.views[0]
        self.kept = native.keep(tuple(self.values))

    def _arrange(self, part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return self._tensor(part)
        if part.__class__ in (tuple, list):
            return part.__class__, [self._arrange(each) for each in part]
        if is_data(part):
            return (None, part)
        raise Refused(f"it returns a {type(part).__name__}")

    def _tensor(self, tensor: torch.Tensor) -> int:
        if tensor.__class__ is not torch.Tensor or tensor.device.type != DEVICE or tensor.requires_grad:
            raise Refused("it returns a tensor of another kind")
        memory = tensor.untyped_storage()._cdata
        if memory in self._storages:
            raise Refused("it returns a part of its arguments, or the same twice")
        self._storages.add(memory)
        state = storage.state_of(tensor)
        views: list[Value] = []
        while state.__class__ is ViewState:
            if state.parent is None:
                raise Refused("it returns a view that no operation made")
            views.append(storage.value_of_state(state))
            state = state.parent
        value = storage.value_of_state(state)
        if value.leaf:
            raise Refused("it returns what it did not compute")
        self.values.append(value)
        self.views.append(tuple(reversed(views)))
        return len(self.values) - 1

    def give(self) -> Any:
        """The result again, in new tensors."""
        tensors = native.give(self.kept)
        if self.single:
            return tensors[0]
        for number, views in enumerate(self.views):
            for view in views:
                tensors[number] = _seen(tensors[number], view)
        return _filled(self.layout, tensors)

    def same_as(self, other: Results) -> bool:
        """Whether both are the same values in the same arrangement."""
        return (self.layout, self.values, self.views) == (other.layout, other.values, other.views)


def _seen(tensor: torch.Tensor, view: Value) -> torch.Tensor:
    """What a view operation makes of a tensor."""
    node = view.node
    args, kwargs = shapes.call_arguments(node.op, node.args[1:], lambda each: each)
    made = node.op.overload(tensor, *args, **kwargs)
    return made if isinstance(made, torch.Tensor) else made[view.index]


def _filled(layout: Any, tensors: list[torch.Tensor]) -> Any:
    if layout.__class__ is int:
        return tensors[layout]
    kind, parts = layout
    return parts if kind is None else kind(_filled(part, tensors) for part in parts)


class Proof:
    """One way through a function: what it reads, and what calls that read the same have given."""

    __slots__ = ("look", "mode", "specs", "table")

    def __init__(self, look: Callable[..., Any], mode: tuple[Any, ...], specs: list[Any]) -> None:
        self.look = look
        self.mode = mode
        self.specs = specs
        self.table: dict[tuple[Any, ...], tuple[Results, list[Any]]] = {}


class _Before:
    """Where recording stands, to tell what a call did to it."""

    def __init__(self) -> None:
        storage.flush_numbers()
        self.numbers = len(storage.numbers)
        self.cuts = cut.cuts_made()
        self.nodes = ir.nodes_made()
        self.effects = len(storage.effects)

    def lifted(self) -> list[Any]:
        """The numbers since then."""
        storage.flush_numbers()
        return storage.numbers[self.numbers :]

    def trouble(self) -> str | None:
        """Why a call since then cannot be remembered at all."""
        if cut.cuts_made() != self.cuts:
            return "it reads values"
        return "it checks values" if len(storage.effects) != self.effects else None


class Whole:
    """A function of the program, whose calls are looked up."""

    def __init__(self, function: types.FunctionType, refused: Callable[[], None] = lambda: None) -> None:
        code = function.__code__
        self.name = function.__qualname__
        self.place = code.co_filename, code.co_firstlineno
        self.function = function
        self.original = _copy(function)
        self.positional = code.co_argcount
        self.keywords = code.co_varnames[code.co_argcount : code.co_argcount + code.co_kwonlyargcount]
        self.proofs: list[Proof] = []
        self.hits = 0
        self.tries = 0
        self.unsuitable = 0
        self.pause = 0  # calls that are not looked at, after some that were unsuitable
        self.reason: str | None = None  # why it is not recorded as a whole
        self._refused = refused
        self._owner = threading.get_ident()
        wholes.append(self)
        try:
            self._entrance = function.__code__ = _entrance(function, self.call)
        except Refused as reason:
            self._entrance = code
            self.refuse(str(reason))

    def call(self, *args: Any) -> Any:
        """The function's call, all parameters in their order."""
        if _is_compiling():  # by Dynamo, which goes on with the function itself
            return self._run(args)
        if (
            threading.get_ident() != self._owner
            or not native.enabled()
            or _function_modes()
            or _dispatch_modes()
            or _is_traced()
            or sys.gettrace() is not None
            or sys.getprofile() is not None
            or events.profiling()
            or torch.is_autocast_enabled(DEVICE)
            or not _wanted.value
        ):
            return self._run(args)
        mode = _mode()
        for proof in self.proofs:
            if proof.mode != mode:
                continue
            tensors = proof.look(*args)
            key = None if tensors is None else native.key_of(tensors)
            if key is None:
                continue
            found = proof.table.get(key)
            if found is None:
                return self._remember(args, proof, key)
            results, numbers = found
            self.hits += 1
            if _check.value:
                self._compare(args, results, numbers)
            storage.numbers.extend(numbers)
            return results.give()
        return self._prove(args, mode)

    def _run(self, args: tuple[Any, ...]) -> Any:
        if not self.keywords:
            return self.original(*args)
        return self.original(*args[: self.positional], **dict(zip(self.keywords, args[self.positional :], strict=True)))

    # --- calls that are new

    def _remember(self, args: tuple[Any, ...], proof: Proof, key: tuple[Any, ...]) -> Any:
        """Run the function on values that are new in a way that is known."""
        before = _Before()
        result = self._run(args)
        if self._is_settled(before) and [value.spec for value in key[1:]] == proof.specs:
            if len(proof.table) >= MOST_CALLS:
                if self.hits < len(proof.table):
                    self.refuse("its values are new at every call")
                    return result
                proof.table.clear()
            try:
                inputs = {each.untyped_storage()._cdata for each in proof.look(*args)}
                proof.table[key] = Results(result, inputs), before.lifted()
            except Refused as reason:
                self.refuse(str(reason))
        return result

    def _prove(self, args: tuple[Any, ...], mode: tuple[Any, ...]) -> Any:
        """Run the function, then by its source, and if that is pure and gives the same, remember it."""
        if self.pause or any(isinstance(each, torch.Tensor) and each.device.type != DEVICE for each in args):
            self.pause = max(self.pause - 1, 0)
            return self._run(args)
        before = _Before()
        result = self._run(args)
        if not self._is_settled(before):
            return result
        if len(self.proofs) >= MOST_PROOFS:
            if self.hits < TRIES:
                self.refuse("what it reads is new at every call")
                return result
            self.proofs.clear()
        numbers = before.lifted()
        leaves = len(storage.leaf_data)
        generator = torch.default_generator.get_state()
        try:
            reads = Reads([f"a{i}" for i in range(len(args))])
            for number, each in enumerate(args):
                reads.argument(number, each)
            evaluator = evaluate.Evaluator(reads, _values)
            del storage.numbers[before.numbers :]  # they are lifted again
            keywords = dict(zip(self.keywords, args[self.positional :], strict=True))
            again = evaluator.function(self.original, args[: self.positional], keywords)
            if not torch.equal(torch.default_generator.get_state(), generator):
                raise Refused("it draws random numbers")
            if before.lifted() != numbers or len(storage.leaf_data) != leaves:
                raise Refused("it gives something else when it is evaluated")
            used = [(t, name) for t, name in reads.tensors if id(t) in evaluator.used]
            used.sort(key=lambda each: _number(each[0]))
            seen = [(name, geometry(t)) for t, name in reads.tensors if id(t) not in evaluator.used]
            inputs = {t.untyped_storage()._cdata for t, _ in reads.tensors}
            results = Results(result, set(inputs))
            if not results.same_as(Results(again, set(inputs))):
                raise Refused("it gives something else when it is evaluated")
            values = [storage.value_of(t) for t, _ in used]
            proof = Proof(reads.compiled([n for _, n in used], seen, self.name), mode, [v.spec for v in values])
            proof.table[(before.numbers, *values)] = results, numbers
            self.proofs.append(proof)
            self.unsuitable = 0
            proven()
        except Unsuitable as reason:
            self._wait(str(reason))
        except Refused as reason:
            self.refuse(str(reason))
        except Exception as error:  # what the evaluation raised is no news of the program, which has run
            self.refuse(f"its evaluation raised {type(error).__name__}: {error}")
        finally:
            torch.default_generator.set_state(generator)
            storage.flush_numbers()
            storage.numbers[before.numbers :] = numbers
        return result

    def _is_settled(self, before: _Before) -> bool:
        """Whether what a call has done since then can be remembered."""
        trouble = before.trouble()
        if trouble is not None:
            self.refuse(trouble)
            return False
        if ir.nodes_made() == before.nodes:
            self.tries = 0
            return True
        self.tries += 1
        if self.tries > TRIES:
            self._wait("it records something new at every call")
        return False

    def _wait(self, reason: str) -> None:
        """Look at the function again after some calls, ever more, or no more if none was ever of use."""
        self.unsuitable = min(self.unsuitable + 1, TRIES)
        self.pause = 1 << self.unsuitable
        if self.unsuitable == TRIES and not self.hits:
            self.refuse(reason)

    def _compare(self, args: tuple[Any, ...], results: Results, numbers: list[Any]) -> None:
        """Hold what is remembered against the function itself (the setting ``check``)."""
        before = _Before()
        given = Results(self._run(args), set())
        if not given.same_as(results) or before.lifted() != numbers:
            place = ":".join(map(str, self.place))
            raise AssertionError(f"{self.name} at {place} gives other values than those that are remembered")
        del storage.numbers[before.numbers :]

    def refuse(self, reason: str) -> None:
        """Let the function be what it was."""
        if self.reason is None:
            self.reason = reason
            self.proofs.clear()
            if self.function.__code__ is self._entrance:
                self.function.__code__ = self.original.__code__
            self._refused()


def forget() -> None:
    """Forget every call: the values that are remembered may be interned anew."""
    for each in wholes:
        for proof in each.proofs:
            proof.table.clear()


def _number(tensor: torch.Tensor) -> int:
    """Which leaf of this trace a tensor is, so that a lookup makes leaves in the order in which the function does."""
    value = storage.value_of(tensor)
    return int(value.node.args[1]) if value.leaf else -1


def _copy(function: types.FunctionType) -> types.FunctionType:
    made = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    made.__qualname__ = function.__qualname__
    return made


def _original(function: types.FunctionType) -> types.FunctionType:
    return next((w.original for w in wholes if w.function is function and w.reason is None), function)


evaluate.original = _original

# By number.  An entrance imports this list: the globals of its function are the program's, and Dynamo, which may have
# to read the entrance, knows no constants that are objects.
handlers: list[Callable[..., Any]] = []
_VARIABLE = 4 | 8  # *args and **kwargs
_GENERATOR = 0x20 | 0x80 | 0x100 | 0x200  # generators and coroutines


def _entrance(function: types.FunctionType, handler: Callable[..., Any]) -> types.CodeType:
    """Code with the signature of a function that hands its arguments, all by position, to the handler."""
    code = function.__code__
    if code.co_flags & (_VARIABLE | _GENERATOR):
        raise Refused("it takes any number of arguments" if code.co_flags & _VARIABLE else "it is a generator")
    if code.co_freevars:
        raise Refused("it has variables of a function around it")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    parts = [f"p{i}" for i in range(len(names))]
    declared = [
        *parts[: code.co_posonlyargcount],
        *(["/"] if code.co_posonlyargcount else []),
        *parts[code.co_posonlyargcount : code.co_argcount],
        *(["*"] if code.co_kwonlyargcount else []),
        *parts[code.co_argcount :],
    ]
    lines = (
        f"def entrance({', '.join(declared)}): from {__name__} import handlers; "
        f"return handlers[{len(handlers)}]({', '.join(parts)})"
    )
    made = compile("\n" * (code.co_firstlineno - 1) + lines, code.co_filename, "exec")
    inner = next(each for each in made.co_consts if isinstance(each, types.CodeType))
    handlers.append(handler)
    return inner.replace(
        co_varnames=(*names, *inner.co_varnames[len(names) :]), co_name=code.co_name, co_qualname=code.co_qualname
    )
