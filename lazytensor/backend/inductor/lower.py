"""From a graph to the FX graph that TorchInductor is given.

Lifted numbers arrive packed: one vector of floats and one of integers, from which each is selected where it is needed.
Both lie on the device of all other tensors.  For an accelerator there would be two other ways.  From a vector in the
CPU's memory Inductor copies each number to the device by a call of its own (``maybe_copy_cpu_scalar``).  A tensor
without dimensions on the CPU it makes an argument of the kernel (``is_unspec_arg``), which costs the device nothing,
but a step of an optimizer has hundreds of numbers, and each would be a tensor to make in every run.  A vector on the
device is one upload, and the kernels stay fused: each loads the numbers that it needs.

An op that takes a number as an argument of its own (``add``'s alpha, ``addcdiv``'s value) is written with the tensor
overloads, so that a changed number changes an input and nothing else.  A number for which there is no such form is
*baked*: compiled as a constant, and compared before every run.

``_foreach_*`` ops are split: Inductor fuses the parts with their neighbours.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import GraphModule
from torch.fx import Node as FxNode

from lazytensor.backend import cpu_only
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.overwrite import overwritten
from lazytensor.trace.ir import Node, Number, Value, flatten
from lazytensor.trace.shapes import call_arguments, root

aten = torch.ops.aten
_CPU = torch.device("cpu")


class Unsupported(RuntimeError):
    """Raised for a graph that Inductor does not compile rightly, or into something that cannot be stored."""


@dataclass
class Lowered:
    """An FX graph and what its callable has to be called with."""

    module: GraphModule
    floats: list[int]  # which numbers (counted among the graph's numbers) make up the vector of floats
    ints: list[int]
    baked: list[int]  # which numbers were compiled as constants
    # which of the graph's outputs the callable returns, in this order; the others are written in place
    returned: list[int]


@dataclass
class Lowering:
    """One pass over a graph that writes the FX graph."""

    graph: Graph
    values: list[Any]  # the numbers' values, for those that are baked
    device: torch.device | None = None  # of every tensor, if they are not plain ones on the CPU
    fx: FxGraph = field(default_factory=FxGraph)
    env: dict[Any, FxNode] = field(default_factory=dict)
    packed: dict[Number, FxNode] = field(default_factory=dict)

    def run(self) -> Lowered:
        """Write the whole graph."""
        graph = self.graph
        for value in graph.data:
            self.env[value] = self.fx.placeholder(value.name)
        liftable = self._liftable()
        floats = [n for n in graph.numbers if n in liftable and n.kind is float]
        ints = [n for n in graph.numbers if n in liftable and n.kind in (int, bool)]
        for name, row in (("floats", floats), ("ints", ints)):
            if row:
                vector = self.fx.placeholder(name)
                for position, number in enumerate(row):
                    self.packed[number] = self.call(aten.select.int, vector, 0, position)
        for node in graph.nodes:
            self._node(node)
        returned = self._outputs()
        place = {n: i for i, n in enumerate(graph.numbers)}
        module = GraphModule({}, self.fx)
        return Lowered(
            module,
            [place[n] for n in floats],
            [place[n] for n in ints],
            sorted(place[n] for n in graph.numbers if n not in liftable),
            returned,
        )

    def baked_positions(self) -> list[int]:
        """Which of the graph's numbers are compiled as constants."""
        liftable = self._liftable()
        return [i for i, n in enumerate(self.graph.numbers) if n not in liftable]

    def _liftable(self) -> set[Number]:
        """The numbers of which every use has a form with tensors."""
        refused: set[Number] = set()
        for node in self.graph.nodes:
            numbers = [a for a in flatten(node.args) if a.__class__ is Number]
            if numbers and (stem(node) not in RULES or any(n.kind is complex for n in numbers)):
                refused.update(numbers)
        return {n for n in self.graph.numbers if n not in refused}

    def call(self, target: Any, *args: Any, **kwargs: Any) -> FxNode:
        """Add one call."""
        return self.fx.call_function(target, args, kwargs)

    def get(self, argument: Any) -> Any:
        """A value's FX node, a baked number's value."""
        if argument.__class__ is Value:
            return self.env[argument]
        if argument.__class__ is Number:
            return self.values[self.graph.numbers.index(argument)]
        if argument.__class__ is torch.device:
            return self.device or _CPU
        return argument

    def scalar(self, number: Any, dtype: torch.dtype | None = None) -> FxNode:
        """A constant as a tensor without dimensions."""
        return self.call(aten.scalar_tensor.default, number, dtype=dtype, device=self.device or _CPU)

    def tensor(self, argument: Any, like: list[Any]) -> Any:
        """A number as a 0-d tensor that promotes as the number would beside these values."""
        if argument.__class__ is not Number or argument not in self.packed:
            return self.get(argument)
        scalar = self.packed[argument]
        if argument.kind is bool:
            return self.call(aten._to_copy.default, scalar, dtype=torch.bool)
        dtype = _narrowed(argument.kind, [(v.dtype, bool(v.size)) for v in like])
        return scalar if dtype is None else self.call(aten._to_copy.default, scalar, dtype=dtype)

    def _node(self, node: Node) -> None:
        name = stem(node)
        if name in RULES and (
            is_foreach(node) or any(a.__class__ is Number and a in self.packed for a in flatten(node.args))
        ):
            if is_foreach(node):
                for value, args in zip(node.outputs, rows(node), strict=True):
                    assert value is not None
                    self._done(value, RULES[name](self, args, node))
            else:
                value = node.outputs[0]
                assert value is not None
                self._done(value, RULES[name](self, list(node.args), node))
            return
        if name in EXPANDED:
            for value, made in zip(node.outputs, EXPANDED[name](self, node), strict=True):
                self._done(value, made)
            return
        made = _as_it_is(self, node)
        returns = node.op.overload._schema.returns
        if len(returns) == 1 and returns[0].type.kind() == "TensorType":
            self._done(node.outputs[0], made)
            return
        parts = spread(node, made, self)
        for value, part in zip(node.outputs, parts, strict=True):
            if value is not None:
                self._done(value, part)

    def _done(self, value: Value | None, made: FxNode) -> None:
        assert value is not None
        self.env[value] = made

    def _outputs(self) -> list[int]:
        """Return each output in memory of its own; write those that replace an input into it."""
        results, returned, seen = [], [], set()
        replaces = overwritten(self.graph)
        writes: list[tuple[FxNode, FxNode]] = []
        for number, value in enumerate(self.graph.outputs):
            source = root(value)
            result = self.env[value]
            if source.leaf or source is not value or source in seen:
                result = self.call(aten.clone.default, result)
            seen.add(source)
            if number in replaces:
                writes.append((self.env[self.graph.data[replaces[number]]], result))
            else:
                results.append(result)
                returned.append(number)
        for target, result in writes:
            self.call(aten.copy_.default, target, result)
        self.fx.output(tuple(results))
        return returned


