"""An operation a backend does not support, replaced by operations it does: PyTorch's decomposition tables, node by
node.

The decomposition is run on meta tensors under a mode that records what it calls.  A lifted number is not known when a
graph is compiled, so the decomposition is recorded twice, with two different made-up values for each number: an
argument that stays the same is a constant, one that follows a number is that number, and with anything else (a number
computed from it) the operation is left whole.  It is also left whole if a part is not supported, since one operation in
the interpreter is cheaper than several.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lazytensor.trace import record
from lazytensor.trace.ir import Const, Node, Number, Spec, Value, const, flatten, make_node, spec_of
from lazytensor.trace.shapes import _Stand, call_arguments

Supports = Callable[[Node], bool]
_DEPTH = 8  # decompositions of decompositions


class CannotDecompose(Exception):
    """The operation has to be taken whole."""


@functools.cache
def table() -> dict[Any, Callable[..., Any]]:
    """PyTorch's decompositions by overload."""
    import torch._decomp
    import torch._refs

    return dict(torch._decomp.global_decomposition_table["post_autograd"])


def decompose(node: Node, supports: Supports) -> tuple[list[Node], list[Value | None]]:
    """Supported nodes that compute the same, in order, and what stands for each output.  Raises CannotDecompose."""
    function = _function(node.op.overload)
    numbers = list(dict.fromkeys(a for a in flatten(node.args) if a.__class__ is Number))
    if any(n.kind not in (int, float) for n in numbers):
        raise CannotDecompose("a lifted bool or complex number")
    first = _Recording(node, supports, numbers)
    results = first.run(function)
    if numbers:
        second = _Recording(node, supports, numbers)
        second.run(function)
        _merge(first, second)
    for part in first.nodes:
        if not supports(part):
            raise CannotDecompose(f"{part.op.name} is not supported either")
    outputs = [
        None if v is None or found is None else _declared(first.nodes, found, v.spec)
        for v, found in zip(node.outputs, results, strict=True)
    ]
    return first.nodes, outputs


def _function(overload: Any) -> Callable[..., Any]:
    found = table().get(overload)
    if found is not None:
        return found
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    if has(overload.name(), "CompositeImplicitAutograd"):
        return overload.decompose  # type: ignore[no-any-return]
    if overload.namespace == "aten" and has(overload.name(), "CompositeExplicitAutograd"):
        # A kernel in C++ made of other ops: _foreach_add and its like.
        return functools.partial(overload._op_dk, torch._C.DispatchKey.CompositeExplicitAutograd)  # type: ignore[attr-defined]
    raise CannotDecompose("PyTorch has no decomposition of it")


