"""Elementwise and ``_foreach_`` results are inferred from a few elements: they look as eager's do, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from lazytensor.trace import probe, shapes

PROGRAMS: dict[str, Callable[[str], Any]] = {
    "promotion": lambda d: torch.arange(6, device=d).reshape(2, 3) + 0.5,
    "comparison": lambda d: torch.ones(4, 5, device=d) > 2,
    "integer division": lambda d: torch.arange(1, 5, device=d) / torch.arange(1, 5, device=d),
    "remainder": lambda d: torch.arange(4, device=d) % torch.full((4,), 3, device=d),
    "number without dimensions": lambda d: torch.ones(3, dtype=torch.bfloat16, device=d) * torch.tensor(2.0, device=d),
    "broadcast": lambda d: torch.ones(3, 1, device=d) + torch.ones(1, 4, device=d),
    "transposed": lambda d: torch.ones(3, 4, device=d).t().exp(),
    "empty": lambda d: torch.ones(0, 4, device=d).exp(),
    "channels last": lambda d: torch.ones(2, 3, 4, 4, device=d).to(memory_format=torch.channels_last).sigmoid(),
    "one element": lambda d: torch.ones(1, 1, device=d).sqrt(),
    "list": lambda d: torch._foreach_add([torch.ones(2, device=d), torch.ones(3, 4, device=d)], 1.5),
    "list of kinds": lambda d: torch._foreach_mul(
        [torch.ones(2, dtype=torch.int64, device=d), torch.ones(2, device=d), torch.ones(2, 1, device=d)], [2, 3.5, 4]
    ),
    "list of transposed": lambda d: torch._foreach_sqrt([torch.ones(2, 3, device=d).t(), torch.ones(2, 3, device=d)]),
    "list that reduces": lambda d: torch._foreach_norm([torch.ones(2, device=d), torch.ones(3, 4, device=d)]),
    "list that broadcasts": lambda d: torch._foreach_add([torch.ones(2, 2, device=d)], [torch.ones(2, device=d)]),
}


def look(result: Any) -> Any:
    if isinstance(result, tuple | list):
        return [look(r) for r in result]
    return tuple(result.shape), result.stride(), result.dtype, result.tolist()


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_look_as_eagers_do(name: str) -> None:
    assert look(PROGRAMS[name]("ltc")) == look(PROGRAMS[name]("cpu"))


@pytest.mark.parametrize(
    "program",
    [
        lambda d: torch.ones(2, 3, device=d) + torch.ones(2, 4, device=d),
        lambda d: torch.ones(2, dtype=torch.int64, device=d).add_(1.5),
        lambda d: torch.ones(2, device=d).add_(torch.ones(2, 2, device=d)),
        lambda d: torch.ones(2, dtype=torch.bool, device=d) - torch.ones(2, dtype=torch.bool, device=d),
        lambda d: torch._foreach_add_([torch.ones(2, dtype=torch.int64, device=d)], 1.5),
        lambda d: torch._foreach_add([torch.ones(2, device=d)], [torch.ones(3, device=d)]),
    ],
)
def test_errors_are_eagers(program: Callable[[str], Any]) -> None:
    said = []
    for device in ("cpu", "ltc"):
        with pytest.raises(RuntimeError) as caught:
            program(device)
        said.append(str(caught.value).split("\n")[0])
    assert said[0] == said[1]


def test_the_usual_elementwise_op_asks_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A geometry that no other test has, so that nothing is known of it."""
    asked: list[bool] = []
    infer = probe.infer

    def noted(*args: Any) -> Any:
        result = infer(*args)
        asked.append(result is not None)
        return result

    monkeypatch.setattr(shapes.probe, "infer", noted)
    x = torch.ones(7, 13, 17, device="ltc")
    asked.clear()
    y = torch._foreach_mul([x.tanh(), x * 2], 3)
    assert asked == [True, True, True]
    assert y[1].sum().item() == 6 * 7 * 13 * 17