def _narrowed(kind: type, like: list[tuple[torch.dtype, bool]]) -> torch.dtype | None:
    """The dtype that a packed number needs so as not to widen what it meets; None if its own will do.

    ``like`` has the dtype of each tensor it meets, and whether that has dimensions.  As a tensor without dimensions a
    number leaves tensors of its category alone only if they have some.  Symptom: the sum of a float32 loss and 0.1 was
    float64.
    """

    def category(dtype: torch.dtype) -> int:
        return 2 if dtype.is_floating_point or dtype.is_complex else int(dtype is not torch.bool)

    own = 2 if kind is float else 1
    if any(dimensions and category(dtype) >= own for dtype, dimensions in like):
        return None
    peers = [dtype for dtype, _ in like if category(dtype) >= own]
    if not peers:
        return torch.get_default_dtype() if kind is float else None
    common = functools.reduce(torch.promote_types, peers)
    return common.to_real() if category(common) == own else None


def stem(node: Node) -> str:
    """An op's name for the rules: a ``_foreach_`` op has the rule of its parts."""
    name = node.op.name.removeprefix("aten::")
    return name.removeprefix("_foreach_").partition(".")[0] if name.startswith("_foreach_") else name


def is_foreach(node: Node) -> bool:
    """Whether the op works on lists of tensors, one by one."""
    return node.op.name.startswith("aten::_foreach_") and stem(node) in RULES


