"""Strict mode: a backend that relies on what it may not is caught; one that keeps its promises is not disturbed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.graph import Graph
from lazytensor.backend.reference import Program
from lazytensor.execute import strict as mode
from lazytensor.trace.storage import value_of


@pytest.fixture(autouse=True)
def reference_again(tmp_path: Path) -> Iterator[None]:
    with lt.settings.scope(cache_dir=str(tmp_path)):
        yield
    lt.set_backend("reference")


def use(compile: Callable[[Graph], Any], asynchronous: bool = False) -> None:
    class Mine(lt.Backend):
        def compile(self, graph: Graph) -> Any:
            return compile(graph)

    Mine.asynchronous = asynchronous
    lt.register_backend("mine", Mine)
    lt.set_backend("mine")


def train(steps: int = 4) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    x = torch.randn(6, 4).to("ltc")
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        lt.sync()
        losses.append(loss)
    return [loss.item() for loss in losses]


@pytest.mark.parametrize("backend", ["reference", "ts"])
def test_a_backend_that_keeps_its_promises_trains_as_before(backend: str) -> None:
    right = train()
    lt.set_backend(backend)
    with lt.strict(every=2) as watch:
        assert train() == pytest.approx(right, rel=1e-5)
    assert watch.runs >= 4 and watch.compared == watch.runs // 2 and not watch.problems


def test_an_operation_that_is_wrong_is_named_with_its_line() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)
        for instruction in program.instructions:
            if instruction[0] is not None and instruction[0].op.name == "aten::tanh":
                instruction[1] = torch.sin
        return lambda *inputs: program(*inputs)

    use(compile)
    x = torch.arange(3.0, device="ltc") + 1
    y = x.tanh()  # the wrong one
    z = y * 2 + x
    with (
        pytest.raises(lt.errors.ResultsDiffer, match=r"aten::tanh, recorded at .*test_strict.py") as raised,
        lt.strict(),
    ):
        lt.sync(wait=True)
    path = Path(str(raised.value).split("lazytensor bisect ")[1].split(" --backend")[0])
    step = lt.load_step(path)
    step.check("reference")
    with pytest.raises(AssertionError):
        step.check("mine", rtol=1e-4, atol=1e-4)
    lt.set_backend("reference")
    assert z.tolist() == ((torch.arange(3.0) + 1).tanh() * 2 + torch.arange(3.0) + 1).tolist()


def test_a_backend_that_keeps_inputs_for_the_next_run_sees_poison() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)
        kept: list[Any] = []

        def run(*inputs: Any) -> list[Any]:
            kept[:] = kept or inputs  # "the same graph has the same inputs"
            return program(*kept)

        return run

    use(compile)
    x = torch.arange(3.0).to("ltc")
    with pytest.raises(lt.errors.ResultsDiffer), lt.strict():
        for _ in range(3):
            y = x.exp()
            lt.sync(wait=True)
            del y


def test_a_backend_that_writes_into_an_input_is_caught_and_the_input_is_unharmed() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)

        def run(*inputs: Any) -> list[Any]:
            results = program(*inputs)
            inputs[0].zero_()
            return results

        return run

    use(compile)
    x = torch.arange(3.0).to("ltc")
    y = x + 1
    with pytest.raises(lt.errors.BackendFailed, match="it wrote into input 0"), lt.strict():
        lt.sync(wait=True)
    lt.set_backend("reference")
    assert x.tolist() == [0, 1, 2] and y.tolist() == [1, 2, 3]


def test_a_backend_that_overwrites_what_it_was_given_and_then_fails_loses_nothing() -> None:
    def compile(graph: Graph) -> Any:
        def run(*inputs: Any) -> list[Any]:
            for number in graph.donatable:
                inputs[number].fill_(7)
            raise OSError("the device is gone")

        return run

    x = torch.arange(3.0).to("ltc")
    lt.sync(wait=True)
    use(compile)
    x.add_(1)
    with pytest.raises(lt.errors.BackendFailed, match="the device is gone") as raised, lt.strict():
        lt.sync(wait=True)
    assert any("already overwritten" in note for note in raised.value.__notes__)
    lt.set_backend("reference")
    assert x.tolist() == [1, 2, 3]


def test_a_backend_that_trusts_the_order_of_recording_is_caught() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)
        order = [node.seq for node in graph.nodes]
        return lambda *inputs: [r if order == sorted(order) else r + 1 for r in program(*inputs)]

    use(compile)
    rows = [torch.full((2,), float(i), device="ltc").exp() for i in range(8)]
    with pytest.raises(lt.errors.ResultsDiffer), lt.strict(seed=3):
        lt.sync(wait=True)
    assert len(rows) == 8


def test_results_that_share_memory_are_reported_as_copies() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)

        def run(*inputs: Any) -> list[Any]:
            results = program(*inputs)
            whole = torch.cat([r.reshape(-1) for r in results])
            return [
                part.view(r.shape) for part, r in zip(whole.split([r.numel() for r in results]), results, strict=True)
            ]

        return run

    use(compile)
    with lt.strict() as watch:
        a, b = torch.ones(2, device="ltc") * 2, torch.ones(3, device="ltc") * 3
        lt.sync(wait=True)
        assert a.tolist() == [2, 2] and b.tolist() == [3, 3, 3]
    assert any("shares memory" in text for text in watch.mended)


def test_a_fault_in_the_background_is_raised_when_the_block_ends_and_the_results_are_right() -> None:
    def compile(graph: Graph) -> Any:
        program = Program(graph)
        return lambda *inputs: [r + 1 for r in program(*inputs)]

    use(compile, asynchronous=True)
    seen = []

    def block() -> None:
        with lt.strict(delay=0.001):
            x = torch.zeros(3, device="ltc").exp()
            lt.sync()
            seen.append(x.tolist())

    with pytest.raises(lt.errors.ResultsDiffer):
        block()
    assert seen == [[1, 1, 1]]


def test_orders_are_legal_and_differ() -> None:
    x = torch.ones(2, device="ltc")
    rows = [(x * float(i)).exp().sum() for i in range(10)]
    total = sum(rows)
    graph = Graph([value_of(total)])
    chance = mode.Strict(seed=1)
    orders = [chance.shuffled(graph).nodes for _ in range(5)]
    for order in orders:
        place = {node: i for i, node in enumerate(order)}
        assert set(order) == set(graph.nodes) and len(order) == len(graph.nodes)
        assert all(place[v.node] < place[node] for node in order for v in node.inputs if v.node in place)
    assert len({tuple(n.seq for n in order) for order in orders}) == 5


def test_the_setting_alone_switches_it_on(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = []
    whole = mode.Watched.__call__
    monkeypatch.setattr(mode.Watched, "__call__", lambda self, *inputs: looked.append(1) or whole(self, *inputs))
    monkeypatch.setattr(mode, "_in_force", None)
    lt.clear_cache()
    with lt.settings.scope(strict=1):
        assert (torch.ones(2, device="ltc") + 41).tolist() == [42, 42]
    lt.clear_cache()
    assert looked


def test_random_programs_agree_in_strict_mode() -> None:
    from lazytensor.fuzz.campaign import run_programs

    with lt.strict(every=4):
        failures = [f for f in run_programs(25, 91_000, "reference") if f is not None]
    assert not failures, "\n\n".join(f.script for f in failures)
