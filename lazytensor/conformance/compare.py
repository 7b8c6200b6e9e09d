"""Whether two results agree: their structure, dtype, shape, strides, and every bit of their elements.

Whether a conjugation or negation was carried out or only marked on the tensor is left to the kernel.

A *result* is any tree of lists, tuples and dicts whose leaves are tensors or plain Python objects.  One side was
computed by CPU eager and is the definition; the other by the device under test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_flatten

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Rule:
    """What has to agree."""

    exact: bool = True  # every bit; otherwise within PyTorch's tolerance for the dtype
    values: bool = True  # False for memory that was never written
    strides: bool = True
    grad_flags: bool = True  # requires_grad


def difference(expected: Any, found: Any, rule: Rule) -> str | None:
    """The first way in which two results differ, as a sentence; None if they agree."""
    left, left_structure = tree_flatten(expected)
    right, right_structure = tree_flatten(found)
    if left_structure != right_structure and len(left) != len(right):
        return f"the results have {len(right)} parts, CPU's have {len(left)}"
    for number, (a, b) in enumerate(zip(left, right, strict=True)):
        told = _leaf(a, b, rule)
        if told is not None:
            return told if len(left) == 1 else f"part {number}: {told}"
    return None


def _leaf(expected: Any, found: Any, rule: Rule) -> str | None:
    if isinstance(expected, torch.Tensor):
        if not isinstance(found, torch.Tensor):
            return f"is a {type(found).__name__}, on CPU a tensor"
        return _tensor(expected, found, rule)
    if type(expected) is not type(found):
        return f"is a {type(found).__name__}, on CPU a {type(expected).__name__}"
    if isinstance(expected, float | complex):
        same = expected == found or (expected != expected and found != found)
        if not same and not rule.exact and isinstance(expected, float):
            same = math.isclose(expected, found, rel_tol=1e-5, abs_tol=1e-5)
        return None if same else f"is {found!r}, on CPU {expected!r}"
    if isinstance(expected, int | bool | str | torch.dtype | torch.Size | None):
        return None if expected == found else f"is {found!r}, on CPU {expected!r}"
    return None


def _tensor(expected: torch.Tensor, found: torch.Tensor, rule: Rule) -> str | None:
    for name in ("dtype", "shape", "layout", "requires_grad"):
        a, b = getattr(expected, name), getattr(found, name)
        if a != b and (rule.grad_flags or name != "requires_grad"):
            return f"{name} is {b}, on CPU {a}"
    if expected.layout is not torch.strided:
        return _values(expected.to_dense(), found.to_dense().cpu(), rule) if rule.values else None
    if rule.strides and expected.numel() and significant_strides(expected) != significant_strides(found):
        return f"strides are {found.stride()}, on CPU {expected.stride()}"
    return _values(expected.detach(), found.detach().cpu(), rule) if rule.values else None


def significant_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of the dimensions that have more than one element: PyTorch leaves the others to the kernel."""
    return tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)


def _values(expected: torch.Tensor, found: torch.Tensor, rule: Rule) -> str | None:
    a, b = plain(expected), plain(found)
    same = torch.equal(bits(a), bits(b))
    if same or a.numel() == 0:
        return None
    if not rule.exact and (a.is_floating_point()):
        try:
            torch.testing.assert_close(b, a, equal_nan=True)
        except AssertionError:
            pass
        else:
            return None
    unequal = bits(a) != bits(b)
    count = int(unequal.sum())
    first = tuple(int(i) for i in unequal.nonzero()[0])
    worst = ""
    if a.is_floating_point():
        worst = f", by at most {float((a - b).abs().nan_to_num(nan=math.inf).max()):.3g}"
    return (
        f"{count} of {a.numel()} elements differ{worst}: {b[first].item()} at {list(first)}, on CPU {a[first].item()}"
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The elements, contiguous, complex ones as pairs."""
    tensor = tensor.resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.contiguous()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of each element as an integer; one pattern stands for every NaN."""
    if tensor.is_floating_point():
        tensor = tensor.masked_fill(tensor.isnan(), math.nan)
    if tensor.dtype is torch.bool:
        return tensor.to(torch.uint8)
    return tensor.view(_BITS[tensor.element_size()])