def rows(node: Node) -> list[list[Any]]:
    """The arguments of each part of a ``_foreach_`` op: lists are taken apart, anything else goes to every part."""
    count = len(node.args[0])
    return [[a[i] if a.__class__ is tuple else a for a in node.args] for i in range(count)]


def spread(node: Node, made: FxNode, lowering: Lowering) -> list[Any]:
    """The parts of a result that is a tuple or list, nested lists opened."""
    parts: list[Any] = []
    returns = node.op.overload._schema.returns
    if len(returns) == 1:
        return [lowering.call(operator.getitem, made, i) for i in range(len(node.outputs))]
    lists = [r.type.kind() == "ListType" for r in returns]
    if not any(lists):
        return [None if v is None else lowering.call(operator.getitem, made, i) for i, v in enumerate(node.outputs)]
    length = (len(node.outputs) - lists.count(False)) // lists.count(True)
    for i, is_list in enumerate(lists):
        part = lowering.call(operator.getitem, made, i)
        parts += [lowering.call(operator.getitem, part, j) for j in range(length)] if is_list else [part]
    return parts


# --- ops that take numbers, written with tensors ----------------------------------------------------------------------

Rule = Callable[[Lowering, list[Any], Node], FxNode]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register the form of these ops."""

    def register(function: Rule) -> Rule:
        for name in names:
            RULES[name] = function
        return function

    return register


def _tensors(args: list[Any]) -> list[Value]:
    return [a for a in args if a.__class__ is Value]


def _scaled(low: Lowering, operand: Any, factor: Any, like: list[Value]) -> Any:
    """``operand * factor``, left alone for the default factor 1."""
    made = low.tensor(operand, like)
    if factor.__class__ is not Number:
        return made if factor == 1 else low.call(aten.mul.Tensor, made, factor)
    return low.call(aten.mul.Tensor, made, low.tensor(factor, like))


def _binary(target: Any) -> Rule:
    def lower(low: Lowering, args: list[Any], node: Node) -> FxNode:
        like = _tensors(args)
        return low.call(target, low.tensor(args[0], like), low.tensor(args[1], like))

    return lower


def _additive(target: Any) -> Rule:
    def lower(low: Lowering, args: list[Any], node: Node) -> FxNode:
        like = _tensors(args)
        alpha = args[2] if len(args) > 2 else 1
        return low.call(target, low.tensor(args[0], like), _scaled(low, args[1], alpha, like))

    return lower


for _names, _target in {
    ("mul", "mul.Tensor", "mul.Scalar"): aten.mul.Tensor,
    ("div", "div.Tensor", "div.Scalar"): aten.div.Tensor,
    ("eq.Scalar",): aten.eq.Tensor,
    ("ne.Scalar",): aten.ne.Tensor,
    ("lt.Scalar",): aten.lt.Tensor,
    ("le.Scalar",): aten.le.Tensor,
    ("gt.Scalar",): aten.gt.Tensor,
    ("ge.Scalar",): aten.ge.Tensor,
    ("maximum",): aten.maximum.default,
    ("minimum",): aten.minimum.default,
}.items():
    rule(*_names)(_binary(_target))

rule("add", "add.Tensor", "add.Scalar")(_additive(aten.add.Tensor))
rule("sub", "sub.Tensor", "sub.Scalar")(_additive(aten.sub.Tensor))


@rule("rsub.Scalar")
def _rsub(low: Lowering, args: list[Any], node: Node) -> FxNode:
    like = _tensors(args)
    return low.call(aten.sub.Tensor, low.tensor(args[1], like), _scaled(low, args[0], args[2], like))


@rule("addcmul")
def _addcmul(low: Lowering, args: list[Any], node: Node) -> FxNode:
    first, one, two, value = args
    product = low.call(aten.mul.Tensor, _scaled(low, one, value, _tensors(args)), low.get(two))
    return low.call(aten.add.Tensor, low.get(first), product)


@rule("addcdiv")
def _addcdiv(low: Lowering, args: list[Any], node: Node) -> FxNode:
    first, one, two, value = args
    quotient = low.call(aten.div.Tensor, low.get(one), low.get(two))
    if value.__class__ is Number:
        quotient = low.call(aten.mul.Tensor, quotient, low.tensor(value, _tensors(args)))
    elif value != 1:
        quotient = low.call(aten.mul.Tensor, quotient, value)
    return low.call(aten.add.Tensor, low.get(first), quotient)


@rule("lerp", "lerp.Scalar")
def _lerp(low: Lowering, args: list[Any], node: Node) -> FxNode:
    weight = args[2]
    if weight.__class__ is not Number or weight not in low.packed:
        target = aten.lerp.Tensor if weight.__class__ is Value else aten.lerp.Scalar
        return low.call(target, *[low.get(a) for a in args])
    cast = low.call(aten._to_copy.default, low.packed[weight], dtype=args[0].dtype)
    return low.call(aten.lerp.Tensor, low.get(args[0]), low.get(args[1]), cast)


@rule("clamp")
def _clamp(low: Lowering, args: list[Any], node: Node) -> FxNode:
    like = _tensors(args)
    bounds = [None if a is None else _as_tensor(low, a, like) for a in args[1:3]]
    return low.call(aten.clamp.Tensor, low.get(args[0]), *bounds)


@rule("clamp_min")
def _clamp_min(low: Lowering, args: list[Any], node: Node) -> FxNode:
    return low.call(aten.clamp_min.Tensor, low.get(args[0]), _as_tensor(low, args[1], _tensors(args)))


@rule("clamp_max")
def _clamp_max(low: Lowering, args: list[Any], node: Node) -> FxNode:
    return low.call(aten.clamp_max.Tensor, low.get(args[0]), _as_tensor(low, args[1], _tensors(args)))


def _as_tensor(low: Lowering, argument: Any, like: list[Value]) -> Any:
    made = low.tensor(argument, like)
    if isinstance(made, FxNode):
        return made
    return low.scalar(made)


@rule("masked_fill.Scalar")
def _masked_fill(low: Lowering, args: list[Any], node: Node) -> FxNode:
    value = low.call(aten._to_copy.default, _as_tensor(low, args[2], _tensors(args)), dtype=args[0].dtype)
    return low.call(aten.masked_fill.Tensor, low.get(args[0]), low.get(args[1]), value)


@rule("fill.Scalar")
def _fill(low: Lowering, args: list[Any], node: Node) -> FxNode:
    return _filled(low, args[1], node)


@rule("full")
def _full(low: Lowering, args: list[Any], node: Node) -> FxNode:
    return _filled(low, args[1], node)


@rule("scalar_tensor")
def _scalar_tensor(low: Lowering, args: list[Any], node: Node) -> FxNode:
    return _filled(low, args[0], node)


def _filled(low: Lowering, number: Any, node: Node) -> FxNode:
    value = node.outputs[0]
    assert value is not None
    scalar = low.call(aten._to_copy.default, _as_tensor(low, number, [value]), dtype=value.dtype)
    return low.call(aten.clone.default, low.call(aten.expand.default, scalar, list(value.size)))


def _unary(name: str) -> Rule:
    def lower(low: Lowering, args: list[Any], node: Node) -> FxNode:
        return low.call(getattr(aten, name).default, low.get(args[0]))

    return lower


for _name in ("sqrt", "neg", "abs", "exp", "reciprocal", "log", "sigmoid", "tanh", "sign", "rsqrt"):
    RULES[_name] = _unary(_name)


_REMAINDERS = ("remainder.Scalar", "remainder.Tensor", "remainder.Scalar_Tensor")


@rule(*_REMAINDERS)
def _remainder(low: Lowering, args: list[Any], node: Node) -> FxNode:
    """The remainder with the divisor's sign, as the CPU computes it.

    Symptom: ``torch.tensor([1.0]) % float("inf")`` was nan instead of 1 in Inductor's code.
    """
    like = _tensors(args)
    value = node.outputs[0]
    assert value is not None
    dividend, divisor = (
        o if o.__class__ is FxNode else low.scalar(o, value.dtype) for o in (low.tensor(a, like) for a in args)
    )
    if not value.dtype.is_floating_point:
        return low.call(aten.remainder.Tensor, dividend, divisor)
    rest = low.call(aten.fmod.Tensor, dividend, divisor)
    signs = low.call(aten.ne.Tensor, low.call(aten.lt.Scalar, rest, 0), low.call(aten.lt.Scalar, divisor, 0))
    other = low.call(aten.logical_and.default, low.call(aten.ne.Scalar, rest, 0), signs)
    return low.call(aten.where.self, other, low.call(aten.add.Tensor, rest, divisor), rest)


# --- ops that Inductor's code computes otherwise, or cannot call -----------------------------------------------------

EXPANDED: dict[str, Callable[[Lowering, Node], list[FxNode]]] = {}


def _as_it_is(low: Lowering, node: Node) -> FxNode:
    positional, keyword = call_arguments(node.op, node.args, low.get)
    other = cpu_only.instead(node.op) if low.device is not None else None
    if other is not None and not cpu_only.written_out(node.op):
        raise Unsupported(f"{node.op.name} is computed on the CPU")
    return low.call(other or node.op.overload, *positional, **keyword)


def _truth(low: Lowering, node: Node) -> list[FxNode]:
    """Any and all of bytes are bytes, not truth values.

    Symptom: "result 0 is bool[] and was declared uint8[]".
    """
    value = node.outputs[0]
    assert value is not None
    return [low.call(aten._to_copy.default, _as_it_is(low, node), dtype=value.dtype)]


for _name in ("any", "any.dim", "any.dims", "all", "all.dim", "all.dims"):
    EXPANDED[_name] = _truth


def _by_geometry(low: Lowering, node: Node) -> list[FxNode]:
    """A view by explicit geometry, unless it is of numbers that were reinterpreted: Inductor looks through that.

    Symptom: 1.0671e+09 instead of 1.2128 after ``y.view(torch.int32).relu_()``.
    """
    value = node.args[0]
    while not value.leaf and value.node.op.view:
        if value.node.op.name == "aten::view.dtype":
            raise Unsupported("it looks at reinterpreted numbers by explicit geometry, which Inductor gets wrong")
        value = value.node.args[0]
    return [_as_it_is(low, node)]


for _name in ("as_strided", "as_strided_scatter"):
    EXPANDED[_name] = _by_geometry
for _name in _REMAINDERS:  # also where none of the operands is a number
    EXPANDED[_name] = lambda low, node: [_remainder(low, list(node.args), node)]


def _unscale(low: Lowering, node: Node) -> list[FxNode]:
    """The check of ``GradScaler``, as elementwise ops.

    Symptom: "fallback kernels with runtime lookup currently only support tensor returns".
    """
    gradients, found, inverse = node.args
    flag, factor = low.get(found), low.get(inverse)
    scaled = []
    for gradient in gradients:
        wide = low.call(aten._to_copy.default, low.get(gradient), dtype=torch.float32)
        finite = low.call(aten.all.default, low.call(aten.isfinite.default, wide))
        bad = low.call(aten._to_copy.default, low.call(aten.logical_not.default, finite), dtype=torch.float32)
        flag = low.call(aten.maximum.default, flag, bad)
        product = low.call(aten.mul.Tensor, wide, factor)
        scaled.append(low.call(aten._to_copy.default, product, dtype=gradient.dtype))
    return [*scaled, flag]


EXPANDED["_amp_foreach_non_finite_check_and_unscale"] = _unscale
