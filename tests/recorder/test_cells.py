"""Values that the compiled recorder keeps to itself are what Python would have recorded, whenever somebody asks."""

from __future__ import annotations

import _thread
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import subprocess_run
from test_recorder import compiled, needs_it  # noqa: F401  (a fixture)

import lazytensor as lt
from lazytensor.device import recorder
from lazytensor.execute import cut
from lazytensor.trace import record, storage
from lazytensor.trace.storage import State, ViewedState, ViewState

pytestmark = [needs_it, pytest.mark.usefixtures("compiled")]


def known(tensor: torch.Tensor) -> bool:
    """Whether Python knows the state of a tensor; does not ask for it."""
    return "_lt" in tensor.__dict__ or "_lt" in tensor.untyped_storage().__dict__


def steady(program: Callable[[str], Any], device: str = "ltc") -> Any:
    """What the program gives when all that it does has been seen before."""
    for _ in range(2):
        result = program(device)
        lt.sync(wait=True)
    return program(device)


def same(program: Callable[[str], list[torch.Tensor]]) -> None:
    for ours, eager in zip(steady(program), program("cpu"), strict=True):
        assert ours.stride() == eager.stride() and ours.storage_offset() == eager.storage_offset()
        assert torch.equal(ours.cpu(), eager)


def test_python_has_no_part_in_a_call_that_was_seen_before() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0, device=device).reshape(3, 4)
        y = x * 2.5
        return [y, y.t(), (x + x).t()[1:], y.split(2)[0]]

    results = steady(program)
    assert not any(known(t) for t in results)
    waiting = cut.pending()
    assert {State, ViewedState} >= {type(state) for state in waiting}
    assert any(storage.state_of(results[0]) is state for state in waiting)
    assert type(storage.state_of(results[1])) is ViewState and known(results[1])
    for ours, eager in zip(results, program("cpu"), strict=True):
        assert torch.equal(ours.cpu(), eager)


def written_under_its_views(device: str) -> list[torch.Tensor]:
    x = torch.arange(12.0, device=device).reshape(3, 4) + 1
    part, turned = x[1:], x.t()
    corner = part.t()[:2]
    before = corner * 2
    x.mul_(3)
    return [x, part + 1, turned * 2, corner + 0.5, before]


def written_through_its_views(device: str) -> list[torch.Tensor]:
    x = torch.arange(12.0, device=device).reshape(3, 4) + 1
    part = x.t()[1:]
    other = x[0]
    part.mul_(10)
    other += 1
    return [x * 1, part * 2, other.unsqueeze(0) - 1, x.view(-1)[::2] + x.reshape(-1)[1::2]]


def written_in_lists_under_their_views(device: str) -> list[torch.Tensor]:
    a, b = (torch.arange(6.0, device=device).reshape(2, 3) + i for i in range(2))
    turned, kept = a.t(), b[1]
    seen = [turned * 2, kept * 3]
    dead = b.view(-1)[2:]
    del dead
    torch._foreach_add_([a, b], [b.detach() * 2, torch.ones(2, 3, device=device)])
    seen += [turned * 2, kept * 3, a[0]]
    torch._foreach_mul_([b, a], 2.0)
    kept.add_(1)
    return [a, b, *seen, turned + 1, kept]


def back_to_where_it_began(device: str) -> list[torch.Tensor]:
    x = torch.arange(12.0, device=device).reshape(3, 4) * 2
    same_place = x.t().t()
    same_place.add_(1)
    return [x, same_place, x.detach() + 1, x.t().detach() * 2]


def seen_by_autograd(device: str) -> list[torch.Tensor]:
    x = torch.arange(6.0, device=device).reshape(2, 3).requires_grad_()
    w = (torch.arange(12.0, device=device).reshape(4, 3) / 10).requires_grad_()
    y = torch.nn.functional.linear(x.tanh(), w).view(-1, 2, 2).transpose(1, 2)
    (y * y.detach()).sum().backward()
    assert x.grad is not None and w.grad is not None
    return [x.grad, w.grad, y.detach().contiguous()]


def numbers_between(device: str) -> list[torch.Tensor]:
    x = torch.ones(3, device=device)
    y = x * 2.5  # lifted without Python
    z = torch.full((3,), 7.0, device=device)  # lifted by Python
    y = y + 3
    return [torch.clamp(y - z, min=-1.5), y * z / 4, torch._foreach_add([x, y], [1.0, 2.0])[1]]


def grown_under_its_views(device: str) -> list[torch.Tensor]:
    x = (torch.arange(4.0, device=device) - 1).reshape(2, 2)
    turned, row = x.t(), x[1]
    torch.sub(torch.ones(3, 4, device=device), 3, out=row[:])
    return [x * 1, turned + 1, row]


@pytest.mark.parametrize(
    "program",
    [
        grown_under_its_views,
        written_under_its_views,
        written_through_its_views,
        written_in_lists_under_their_views,
        back_to_where_it_began,
        seen_by_autograd,
        numbers_between,
    ],
)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_known_calls_give_what_eager_gives(program: Callable[[str], list[torch.Tensor]]) -> None:
    same(program)


def test_a_view_outlives_its_cut() -> None:
    def program(device: str) -> list[torch.Tensor]:
        x = torch.arange(12.0, device=device).reshape(3, 4) + 1
        part = x.t()[1:]
        lt.sync()
        x.add_(100)
        return [part * 2, part]

    same(program)


