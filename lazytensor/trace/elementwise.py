"""The strides that the CPU gives the result of an elementwise op.

PyTorch's meta kernels for these ops are Python and disagree with the C++ iterator about dimensions of length one and
about ties. This is the iterator's rule: operands that all have one dense layout give it to the result; otherwise the
dimensions are sorted by the operands' strides, first operand first, and the result is dense in that order.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lazytensor.trace.ir import contiguous_stride


def strides(shape: tuple[int, ...], operands: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """The strides of an elementwise result of this shape over these (meta) operands."""
    if all(tuple(t.shape) == shape for t in operands):
        if all(t.is_contiguous() for t in operands):
            return contiguous_stride(shape)
        for layout, rank in ((torch.channels_last, 4), (torch.channels_last_3d, 5)):
            if (
                len(shape) == rank
                and layout is torch.channels_last
                and all(t.is_contiguous(memory_format=layout) for t in operands)
            ):
                return _channels_last(shape)
        first = operands[0].stride()
        if all(t.stride() == first and _dense(t) for t in operands):
            return first
    return _sorted(shape, [_aligned(shape, t) for t in operands])


def _channels_last(shape: tuple[int, ...]) -> tuple[int, ...]:
    order = [1, *range(len(shape) - 1, 1, -1), 0]
    stride = [0] * len(shape)
    step = 1
    for dim in order:
        stride[dim] = step
        step *= max(shape[dim], 1)
    return tuple(stride)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether every element has its own place and there are no gaps."""
    step = 1
    for stride, length in sorted((s, n) for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n != 1):
        if stride != step:
            return False
        step *= length
    return True


def _aligned(shape: tuple[int, ...], tensor: torch.Tensor) -> list[int]:
    """An operand's strides over the result's dimensions: zero where it is broadcast."""
    lead = len(shape) - tensor.dim()
    return [0] * lead + [
        0 if n == 1 and shape[lead + i] != 1 else s
        for i, (n, s) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
    ]


def _sorted(shape: tuple[int, ...], operands: list[list[int]]) -> tuple[int, ...]:
    """Sort the dimensions as the iterator does, innermost first, and lay the result out densely in that order."""
    dims = len(shape)
    order = list(range(dims - 1, -1, -1))

    def outside(one: int, two: int) -> int:
        for stride in operands:
            if stride[one] == 0 or stride[two] == 0:
                continue
            if stride[one] != stride[two]:
                return -1 if stride[one] < stride[two] else 1
            if shape[one] > shape[two]:
                return 1
        return 0

    for i in range(1, dims):
        at = i
        for before in range(i - 1, -1, -1):
            comparison = outside(order[before], order[at])
            if comparison > 0:
                order[before], order[at] = order[at], order[before]
                at = before
            elif comparison < 0:
                break
    if order == list(range(dims - 1, -1, -1)):
        return contiguous_stride(shape)
    stride = [0] * dims
    step = 1
    for dim in order:
        stride[dim] = step
        step *= shape[dim]
    return tuple(stride)