class _Recording(TorchDispatchMode):
    """What a decomposition calls, as nodes."""

    def __init__(self, node: Node, supports: Supports, numbers: list[Number]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.node = node
        self.supports = supports
        self.nodes: list[Node] = []
        self.values: dict[int, Value] = {}
        self.alive: list[torch.Tensor] = []  # so that no id is used twice
        self.made_up = {
            n: random.randint(1 << 20, 1 << 30) if n.kind is int else random.uniform(0.1, 0.9) for n in numbers
        }
        self.depth = 0

    def run(self, function: Callable[..., Any]) -> list[Value | None]:
        """Record a call of the function on the node's arguments; the values that stand for its outputs."""
        stand = _Stand("meta")

        def convert(argument: Any) -> Any:
            if argument.__class__ is Number:
                return self.made_up[argument]
            made = stand(argument)
            if argument.__class__ is Value:
                self._know(made, argument)
            return made

        positional, keyword = call_arguments(self.node.op, self.node.args, convert)
        try:
            with self:
                result = function(*positional, **keyword)
        except CannotDecompose:
            raise
        except Exception as error:
            raise CannotDecompose(f"its decomposition raised {type(error).__name__}: {error}") from None
        if result is NotImplemented:
            raise CannotDecompose("its decomposition declined")
        found: list[Value | None] = []
        for part in _tensors(result):
            found.append(None if part is None else self._value(part))
        if len(found) != len(self.node.outputs):
            raise CannotDecompose("its decomposition returns something else")
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            raise CannotDecompose(f"its decomposition writes in place ({func.name()})")
        if func.namespace == "prims":
            raise CannotDecompose("its decomposition ends in PyTorch's prims, not in ATen")
        # what is put there afterwards does not show: a kernel may write memory directly
        if "empty" in func._schema.name:
            raise CannotDecompose("its decomposition fills memory")
        result = func(*args, **kwargs)
        made = make_node(
            *self._call(func, args, kwargs),
            [None if t is None else spec_of(t, 0) for t in _tensors(result)],
            self.node.line,
        )
        if not self.supports(made) and self.depth < _DEPTH:
            try:
                inner = _function(func)
            except CannotDecompose:
                pass
            else:
                if (again := self._inner(inner, args, kwargs)) is not NotImplemented:
                    return again
        self.nodes.append(made)
        for tensor, value in zip(_tensors(result), made.outputs, strict=True):
            if tensor is not None and value is not None:
                self._know(tensor, value)
        return result

    def _inner(self, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Record a decomposition inside this one; NotImplemented if it cannot be."""
        self.depth += 1
        before = len(self.nodes)
        try:
            with self:
                return function(*args, **kwargs)
        except CannotDecompose:
            del self.nodes[before:]
            return NotImplemented
        finally:
            self.depth -= 1

    def _call(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, tuple[Any, ...]]:
        """The op and its canonical arguments."""
        canonical = []
        for position, declared in enumerate(func._schema.arguments):
            if not declared.kwarg_only and position < len(args):
                argument = args[position]
            elif declared.name in kwargs:
                argument = kwargs[declared.name]
            else:
                argument = declared.default_value
            canonical.append(self._canonical(argument, declared.type))
        name = func.name()
        return record.op(name, func.is_view if hasattr(func, "is_view") else False), tuple(canonical)

    def _canonical(self, argument: Any, declared: Any) -> Any:
        if isinstance(argument, torch.Tensor):
            return self._value(argument)
        if isinstance(argument, list | tuple):
            return tuple(self._canonical(a, declared) for a in argument)
        if isinstance(argument, bool):
            return argument
        if isinstance(argument, float | complex):
            return const(argument)
        if isinstance(argument, int) and "int" not in str(declared):
            return const(argument)
        return argument

    def _know(self, tensor: torch.Tensor, value: Value) -> None:
        self.values[id(tensor)] = value
        self.alive.append(tensor)

    def _value(self, tensor: torch.Tensor) -> Value:
        found = self.values.get(id(tensor))
        if found is None:
            raise CannotDecompose("its decomposition makes a constant tensor")
        return found


def _tensors(result: Any) -> list[Any]:
    if isinstance(result, list | tuple):
        return [t for part in result for t in _tensors(part)]
    return [result]


def _merge(first: _Recording, second: _Recording) -> None:
    """Put the numbers where the two recordings differ by their made-up values."""
    if [n.op for n in first.nodes] != [n.op for n in second.nodes]:
        raise CannotDecompose("what it does depends on a number")
    known = {(first.made_up[n], second.made_up[n]): n for n in first.made_up}
    same = {
        b: a
        for one, two in zip(first.nodes, second.nodes, strict=True)
        for a, b in zip(one.outputs, two.outputs, strict=True)
    }

    def merge(a: Any, b: Any) -> Any:
        if a.__class__ is tuple and b.__class__ is tuple and len(a) == len(b):
            return tuple(merge(x, y) for x, y in zip(a, b, strict=True))
        if a is b or a is same.get(b, b):
            return a
        plain = (a.value if a.__class__ is Const else a, b.value if b.__class__ is Const else b)
        if plain in known:
            return known[plain]
        if type(a) is type(b) and a == b:
            return a
        raise CannotDecompose("it computes with a number")

    for one, two in zip(first.nodes, second.nodes, strict=True):
        one.args = merge(one.args, two.args)


def _declared(nodes: list[Node], value: Value, wanted: Spec) -> Value:
    """The value with the geometry that the whole operation declared."""
    if value.spec is wanted:
        return value
    if (value.size, value.dtype) != (wanted.size, wanted.dtype):
        raise CannotDecompose(f"its decomposition gives {value.spec} instead of {wanted}")
    if value.node not in nodes or value.node.op.view:
        copy = make_node(record.op("aten::clone"), (value, None), [wanted], nodes[-1].line if nodes else None)
        nodes.append(copy)
        (made,) = copy.outputs
        assert made is not None
        return made
    value.spec = wanted
    value.plain = wanted.plain
    return value
