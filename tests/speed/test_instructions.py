"""The interpreter in C++ gives what the reference interpreter gives, bit by bit, and fails as that does."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from support import bits, look, same
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import lazytensor as lt
from lazytensor import native
from lazytensor.backend import compiler, instructions
from lazytensor.backend.contract import Failure
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor import AutoBackend, tiers
from lazytensor.backend.inductor.tiers import FirstTier
from lazytensor.backend.instructions import Instructions, translated
from lazytensor.backend.reference import Program
from lazytensor.bench import workloads
from lazytensor.conformance import opinfo
from lazytensor.fuzz.campaign import run_programs

pytestmark = pytest.mark.skipif(
    compiler.find() is None or not lt.settings.compiled_recorder,
    reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
)


def interpreted(graph: Graph, inputs: Sequence[Any]) -> Instructions:
    """The graph in C++, after the first run by Python."""
    program = Program(graph)
    program(*inputs)
    assert program.checked
    found = translated(graph, program)
    assert found is not None, f"{graph} has no translation"
    return found


def seen(result: Any) -> Any:
    """What there is to know of a result."""
    if isinstance(result, Failure):
        return str(result)
    return look(result) | {"is_view": None, "version": None}, bits(result)


def kept(inputs: Sequence[Any]) -> list[Any]:
    return [(bits(i), i._version) if isinstance(i, Tensor) else i for i in inputs]


class AtOnce(lt.Backend):
    """Each run is made twice: by the reference interpreter, and in C++."""

    name = "at_once"

    def __init__(self) -> None:
        super().__init__()
        self.translated = 0
        self.ran: list[tuple[Graph, list[Any]]] = []
        self.left: list[Graph] = []  # with Python

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        program = Program(graph)
        found: list[Instructions] = []

        def run(*inputs: Any) -> list[Any]:
            before = kept(inputs)
            expected = program(*inputs)
            if not program.checked:
                return expected
            if not found:
                made = translated(graph, program)
                if made is None:
                    self.left.append(graph)
                    return expected
                self.translated += 1
                found.append(made)
            self.ran.append((graph, list(inputs)))
            given = found[0](*inputs)
            assert kept(inputs) == before, "an input was written"
            assert found[0].program is None, "it was given up"
            if not any("empty" in node.op.name for node in graph.nodes):  # which holds anything
                assert list(map(seen, given)) == list(map(seen, expected))
            return given

        return run


@pytest.fixture
def backend() -> Iterator[AtOnce]:
    made = AtOnce()
    with lt.backend(made):
        yield made


def recorded(backend: AtOnce, function: Callable[..., Any], *tensors: Tensor) -> tuple[Graph, list[Any]]:
    """The graph of this function, and what it ran on."""
    lt.sync()
    backend.ran.clear()
    results = function(*[t.to("ltc") for t in tensors])
    lt.sync()
    del results
    return max(backend.ran, key=lambda run: len(run[0]))


class Looked:
    """What `instructions_test::look`, which copies its argument, has noted of it at each call."""

    def __init__(self) -> None:
        self.note: Callable[[Tensor], Any] = lambda tensor: None
        self.notes: list[Any] = []


_looked = Looked()


@pytest.fixture
def looked() -> Looked:
    _looked.__init__()  # type: ignore[misc]
    return _looked


@torch.library.custom_op("instructions_test::look", mutates_args=())
def _look(x: Tensor) -> Tensor:
    _looked.notes.append(_looked.note(x))
    return x.clone()


_look.register_fake(torch.empty_like)
lt.register_op(_look)


# --- the same bits ----------------------------------------------------------------------------------------------------


def test_every_operator_of_pytorchs_database(backend: AtOnce) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    lt.register_backend("at_once", lambda: backend)
    wrong = []
    try:
        for name, entry in opinfo.entries().items():
            if opinfo.supports(entry, torch.float32):
                for outcome in opinfo.check_entry(entry, torch.float32, opinfo.ltc("at_once"), 2, ("forward",)):
                    if outcome.status not in (opinfo.EQUAL, opinfo.EXPECTED) and "empty" not in name:
                        wrong.append((name, outcome.sample, outcome.detail))
    finally:
        torch.set_num_threads(threads)
    assert not [each for each in wrong if "AssertionError" in each[2]]
    assert backend.translated > 1000


@pytest.mark.parametrize(
    "name", ["mlp_adam", "lstm", "transformer_layer_adamw", "gpt_sdpa_adamw", "resnet_sgd", "control_flow", "tiny_ops"]
)
def test_steps_of_training(backend: AtOnce, name: str) -> None:
    workload = workloads.build(name, "ltc")
    for _ in range(3):
        loss = workload.step()
        lt.sync()
        assert loss.isfinite()
    assert backend.translated >= 1


def test_random_programs(backend: AtOnce) -> None:
    assert not [failure for failure in run_programs(8, 20_240, "reference") if failure]
    assert backend.translated > 20


def test_numbers_that_change_promote_as_before(backend: AtOnce) -> None:
    for number in (3, 2.5, True, 1 + 2j):
        for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool, torch.complex64):

            def program(x: Tensor, number: complex = number) -> list[Tensor]:
                half = torch.full((), 0.5, device="ltc").to(torch.float64)
                return [x + number, number + x * 2, x * half + number, x.to(torch.uint8) * number]

            graph, inputs = recorded(backend, program, torch.ones(3).to(dtype))
            found, program_ = interpreted(graph, inputs), Program(graph)
            for factor in (1, 7, -3):
                given = [i if isinstance(i, Tensor | bool) else type(i)(i * factor) for i in inputs]
                assert list(map(seen, found(*given))) == list(map(seen, program_(*given))), (number, dtype)


def test_a_number_is_as_its_argument_wants_it(backend: AtOnce) -> None:
    def program(device: str) -> list[Tensor]:
        x = torch.arange(6.0, device=device).reshape(2, 3)
        rows = []
        for number in (2, 2.0, True):
            rows += [
                torch.nn.functional.elu(x, alpha=number),  # a Scalar
                torch.nn.functional.softplus(x, beta=number),
                torch.clamp(x, min=number, max=None),
                torch.addcmul(x, x, x, value=number),
                torch.nn.functional.dropout(x, 0.0),
                torch.nn.functional.layer_norm(x, (3,), eps=number),  # a float
                torch.where(x > number, x, number),  # a tensor
                torch.full((2,), number, device=device),
                torch.linspace(number, 5, 3, device=device),
                x.pow(number),
                number**x,
            ]
        return rows

    same(program)
    assert backend.translated


def test_lists_with_tensors_numbers_and_nothing_in_them(backend: AtOnce) -> None:
    def program(device: str) -> list[Tensor]:
        x = torch.arange(6.0, device=device).reshape(2, 3)
        index = torch.tensor([1, 0], device=device)
        parts = [*x.split([1, 2], dim=1), *x.unbind(0)]
        return [
            torch.cat([x, x * 2.5, x[:0]]),
            torch.stack(parts[2:]),
            x[:, index],
            x[index, :],
            x.index_put((index, index), x[:, 0] * 3.5),
            *torch._foreach_add([x, x * 2], [1.5, 2.5]),
            *torch._foreach_mul([x, x], [x, x + 1]),
            *parts,
            torch.nn.functional.pad(x, [1, 2], value=7.5),
            torch.einsum("ij,kj->ik", x, x),
            *torch.meshgrid(x[0], x[:, 0], indexing="ij"),
        ]

    same(program)
    assert backend.translated


def test_arguments_that_are_left_out_dtypes_layouts_and_formats(backend: AtOnce) -> None:
    def program(device: str) -> list[Tensor]:
        x = torch.arange(48.0, device=device).reshape(1, 3, 4, 4)
        weight = torch.linspace(-1, 1, 2 * 3 * 9, device=device).reshape(2, 3, 3, 3)
        return [
            torch.nn.functional.conv2d(x, weight),
            torch.nn.functional.conv2d(x, weight, torch.ones(2, device=device), padding="same"),
            torch.nn.functional.batch_norm(x, None, None, training=True),
            x.to(memory_format=torch.channels_last) * 2,
            x.to(torch.float64).sum(dtype=torch.float32),
            x.clamp(None, 5),
            torch.zeros(3, dtype=torch.int16, device=device) + 1,
            x.view(torch.int32) // 2,
            torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear"),
            torch.argmax(x),
            x.conj() if x.is_complex() else torch.complex(x, x).conj() * 2,
            torch.div(x, 3, rounding_mode="floor"),
        ]

    same(program)
    assert backend.translated


def test_values_that_kernels_lay_out_otherwise_than_declared_are_copied(backend: AtOnce) -> None:
    graph, inputs = recorded(backend, lambda x: torch.sin(x.t()) + 1, torch.arange(6.0).reshape(2, 3))
    spec = graph.nodes[-2].outputs[0]
    assert spec is not None
    program = Program(graph)
    expected = program(*inputs)
    program.mends[spec] = spec.spec
    made = translated(graph, program)
    assert made is not None
    assert len(made.run) == len(graph) + 2
    assert list(map(seen, made(*inputs))) == list(map(seen, expected))


def test_an_input_that_is_replaced_is_not_written(backend: AtOnce) -> None:
    weight = torch.ones(4, device="ltc")
    for _ in range(3):
        weight.mul_(2).add_(1)
        lt.sync()
    assert weight.tolist() == [15.0] * 4
    assert any(graph.donatable for graph, _ in backend.ran)


def test_neither_autocast_nor_a_mode_nor_autograd_reaches_a_run(backend: AtOnce) -> None:
    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise AssertionError(f"{function} reached it")

    graph, inputs = recorded(backend, lambda x: (x @ x).relu(), torch.eye(3))
    found = interpreted(graph, inputs)
    expected = list(map(seen, found(*inputs)))
    needs = [i.requires_grad_() for i in inputs]
    with torch.autocast("cpu", dtype=torch.bfloat16), Mode():
        given = found(*needs)
    assert not any(each.requires_grad for each in given)
    assert list(map(seen, given)) == expected


def test_a_result_whose_elements_share_memory_is_left_with_python(backend: AtOnce) -> None:
    def program(device: str) -> Tensor:
        return torch.arange(3.0, device=device).expand(2, 3).nonzero()  # whose result's size depends on data

    same(program)
    assert backend.left


# --- failures ---------------------------------------------------------------------------------------------------------


def index(x: Tensor, where: Tensor) -> list[Tensor]:
    before = torch.ops.instructions_test.look(x * 2)
    found = torch.index_select(before, 0, where)
    return [found + 1, torch.ops.instructions_test.look(before * 3)]


def test_a_failure_names_its_operation_and_the_rest_runs_once(backend: AtOnce, looked: Looked) -> None:
    graph, (x, where, *numbers) = recorded(backend, index, torch.ones(3), torch.tensor([0, 2]))
    found = interpreted(graph, (x, where, *numbers))
    looked.notes.clear()
    failed, fine = found(x, torch.tensor([0, 99]), *numbers)
    assert isinstance(failed, Failure)
    assert failed.node.op.name == "aten::index_select"
    assert f"{__file__.rpartition('/')[2]}:{index.__code__.co_firstlineno + 2}" in str(failed)
    assert "index out of range" in str(failed.error)
    assert fine.tolist() == [6.0] * 3
    assert len(looked.notes) == 2, "each operation runs once"
    assert found.program is None
    again = found(x, where, *numbers)
    assert [each.tolist() for each in again] == [[3.0, 3.0], [6.0] * 3]


def test_a_program_goes_on_after_a_step_that_failed() -> None:
    def step(where: int) -> Tensor:
        return torch.index_select(x.mul_(2), 0, torch.tensor([where]).to("ltc"))

    x = torch.ones(3, device="ltc")
    with lt.backend("auto", first=None), lt.settings.scope(max_compiled_operations=0, run_in_background=False):
        for _ in range(4):
            assert step(1).item() > 0
        with pytest.raises(IndexError, match="index out of range"):
            step(99).item()
        assert x.tolist() == [32.0] * 3
        assert step(2).item() == 64.0


def test_where_only_the_translation_fails_python_goes_on(backend: AtOnce) -> None:
    graph, inputs = recorded(backend, lambda x: x.sin() + 1, torch.ones(3))
    found = interpreted(graph, inputs)
    expected = list(map(seen, found(*inputs)))
    found.run = lambda inputs: (1, [None] * (len(graph.inputs)) + [torch.ones(3).sin(), None])  # type: ignore[assignment]
    assert list(map(seen, found(*inputs))) == expected
    assert found.program is not None
    assert list(map(seen, found(*inputs))) == expected


def test_out_of_memory_loses_nothing_the_first_time(backend: AtOnce) -> None:
    graph, (x, *numbers) = recorded(backend, lambda x: x.expand(4, 3).clone() * 2.5, torch.ones(3))
    found = interpreted(graph, (x, *numbers))

    class NoRoom(Exception):
        pass

    def run(inputs: Any) -> Any:
        return 0, [None] * (len(graph.inputs) + sum(len(node.outputs) for node in graph.nodes))

    def out_of_memory(self: Program, slots: Any, instruction: Any) -> None:
        raise MemoryError("DefaultCPUAllocator: no room")

    patched = pytest.MonkeyPatch()
    patched.setattr(found, "run", run)
    patched.setattr(Program, "_run", out_of_memory)
    with patched.context(), pytest.raises(MemoryError) as raised:
        found(x, *numbers)
    patched.undo()
    assert any("nothing is lost" in note for note in raised.value.__notes__)
    assert found(x, *numbers)[0].tolist() == [[2.5] * 3] * 4


def test_warnings_are_the_reference_interpreters(backend: AtOnce, capfd: pytest.CaptureFixture[str]) -> None:
    graph, inputs = recorded(backend, lambda x: x.std(), torch.ones(1))
    found, program = interpreted(graph, inputs), Program(graph)
    told = []
    for run in (program, found):
        capfd.readouterr()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run(*inputs)
        told.append((capfd.readouterr().err.count("degrees of freedom"), len(caught)))
    assert told[0] == told[1] != (0, 0)


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_value_is_dropped_after_its_last_use(backend: AtOnce, looked: Looked) -> None:
    def program(x: Tensor) -> list[Tensor]:
        first = torch.ops.instructions_test.look(x + 1)  # what it looks at dies
        second = torch.ops.instructions_test.look(first)  # this does not
        third = torch.ops.instructions_test.look(second * 2)
        return [first + third]

    graph, inputs = recorded(backend, program, torch.ones(3))
    found = interpreted(graph, inputs)
    references: list[StorageWeakRef] = []

    def note(x: Tensor) -> list[bool]:
        before = [each.expired() for each in references]
        references.append(StorageWeakRef(x.untyped_storage()))
        return before

    looked.note = note
    looked.notes.clear()
    results = found(*inputs)
    assert looked.notes == [[], [True], [True, False]]
    assert all(each.expired() for each in references)
    assert results[0].tolist() == [6.0] * 3


def test_temporaries_have_the_places_of_a_plan(backend: AtOnce, looked: Looked) -> None:
    def program(x: Tensor) -> list[Tensor]:
        return [torch.ops.instructions_test.look(x + 1) * 2]

    elements = 1 << 20
    graph, inputs = recorded(backend, program, torch.zeros(elements))
    looked.note = Tensor.data_ptr
    found = interpreted(graph, inputs)
    looked.notes.clear()
    results = [found(*inputs)[0] for _ in range(4)]
    holds = native.extension().arena_holds
    assert [holds(place) for place in looked.notes] == [False, True, True, True], "the first run is watched"
    assert len(set(looked.notes[1:])) == 1
    assert not any(holds(result.data_ptr()) for result in results)
    assert all(bool((result == 2).all()) for result in results)


def test_a_run_that_fails_leaves_the_plan_as_it_was(backend: AtOnce, looked: Looked) -> None:
    def program(x: Tensor, where: Tensor) -> list[Tensor]:
        return [torch.index_select(torch.ops.instructions_test.look(x + 1), 0, where) * 2]

    graph, (x, where, *numbers) = recorded(backend, program, torch.zeros(1 << 21), torch.tensor([1]))
    looked.note = Tensor.data_ptr
    found = interpreted(graph, (x, where, *numbers))
    looked.notes.clear()
    for number in (0, 1, -5, 2, -5, 3):
        result = found(x, torch.tensor([number]), *numbers)[0]
        assert isinstance(result, Failure) if number < 0 else result.tolist() == [2.0]
        del result
    assert len(set(looked.notes[1:])) == 1
    assert native.extension().arena_holds(looked.notes[-1])


# --- the first tier ---------------------------------------------------------------------------------------------------


def test_the_first_tier_goes_from_python_to_cpp_and_drops_the_program(backend: AtOnce) -> None:
    graph, inputs = recorded(backend, lambda x: x.sin() + 1, torch.ones(3))
    tier = FirstTier(graph, AutoBackend().first.compile)
    program = weakref.ref(tier.program)
    tier(*inputs)
    assert isinstance(tier.run, Program)
    tier(*inputs)
    assert isinstance(tier.run, Instructions)
    assert program() is None


def test_a_run_that_fails_at_once_is_python_s_until_one_was_checked(backend: AtOnce) -> None:
    graph, (x, where, *numbers) = recorded(backend, index, torch.ones(3), torch.tensor([0, 2]))
    tier = FirstTier(graph, AutoBackend().first.compile)
    for _ in range(2):
        assert isinstance(tier(x, torch.tensor([0, 99]), *numbers)[0], Failure)
        assert isinstance(tier.run, Program)
    tier(x, where, *numbers)
    tier(x, where, *numbers)
    assert isinstance(tier.run, Instructions)


@pytest.mark.parametrize("why", ["asked for", "not built", "no translation"])
def test_a_backend_has_the_graph_after_some_runs(backend: AtOnce, why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, inputs = recorded(backend, lambda x: x.sin() + 1, torch.ones(3))
    auto = AutoBackend(first="ts" if why == "asked for" else None)
    auto.prepare()
    if why == "not built":
        monkeypatch.setattr(native, "extension", lambda: None)
    if why == "no translation":
        monkeypatch.setattr(tiers, "translated", lambda graph, program: None)
    tier: Any = auto._on_first(graph)
    expected = seen(tier(*inputs)[0])
    for run in range(2, 30):
        assert seen(tier(*inputs)[0]) == expected
        assert (type(tier.run).__name__ == "TSProgram") == (run >= 24)


def test_no_backend_is_loaded_that_no_graph_needs() -> None:
    auto = AutoBackend()
    auto.prepare()
    assert "first" not in auto.__dict__


def test_what_cannot_be_translated_is_no_error(backend: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, inputs = recorded(backend, lambda x: x.sin() + 1, torch.ones(3))
    program = Program(graph)
    program(*inputs)

    class Refuses:
        def __init__(self, *arguments: Any) -> None:
            raise TypeError("no")

    monkeypatch.setattr(instructions, "Instructions", Refuses)
    assert translated(graph, program) is None
