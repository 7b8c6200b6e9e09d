"""What a pure function may call: operations whose schemas say that they only compute, and a few functions of Python.

An operation is judged by its ATen schemas: it returns tensors, writes to none, and what its results look like does not
depend on data.  Whether it draws random numbers is seen when it is run, since some do only if they are asked to
(``dropout`` while training).
"""

from __future__ import annotations

import functools
import math
import operator
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import overrides

_UNSUITABLE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_HOMES = (torch._C._VariableFunctions, torch._C._nn, torch._C._linalg, torch._C._special, torch._C._fft)  # type: ignore


@functools.cache
def is_pure_operation(name: str) -> bool:
    """Whether every overload of this ATen operation, ``out=`` and those for plain data apart, only computes tensors."""
    if not torch._C._jit_get_schemas_for_operator(f"aten::{name}"):
        return False
    packet = getattr(torch.ops.aten, name)
    overloads = [each for each in (getattr(packet, one) for one in packet.overloads()) if _is_for_tensors(each)]
    return bool(overloads) and all(map(_only_computes, overloads))


def _is_for_tensors(overload: Any) -> bool:
    schema = overload._schema
    types_ = [str(each.type) for each in (*schema.arguments, *schema.returns)]
    return any("Tensor" in each for each in types_) and not any(a.is_out for a in schema.arguments)


def _only_computes(overload: Any) -> bool:
    schema = overload._schema
    tensors = all(str(each.type) in ("Tensor", "List[Tensor]") for each in schema.returns)
    return bool(
        schema.returns and tensors and not schema.is_mutable and not any(tag in overload.tags for tag in _UNSUITABLE)
    )


def is_operation(function: Any) -> bool:
    """Whether this is a function of PyTorch's (``torch.tanh``) that only computes."""
    if function.__class__ is not types.BuiltinFunctionType:
        return False
    name = function.__name__
    return any(getattr(home, name, None) == function for home in _HOMES) and is_pure_operation(name)


CASTS = frozenset(("float", "double", "half", "bfloat16", "long", "int", "short", "bool"))
# What a tensor tells about itself that its geometry decides.
FACTS = frozenset(("shape", "dtype", "device", "ndim", "is_cuda", "layout", "is_sparse", "is_nested", "is_quantized"))
QUESTIONS = frozenset(("size", "dim", "numel", "nelement", "stride", "is_floating_point", "is_complex", "ndimension"))
VIEWS = frozenset(("T", "mT", "H", "mH"))


def is_method(name: str) -> bool:
    """Whether the method of this name of a tensor only computes, or asks for its geometry."""
    return name in QUESTIONS or name in CASTS or is_pure_operation(name)


# Of plain data, and for the first ones of tensors too, of which they ask what kind or how long they are.
OF_TENSORS: tuple[Any, ...] = (
    len,
    isinstance,
    overrides.has_torch_function,
    overrides.has_torch_function_unary,
    overrides.has_torch_function_variadic,
)
OF_DATA: tuple[Any, ...] = (
    *(range, int, float, bool, str, abs, min, max, round, divmod, pow, sum, sorted, any, all),
    *(each for each in vars(math).values() if callable(each)),
)
OF_ITEMS: tuple[Any, ...] = (tuple, list, enumerate, zip, reversed)  # of any items, which they only arrange

BINARY: dict[str, Callable[[Any, Any], Any]] = {
    "Add": operator.add,
    "Sub": operator.sub,
    "Mult": operator.mul,
    "Div": operator.truediv,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "Pow": operator.pow,
    "MatMult": operator.matmul,
    "BitAnd": operator.and_,
    "BitOr": operator.or_,
    "BitXor": operator.xor,
    "LShift": operator.lshift,
    "RShift": operator.rshift,
}
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "Eq": operator.eq,
    "NotEq": operator.ne,
    "Lt": operator.lt,
    "LtE": operator.le,
    "Gt": operator.gt,
    "GtE": operator.ge,
}
UNARY: dict[str, Callable[[Any], Any]] = {"USub": operator.neg, "UAdd": operator.pos, "Invert": operator.invert}

_PLAIN = frozenset(
    (
        *(int, float, bool, complex, str, type(None), type(Ellipsis), range),
        *(torch.dtype, torch.device, torch.Size, torch.memory_format, torch.layout),
    )
)


def is_data(value: Any) -> bool:
    """Whether this is plain data that cannot change: a number, a text, a dtype, or a tuple of such."""
    kind = value.__class__
    if kind is tuple:
        return all(map(is_data, value))
    if kind is slice:
        return is_data(value.start) and is_data(value.stop) and is_data(value.step)
    return kind in _PLAIN