def test_any_number_of_views_of_one_storage() -> None:
    def program(device: str) -> list[torch.Tensor]:
        cache = torch.zeros(200, 2, device=device)
        rows = [cache[i] for i in range(200)]
        for i in range(0, 200, 3):
            rows[i].add_(i)
        return [cache, *(row + 1 for row in rows[::7])]

    same(program)


def test_numbers_change_without_a_new_graph() -> None:
    def program(factor: float) -> torch.Tensor:
        x = torch.arange(4.0, device="ltc")
        return (x * factor + 1) ** 2 - factor

    for _ in range(3):
        program(1.5).cpu()
    misses = cut.misses
    for factor in (2.5, -3.25, 0.0):
        assert torch.equal(program(factor).cpu(), (torch.arange(4.0) * factor + 1) ** 2 - factor)
    assert cut.misses == misses


def test_equal_results_are_one_graph_in_whichever_order_they_were_made() -> None:
    def program(turned: bool) -> list[torch.Tensor]:
        x = torch.arange(5.0, device="ltc")
        one, other = (x.cos(), x.sin())[:: -1 if turned else 1]
        if turned:
            storage.state_of(one)  # so that Python knows of this one first
        return [one, other]

    for turned in (False, False, True):
        program(turned)
        misses = cut.misses
        held = program(turned)
        lt.sync(wait=True)
        del held
    assert cut.misses == misses


def test_what_an_op_is_recorded_as_can_change() -> None:
    x = torch.arange(6, device="ltc")
    for _ in range(2):
        assert (x / 2).dtype is torch.float32
    record.force_fallback(["aten::div"])
    try:
        before = lt.metrics.fallbacks().get("aten::div.Tensor", 0)
        assert (x / 2).tolist() == [0, 0.5, 1, 1.5, 2, 2.5]
        assert lt.metrics.fallbacks()["aten::div.Tensor"] == before + 1
    finally:
        record.force_fallback([])
    torch.set_default_dtype(torch.float64)
    try:
        assert (x / 2).dtype is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    assert (x / 2).dtype is torch.float32


def test_states_of_tensors_that_die_elsewhere_are_freed() -> None:
    x = torch.arange(4.0, device="ltc")
    done = threading.Event()
    box = [x * i for i in range(200)]
    asked = [storage.state_of(t) for t in box[::2]]
    del asked

    def drop() -> None:
        box.clear()
        gc.collect()
        done.set()

    _thread.start_new_thread(drop, ())
    total = x
    for _ in range(2000):
        total = total + x
    assert done.wait(20)
    assert torch.equal(total.cpu(), torch.arange(4.0) * 2001)
    assert cut.pending() == []


SECOND_THREAD = """
import _thread, threading
import torch
import lazytensor as lt
from lazytensor.device import recorder

def work(x, out):
    y = x
    for _ in range(3000):
        y = y + 1
    out.append(y)

x = torch.zeros(4, device="ltc")
work(x, [])
lt.sync()
assert recorder.in_use()
out, done = [], threading.Event()
_thread.start_new_thread(lambda: (work(x, out), done.set()), ())  # no thread that anybody was told of
done.wait()
assert not recorder.in_use(), "two threads record and neither takes a lock"
assert out[0].tolist() == [3000.0] * 4
"""


def test_a_thread_that_nobody_told_of_turns_it_off() -> None:
    done = subprocess_run(SECOND_THREAD)
    assert done.returncode == 0, done.stderr


def test_a_device_guard_without_python_answers_for_autograd() -> None:
    assert recorder.in_use()
    x = torch.ones(3, device="ltc:0", requires_grad=True)
    y = torch.ones(3, device="ltc:1", requires_grad=True)
    (x.sin().sum() + y.cos().to("ltc:0").sum()).backward()
    assert x.grad is not None and y.grad is not None and y.grad.device.index == 1
    torch.testing.assert_close(x.grad.cpu(), torch.ones(3).cos())
    torch.testing.assert_close(y.grad.cpu(), -torch.ones(3).sin())


def calls_of_each_way(x: torch.Tensor, y: torch.Tensor) -> None:
    """A call that is found, one that is new, one that Python records, one that fails, and those of other signatures."""
    for _ in range(3):
        (x + y).mul_(y).add_(x, alpha=2)
        torch.lerp(x, y, 0.5), torch.addcmul(x, x, y), torch.where(x > y, x, y), torch.nn.functional.gelu(x)
        torch.softmax(x, 0), x.sum((0,)), x.transpose(0, 1)[1:], torch.nn.functional.layer_norm(x, (3,), None, y[0])
        x.add(y, alpha=torch.tensor(2.0).item()), torch.cat([x, y]), x.unbind(0), torch.linalg.eigh(x @ x.t())
        with pytest.raises(RuntimeError):
            x + y[:2]


def test_a_call_leaves_every_reference_to_its_arguments_as_it_was() -> None:
    x, y = (torch.randn(3, 3).to("ltc") for _ in range(2))
    lt.sync()
    calls_of_each_way(x, y)
    before = [sys.getrefcount(each) for each in (x, y)], x._use_count(), y._use_count()
    calls_of_each_way(x, y)
    assert before == ([sys.getrefcount(each) for each in (x, y)], x._use_count(), y._use_count())
    dead = [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [each() for each in dead] == [None, None]
