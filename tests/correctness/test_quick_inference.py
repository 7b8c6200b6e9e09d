"""Results are inferred from a few elements or from small tensors: they look as eager's do, errors included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.trace import extents, probe

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
    "matrices": lambda d: torch.addmm(
        torch.ones(6, device=d), torch.ones(3, 4, device=d), torch.ones(6, 4, device=d).t()
    ),
    "square matrices": lambda d: torch.ones(4, 4, device=d).t() @ torch.ones(4, 4, device=d),
    "batches of matrices": lambda d: torch.ones(2, 3, 4, device=d).mT.bmm(torch.ones(2, 3, 5, device=d)),
    "norm": lambda d: torch.native_layer_norm(torch.ones(2, 3, 6, device=d), (6,), None, None, 1e-5),
    "statistics of another type": lambda d: torch.native_layer_norm(
        torch.ones(2, 6, dtype=torch.bfloat16, device=d), (6,), torch.ones(6, device=d), torch.ones(6, device=d), 1e-5
    ),
    "statistics that are empty": lambda d: torch.native_batch_norm(
        torch.ones(2, 3, 4, device=d), None, None, torch.ones(3, device=d), torch.ones(3, device=d), False, 0.1, 1e-5
    ),
    "sum over dimensions": lambda d: torch.ones(2, 3, 4, 5, device=d).sum((1, -1), keepdim=True),
    "order kept": lambda d: torch.zeros_like(torch.ones(2, 3, 4, device=d).permute(2, 0, 1)),
    "sizes as arguments": lambda d: torch.ops.aten.embedding_dense_backward(
        torch.ones(3, 4, device=d), torch.tensor([0, 4, 4], device=d), 7, -1, False
    ),
    "a size that is a sum": lambda d: torch.cat([torch.ones(5, 2, device=d), torch.ones(9, 2, device=d)]),
    "a sum that is an extent": lambda d: torch.cat([torch.ones(4, 9, device=d), torch.ones(5, 9, device=d)]),
    "a size that is a quotient": lambda d: torch.nn.functional.max_pool1d(torch.ones(1, 2, 8, device=d), 2),
    "a size that is a difference": lambda d: torch.conv1d(torch.ones(2, 3, 7, device=d), torch.ones(4, 3, 3, device=d)),
    "a size kept by padding": lambda d: torch.conv1d(
        torch.ones(2, 3, 7, device=d), torch.ones(4, 3, 3, device=d), padding=1
    ),
    "a size that is a product": lambda d: torch.ones(2, 3, device=d).repeat(2, 3),
    "a size that is a limit": lambda d: torch.topk(torch.arange(6.0, device=d).reshape(1, 6), 4).values,
    "a part put back": lambda d: torch.ops.aten.slice_backward(torch.ones(3, 2, device=d), [5, 2], 0, 1, 4, 1),
    "columns first": lambda d: torch.linalg.inv_ex(torch.eye(3, device=d))[0],
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
        lambda d: torch.ones(300, 200, device=d) @ torch.ones(201, 300, device=d),
        lambda d: torch.linalg.cross(torch.ones(5, 4, device=d), torch.ones(5, 4, device=d)),
        lambda d: torch.native_group_norm(torch.ones(2, 9, 4, device=d), None, None, 2, 9, 4, 2, 1e-5),
        lambda d: torch.ones(700, 300, device=d).sum(2),
        lambda d: torch.topk(torch.ones(300, device=d), 400),
        lambda d: torch.gather(torch.ones(30, 20, device=d), 0, torch.zeros(5, 21, dtype=torch.int64, device=d)),
        lambda d: torch.ops.aten.select_backward(torch.ones(9, device=d), [30, 9], 0, 31),
        lambda d: torch.ops.aten.select_backward(torch.ones(9, device=d), [8, 9], 0, 9),
        lambda d: torch.ops.aten.select_backward(torch.ones(9, device=d), [2, 9], 0, -3),
        lambda d: torch.nn.functional.batch_norm(
            torch.ones(4, 6, 8, 8, device=d), torch.zeros(5, device=d), torch.ones(5, device=d), training=True
        ),
        lambda d: torch.ones(3, 4, device=d).t().add_(torch.ones(4, device=d)),
    ],
)
def test_errors_are_eagers(program: Callable[[str], Any]) -> None:
    said = []
    for device in ("cpu", "ltc"):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            program(device)
        said.append(str(caught.value).split("\n")[0])
    assert said[0] == said[1]


def answers_of(module: Any, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each question to this module was answered, from now on."""
    answered: list[bool] = []
    infer = module.infer

    def noted(*args: Any) -> Any:
        result = infer(*args)
        answered.append(result is not None)
        return result

    monkeypatch.setattr(module, "infer", noted)
    return answered


def test_the_usual_elementwise_op_asks_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A geometry that no other test has, so that nothing is known of it."""
    x = torch.ones(7, 13, 17, device="ltc")
    answered = answers_of(probe, monkeypatch)
    y = torch._foreach_mul([x.tanh(), x * 2], 3)
    assert answered == [True, True, True]
    assert y[1].sum().item() == 6 * 7 * 13 * 17


def test_the_usual_layers_ask_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = (torch.nn.Linear(19, 37), torch.nn.LayerNorm(37), torch.nn.Linear(37, 41))
    model = torch.nn.Sequential(*layers).to("ltc")
    x, y = torch.ones(43, 19).to("ltc"), torch.zeros(43, dtype=torch.int64).to("ltc")
    lt.sync()
    answered = answers_of(extents, monkeypatch)
    torch.nn.functional.cross_entropy(model(x), y).backward()
    assert len(answered) > 10
    assert all(answered)


def test_batch_norm_and_its_statistics_ask_no_meta_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    norm = torch.nn.BatchNorm2d(47).to("ltc")
    x = torch.ones(11, 47, 8, 8).to("ltc").requires_grad_()
    given = torch.ones(11, 47, 8, 8).to("ltc")
    lt.sync()
    accepted: list[bool] = []
    accepts = extents.accepts
    monkeypatch.setattr(extents, "accepts", lambda *args: accepted.append(accepts(*args)) or accepted[-1])
    answered = answers_of(extents, monkeypatch)
    norm(x).backward(given)
    assert not accepted, "its functional form gives what the statistics look like"
    assert answered[-2:] == [True, True], "forward and backward"
    assert norm.running_mean is not None
    assert norm.running_mean.cpu().allclose(torch.full((47,), 0.1))


def test_a_layer_of_another_width_is_not_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    def linear(rows: int, before: int, after: int) -> tuple[int, ...]:
        return tuple(
            torch.addmm(*[torch.ones(*n, device="ltc") for n in ((after,), (rows, before), (before, after))]).shape
        )

    monkeypatch.setattr(extents, "_answers", {})  # what other tests have asked
    assert linear(2, 53, 59) == (2, 59)
    monkeypatch.setattr(extents, "_small_calls", None)
    assert linear(3, 61, 67) == (3, 67)
    with pytest.raises(TypeError, match="not callable"):
        linear(71, 67, 61)  # other relations between the extents
