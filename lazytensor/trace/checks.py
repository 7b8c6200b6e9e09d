"""Wrong calls that PyTorch's meta kernels let pass: the CPU kernel is asked once for each combination of dtypes and attributes.

A meta kernel tells the shape of a result and often checks no more than that.  Symptoms: ``float_tensor & float_tensor``, a matrix
product of two dtypes and ``x.softmax(7)`` were recorded, and failed only when the graph ran.

The CPU kernel is called on zeros of the same geometry.  An error counts only if no data could have avoided it: it speaks of
dtypes or of a dimension's number, or there is no data at all.
"""

from __future__ import annotations

import re
from typing import Any

import torch

from lazytensor.trace import shapes
from lazytensor.trace.ir import Number, Op, Value, flatten, values_in

# So much work the question may cost, in elements: more where the dtypes are mixed, since most such errors are about that.
_ELEMENTS = 1 << 14
_ELEMENTS_MIXED = 1 << 20
_ABOUT_TYPES = re.compile(r"\bdtypes?\b|scalar type|not implemented for '")

_accepted: set[tuple[Any, ...]] = set()


def ask_cpu(op: Op, args: tuple[Any, ...]) -> None:
    """Raise the error that eager would raise for this call, if the dtypes, a dimension's number or emptiness are at fault."""
    values = list(values_in(args))
    if op.view or not values or not op.name.startswith("aten::"):
        return
    looks = tuple([(v.dtype, len(v.size), v.spec.numel == 0) for v in values])
    attributes = tuple([a for a in flatten(args) if a.__class__ is not Value and a.__class__ is not Number])
    question = (op, looks, attributes)
    if question in _accepted:
        return
    elements = sum(v.spec.numel for v in values)
    if elements > (_ELEMENTS if len({v.dtype for v in values}) == 1 else _ELEMENTS_MIXED):
        return
    try:
        shapes.on_zeros(op, args)
    except Exception as error:
        if _without_remedy(error, values):
            raise error.with_traceback(None) from None
    if len(_accepted) > 10_000:
        _accepted.clear()
    _accepted.add(question)


def _without_remedy(error: Exception, values: list[Value]) -> bool:
    """Whether no data of this geometry would have avoided the error."""
    if isinstance(error, torch.linalg.LinAlgError):
        return False
    text = str(error)
    if all(v.spec.numel == 0 for v in values):
        return True
    return _ABOUT_TYPES.search(text) is not None or text.startswith("Dimension out of range")
