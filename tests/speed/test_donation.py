"""An input may be overwritten only when nobody can see its old value."""

from __future__ import annotations

import torch

import lazytensor as lt
from lazytensor.backend.inductor.overwrite import overwritten
from lazytensor.execute import cut


def replaced() -> dict[int, int]:
    """Of the newest graph: which output overwrites which input."""
    return list(cut.computations.values())[-1].graph.replaces


def test_an_update_in_place_may_take_its_own_memory() -> None:
    x = torch.ones(5).to("ltc")
    lt.clear_cache()
    x.mul_(2)
    lt.sync()
    assert replaced() == {0: 0}


def test_compiled_code_overwrites_only_what_is_written_after_every_check() -> None:
    table, counter = torch.ones(7, 3, requires_grad=True), torch.zeros(()).to("ltc")
    table = table.detach().to("ltc").requires_grad_()
    indices = torch.tensor([1, 2]).to("ltc")
    lt.clear_cache()
    torch.nn.functional.embedding(indices, table).square().sum().backward()
    with torch.no_grad():
        table.sub_(table.grad)
    table.grad = None
    counter.add_(1)
    lt.sync()
    graph = list(cut.computations.values())[-1].graph
    written = overwritten(graph)
    names = {graph.outputs[n].size for n in graph.replaces}, {graph.outputs[n].size for n in written}
    assert names == ({(7, 3), ()}, {(7, 3)}), "the counter could count twice if an index is out of range"


def test_compiled_code_overwrites_nothing_with_a_copy_of_what_it_overwrites_too() -> None:
    x, y, z = (torch.arange(4.0).reshape(2, 2).to("ltc") for _ in range(3))
    lt.clear_cache()
    before = x.t().repeat(1, 1)
    x.copy_(y)  # one of the two has to be kept until the other is written
    y.copy_(before)
    z.mul_(2)
    lt.sync()
    graph = list(cut.computations.values())[-1].graph
    assert len(graph.replaces) == 3
    assert len(overwritten(graph)) == 1


def test_a_new_tensor_takes_new_memory() -> None:
    x = torch.ones(5).to("ltc")
    lt.clear_cache()
    y = x * 2
    lt.sync()
    assert replaced() == {}
    assert x.tolist() == [1] * 5 and y.tolist() == [2] * 5


def test_the_old_value_under_another_name_is_kept() -> None:
    x = torch.ones(5).to("ltc")
    lt.clear_cache()
    before = x.clone()
    x.mul_(2)
    lt.sync()
    assert before.tolist() == [1] * 5 and x.tolist() == [2] * 5


def test_the_same_work_with_and_without_overwriting_is_told_apart() -> None:
    lt.clear_cache()
    x = torch.ones(5).to("ltc")
    y = x * 2
    lt.sync()
    z = torch.ones(5).to("ltc")
    z.mul_(2)
    lt.sync()
    assert len(cut.computations) == 2
    assert y.tolist() == z.tolist() == [2] * 5
    assert x.tolist() == [1] * 5
