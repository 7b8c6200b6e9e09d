"""Says where two runs of a program differ: bit for bit, or within a tolerance."""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.fuzz.run import Seen


def difference(eager: Seen, lazy: Seen, lines: list[str], tolerance: float = 0.0) -> str | None:
    """The first difference between two runs, in words; None if they agree."""
    for number, line in enumerate(lines):
        one, two = eager.errors.get(number), lazy.errors.get(number)
        if one != two:
            return f"line {number + 1} `{line}`: eager {one or 'does not raise'}; ltc {two or 'does not raise'}"
    for name, value in eager.values.items():
        if name not in lazy.values or not _same_value(value, lazy.values[name], tolerance):
            return f"{name}: eager read {value!r}; ltc read {lazy.values.get(name)!r}"
    for name, facts in eager.tensors.items():
        for fact, expected in facts.items():
            found = lazy.tensors.get(name, {}).get(fact)
            if not same(expected, found, tolerance):
                return f"{name}.{fact}: eager {expected!r}; ltc {found!r}"
    return None


def same(one: Any, two: Any, tolerance: float) -> bool:
    """Whether two facts agree; tensors bit by bit unless there is a tolerance."""
    if isinstance(one, torch.Tensor):
        if not isinstance(two, torch.Tensor) or one.shape != two.shape or one.dtype is not two.dtype:
            return False
        if tolerance == 0.0:
            return _bits(one) == _bits(two)
        return torch.allclose(
            one.to(torch.complex128), two.to(torch.complex128), rtol=tolerance, atol=tolerance, equal_nan=True
        )
    return bool(one == two)


def _bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor; every NaN is the same."""
    tensor = torch.empty(tensor.numel(), dtype=tensor.dtype).copy_(tensor.reshape(-1))
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor).reshape(-1)
    if tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), torch.full_like(tensor, float("nan")), tensor)
    return bytes(tensor.view(torch.uint8).tolist())


def _same_value(one: Any, two: Any, tolerance: float) -> bool:
    if isinstance(one, str) or tolerance == 0.0:
        return repr(one) == repr(two) or (isinstance(one, str) and tolerance > 0.0)
    if isinstance(one, list):
        return (
            isinstance(two, list)
            and len(one) == len(two)
            and all(map(lambda a, b: _same_value(a, b, tolerance), one, two))
        )
    if isinstance(one, bool) or not isinstance(one, int | float | complex):
        return bool(one == two)
    if one != one:
        return bool(two != two)
    return bool(abs(one - two) <= tolerance * (1 + abs(one)) or one == two)
