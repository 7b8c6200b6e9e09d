"""Runs a function by its source, one admitted step after the other, and so proves that it is pure.

The part of Python that is admitted computes tensors and plain data, reads, loops, branches on plain data, and calls
what is admitted in turn.  Nothing in it can change anything that is seen from outside, and nothing can depend on the
data of a tensor.  Whatever else is met on the way refuses the function (:class:`Refused`).

The steps are taken for real, on real tensors, so their operations are recorded; nobody keeps the results.
"""

from __future__ import annotations

import inspect
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from lazytensor.functions import allowed
from lazytensor.functions.frame import SECONDS, Frame, Return_
from lazytensor.functions.reads import GRADIENTS, TENSORS, Reads, Refused, Unsuitable
from lazytensor.functions.tree import tree_of
from lazytensor.trace import source, storage
from lazytensor.trace.tensors import DEVICE

_DEEP = 40  # calls in calls


class Evaluator:
    """One evaluation of a function on these arguments."""

    def __init__(self, reads: Reads, values: Callable[[list[torch.Tensor]], Iterable[Any]]) -> None:
        self.reads = reads
        self.values = values  # what tensors are worth
        self.used: dict[int, torch.Tensor] = {}  # tensors whose values were used
        self._own: dict[int, Any] = {}  # lists that were made here, which only this evaluation can see
        self.deadline = time.perf_counter() + SECONDS
        self._depth = 0

    # --- functions ---------------------------------------------------------------------------------------------------

    def function(self, function: types.FunctionType, args: Iterable[Any], kwargs: dict[str, Any]) -> Any:
        """What a Python function returns."""
        tree = tree_of(function)
        if function.__closure__:
            raise Refused(f"{function.__qualname__} has variables of a function around it")
        try:
            bound = inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            raise Refused(str(error)) from error
        given = set(bound.arguments)
        bound.apply_defaults()
        for name, value in bound.arguments.items():
            if name not in given and not self._arranged(value):
                raise Refused(f"the default of {name} can change")
        self._depth += 1
        if self._depth > _DEEP:
            raise Refused("its calls are nested too deeply")
        try:
            Frame(self, function.__globals__, dict(bound.arguments)).run(tree.body)
        except Return_ as returned:
            return returned.value
        finally:
            self._depth -= 1
        return None

    def _arranged(self, value: Any) -> bool:
        return allowed.is_data(value) or (value.__class__ is dict and not value)

    def call(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """A call, if it is admitted."""
        kind = function.__class__
        if kind is types.FunctionType:
            if not source.is_library(function.__code__.co_filename):
                self.reads.code(function)
            return self.function(original(function), args, kwargs)
        if kind is types.MethodType:
            return self.call(function.__func__, [function.__self__, *args], kwargs)
        if isinstance(function, torch.nn.Module):
            self.reads.module_call(function)
            return self.call(self.attribute(function, "forward"), args, kwargs)
        if allowed.is_operation(function) and "out" not in kwargs:
            return self.operate(lambda a, k: function(*a, **k), args, kwargs)
        owner = getattr(function, "__self__", None)
        if isinstance(owner, torch.Tensor) and allowed.is_method(function.__name__) and "out" not in kwargs:
            if function.__name__ in allowed.QUESTIONS:
                return function(*args, **kwargs)
            name = function.__name__
            return self.operate(lambda a, k: getattr(a[0], name)(*a[1:], **k), [owner, *args], kwargs)
        if owner is not None and id(owner) in self._own and function.__name__ in ("append", "extend"):
            return function(*map(self.arranged, args))
        return self._builtin(function, args, kwargs)

    def _builtin(self, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if any(function is each for each in allowed.OF_ITEMS):
            made = list(function(*map(self.items, args), **kwargs))
            return tuple(made) if function is tuple else self.own(made)
        if any(function is each for each in allowed.OF_TENSORS):
            if function is isinstance and not _is_plain_check(args[1]):
                raise Refused("it asks for a class that answers itself")
            if function is len and self.reads.is_outside(args[0]) and not isinstance(args[0], torch.Tensor):
                return len(self.items(args[0]))
            return function(*args, **kwargs)
        if any(function is each for each in allowed.OF_DATA):
            if all(map(allowed.is_data, [*args, *kwargs.values()])):
                return function(*args, **kwargs)
            if len(args) == 1 and args[0].__class__ is list and all(map(allowed.is_data, args[0])):
                return function(*args, **kwargs)
        raise Refused(f"it calls {getattr(function, '__qualname__', None) or type(function).__name__}")

    def own(self, made: list[Any]) -> list[Any]:
        """A list that was made here."""
        self._own[id(made)] = made
        return made

    # --- tensors -----------------------------------------------------------------------------------------------------

    def operate(self, run: Callable[[list[Any], dict[str, Any]], Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        """An operation on these arguments, which must leave them as they were.

        Some write to an argument and do not say so in their schema: ``batch_norm`` does to its running statistics.
        What was written is put back, and the function refused.
        """
        args = [self.arranged(each) for each in args]
        kwargs = {name: self.arranged(each) for name, each in kwargs.items()}
        tensors = [each for each in _flat([args, list(kwargs.values())]) if isinstance(each, torch.Tensor)]
        for each in tensors:
            self._check(each)
            self.used[id(each)] = each
        before = self.values(tensors)
        result = run(args, kwargs)
        after = self.values(tensors)
        written = [(each, old) for each, old, new in zip(tensors, before, after, strict=True) if new is not old]
        for each, value in written:
            storage.write(each, value)
        if written:
            raise Refused("one of its operations writes to an argument")
        for each in _flat([result]):
            if isinstance(each, torch.Tensor):
                self._check(each)
            elif not allowed.is_data(each):
                raise Refused(f"one of its operations gives a {type(each).__name__}")
        return self.own(result) if result.__class__ is list else result

    def _check(self, tensor: torch.Tensor) -> None:
        if tensor.__class__ not in TENSORS or tensor.device.type != DEVICE:
            raise Unsuitable(f"it works on a {type(tensor).__name__} of {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise Unsuitable(GRADIENTS)

    def arranged(self, value: Any) -> Any:
        """An argument as it may be handed on: tensors and plain data, in lists and tuples that cannot change."""
        kind = value.__class__
        if isinstance(value, torch.Tensor) or allowed.is_data(value):
            return value
        if kind is slice:
            return slice(*(self.arranged(each) for each in (value.start, value.stop, value.step)))
        if kind in (list, tuple):
            return kind(self.arranged(each) for each in self.items(value))
        raise Refused(f"it hands on a {kind.__name__}")

    # --- objects -----------------------------------------------------------------------------------------------------

    def items(self, value: Any) -> list[Any]:
        """What a loop over this sees."""
        kind = value.__class__
        if id(value) in self._own:
            return list(value)
        if kind in (range, torch.Size, str) or (kind is tuple and not self.reads.is_outside(value)):
            return list(value)
        if kind in (list, tuple, torch.nn.ModuleList, torch.nn.Sequential):
            return self.reads.items(value)
        raise Refused(f"it goes through a {kind.__name__}")

    def item(self, value: Any, key: Any) -> Any:
        """``value[key]``."""
        kind = value.__class__
        if isinstance(value, torch.Tensor):
            return self.operate(lambda a, k: a[0][a[1]], [value, key], {})
        if not allowed.is_data(key):
            raise Refused("it looks up an object")
        if (
            id(value) in self._own
            or kind in (torch.Size, str, range)
            or (kind is tuple and not self.reads.is_outside(value))
        ):
            found = value[key]
            return self.own(found) if found.__class__ is list else found
        if kind is dict or (kind in (list, tuple) and key.__class__ is int):
            return self.reads.item(value, key)
        if kind in (torch.nn.ModuleList, torch.nn.Sequential) and key.__class__ is int:
            return self.items(value)[key]
        raise Refused(f"it looks into a {kind.__name__}")

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``."""
        if isinstance(owner, torch.Tensor):
            if name in allowed.FACTS:
                return getattr(owner, name)
            if name in allowed.VIEWS:
                return self.operate(lambda a, k: getattr(a[0], name), [owner], {})
            if allowed.is_method(name):
                return getattr(owner, name)
            raise Refused(f"it asks a tensor for {name}")
        if id(owner) in self._own and name in ("append", "extend"):
            return getattr(owner, name)
        if not isinstance(owner, types.ModuleType):
            _check_plain(owner, name)
        return self.reads.attribute(owner, name)

    def truth(self, value: Any) -> bool:
        """Whether a condition holds, which no tensor decides."""
        if allowed.is_data(value):
            return bool(value)
        if value.__class__ in (list, tuple, torch.nn.ModuleList, torch.nn.Sequential):
            return bool(self.items(value))
        raise Refused(f"it branches on a {type(value).__name__}")


def _is_plain_check(kinds: Any) -> bool:
    """Whether ``isinstance`` asks these classes nothing but who their children are."""
    if kinds.__class__ is tuple:
        return all(map(_is_plain_check, kinds))
    ask: Any = type(kinds)
    return kinds in TENSORS or ask.__instancecheck__ is type.__instancecheck__


def _flat(values: Iterable[Any]) -> Iterable[Any]:
    for each in values:
        if each.__class__ in (list, tuple) or isinstance(each, tuple):
            yield from _flat(each)
        elif each.__class__ is slice:
            yield from (each.start, each.stop, each.step)
        else:
            yield each


def _check_plain(owner: Any, name: str) -> None:
    """Refuse an attribute that code of the program computes."""
    kind = type(owner)
    found = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    if isinstance(owner, type) or getattr(kind, "__getattribute__") is not object.__getattribute__:  # noqa: B009
        raise Refused(f"it asks a {kind.__name__} for {name}")
    if found is not None and hasattr(type(found), "__set__") and not isinstance(found, types.MemberDescriptorType):
        raise Refused(f"{kind.__name__}.{name} is computed")
    if name in getattr(owner, "__dict__", ()) or isinstance(found, types.MemberDescriptorType):
        return
    if found is None and getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__:
        raise Refused(f"{kind.__name__}.{name} is computed")
    if (
        found is not None
        and hasattr(type(found), "__get__")
        and not isinstance(found, types.FunctionType | staticmethod)
    ):
        raise Refused(f"{kind.__name__}.{name} is computed")


# The function behind one that is recorded as a whole; set by `whole`, which puts another code there.
original: Callable[[types.FunctionType], types.FunctionType] = lambda function: function  # noqa: E731
