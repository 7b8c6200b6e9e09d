"""The interface: each part of BackendImplInterface has a working default, and a backend can replace it."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import lazytensor as lt
from lazytensor.backend.data import BackendData, BackendDevice, Computation
from lazytensor.backend.lowering import Emit
from lazytensor.execute import cut
from lazytensor.trace import storage
from lazytensor.trace.ir import Node, Spec, spec


class Fx(lt.Backend):
    def compile(self, graph: lt.Graph) -> Any:
        return graph.to_fx()


def plain(*size: int, dtype: torch.dtype = torch.float32) -> Spec:
    return spec(size, torch.empty(size).stride(), 0, dtype, 0)


# Every virtual method of torch::lazy::BackendImplInterface and of the classes that belong to it.
CPP_NAMES = re.findall(
    r"\w+",
    """
    InitializeAtenBindings PrepareToExit SetRngSeed GetDefaultDeviceType SetDefaultDeviceType GetDefaultDeviceOrdinal
    SetDefaultDeviceOrdinal EagerFallbackDeviceType GetBackendDevices GetBackendDevice GetCompilationDevices
    MakeComputationDataFromTensor MakeComputationDataFromScalar CreateDataPlaceholder MakeTensorFromComputationData
    GetComputationDataFromNode GetIrBuilder CreateLoweringContext Compile ExecuteComputation GetMetrics GetMemoryInfo
    CreateMetricReport GetComputationBackendText GetHandle Assign HasValue parameter_names parameter_shapes
    result_shape to_string MakeDeviceData MakeScalar MakeExpand MakeCast MakeTensorList MakeGeneric MakeSizeNode
    MakeSizeAdd MakeSizeMul MakeSizeDiv
    AddResult AddParameter SetUpAlias CheckResultShape GetEmittedNodeCount Build GetParametersData
""",
)


def test_every_cpp_method_has_its_pythonic_counterpart() -> None:
    documented = ""
    for kind in (lt.Backend, BackendData, BackendDevice, Computation, lt.IrBuilder, lt.LoweringContext):
        for member in vars(kind).values():
            documented += (getattr(member, "__doc__", None) or "") + " "
    missing = [name for name in CPP_NAMES if not re.search(rf"\b{name}\b", documented)]
    assert missing == []


def test_compile_is_the_only_method_that_must_be_written() -> None:
    assert lt.Backend.__abstractmethods__ == {"compile"}


def test_devices_and_their_defaults() -> None:
    backend = Fx()
    assert [str(d) for d in backend.devices()] == ["CPU0", "CPU1"]
    assert backend.device(torch.device("ltc", 1)) == BackendDevice("cpu", 1)
    backend.device_ordinal = 1
    assert backend.device(torch.device("ltc")) == BackendDevice("cpu", 1)
    with pytest.raises(ValueError, match="no device 7"):
        backend.device_ordinal = 7
    with pytest.raises(ValueError, match="runs on cpu, not on 'tpu'"):
        backend.device_type = "tpu"
    first, second = backend.devices()
    assert backend.compilation_devices(first, [first, second]) == [first, second]
    assert first < second
    assert backend.fallback_device_type == "cpu"


def test_data_is_a_copy_and_placeholders_are_filled() -> None:
    backend = Fx()
    device = backend.devices()[0]
    tensor = torch.arange(4.0)
    data = backend.to_device(tensor, plain(4), device)
    tensor.zero_()
    assert backend.to_host(data).tolist() == [0, 1, 2, 3]
    assert backend.to_host(data, torch.float64).dtype is torch.float64
    assert (data.shape, data.dtype, data.device) == ((4,), torch.float32, device)
    empty = backend.placeholder(plain(4), device)
    assert not empty.has_value
    empty.assign(data)
    assert empty.has_value
    assert empty.handle == data.handle
    with pytest.raises(ValueError, match="cannot be assigned"):
        backend.placeholder(plain(5), device).assign(data)
    number = backend.scalar_to_device(2.5, device)
    assert backend.to_host(number).item() == 2.5


def test_data_behind_a_leaf_can_be_asked_for() -> None:
    x = torch.ones(3).to("ltc")
    y = x + 1
    value = storage.value_of(y)
    (leaf,) = value.node.inputs[:1]
    data = lt.current_backend().data_of(leaf.node)
    assert data is not None
    assert data.value.tolist() == [1, 1, 1]
    assert lt.current_backend().data_of(value.node) is None


def test_metrics_memory_and_text_work() -> None:
    lt.register_backend("fx", Fx)
    backend = lt.set_backend("fx")
    (torch.ones(5, device="ltc") / 3).sum().item()
    assert backend.metrics()["compiled"] >= 1
    assert "fx: compiled" in backend.metric_report()
    memory = backend.memory_info()
    assert 0 < memory.free <= memory.total
    assert memory.used == memory.total - memory.free
    made = [c.compiled for k, c in cut.computations.items() if k[0] is backend][-1]
    assert "torch.ops.aten.div.Tensor" in made.text
    assert len(made.parameter_names) == len(made.parameter_shapes) == len(made.graph.inputs)
    assert made.result_shapes == [v.spec for v in made.graph.outputs]


def graph_of(*tensors: torch.Tensor) -> lt.Graph:
    return lt.Graph([storage.value_of(t) for t in tensors])


def test_a_lowering_context_counts_and_orders_what_it_emits() -> None:
    class Context(lt.LoweringContext):
        def begin(self) -> None:
            self.order: list[str] = []

        def lower(self, node: Node) -> None:
            self.order.append(node.op.name)
            for value in node.outputs:
                self.emit(value, len(self.order))
            for value in node.inputs:
                self.output(value)

    x = torch.ones(3).to("ltc")
    graph = graph_of((x + 1) * x)
    backend = Fx()
    context = Context(backend, "test", backend.devices()[0], graph.nodes)
    assert context.order == ["aten::add.Tensor", "aten::mul.Tensor"]
    assert context.emitted_count == 2
    assert set(context.emitted.values()) == {Emit.EMITTED}
    assert context.parameters == graph.data
    assert context.add_result(graph.outputs[0]) == 0
    context.set_alias(0, 0)
    assert context.check_result_shape(plain(3), 0)
    assert not context.check_result_shape(plain(4), 0)
    with pytest.raises(IndexError):
        context.set_alias(3, 0)
    built = context.build()
    assert built.graph.donatable == {0}
    (compiled,) = backend.compile_all([built])
    (result,) = backend.execute(compiled, [torch.ones(3), 1], backend.devices()[0])
    assert result.tolist() == [2, 2, 2]
    loop = Context(backend, "loop", backend.devices()[0])
    loop.emitted[graph.nodes[0]] = Emit.EMITTING
    with pytest.raises(RuntimeError, match="graph loop found"):
        loop.lower_all(graph.nodes)


def test_an_ir_builder_makes_nodes() -> None:
    builder = lt.IrBuilder()
    x = torch.ones(2, 1).to("ltc")
    value = builder.device_data(x)
    assert builder.cast(value, torch.float64).dtype is torch.float64
    assert builder.expand(value, [2, 4]).size == (2, 4)
    assert builder.scalar(2.0, torch.float32).size == ()
    assert builder.node("aten::relu", value) is builder.node("aten::relu", value)
    two, one = builder.size(value, 0), builder.size(value, 1)
    assert (builder.size_add(two, one).value, builder.size_mul(two, two).value, builder.size_div(two, two).value) == (
        3,
        4,
        1,
    )
    assert builder.tensor_list([value, value]) == (value, value)


def scale_add(x: torch.Tensor, y: torch.Tensor, by: float) -> torch.Tensor:
    return x + y * by


def test_a_backend_records_an_op_in_its_own_way_as_a_node_of_its_own_kind() -> None:
    mine = lt.define_op("testkinds::scale_add(Tensor x, Tensor y, float by) -> Tensor", scale_add)

    class Builder(lt.IrBuilder):
        def recordings(self) -> dict[str, Any]:
            return {"aten::add.Tensor": self.add}

        def add(self, x: Any, y: Any, alpha: Any) -> Any:
            return self.node(mine, x, y, 1.0)

    class Mine(Fx):
        seen: Sequence[str] = ()

        def ir_builder(self) -> lt.IrBuilder:
            return Builder()

        def compile(self, graph: lt.Graph) -> Any:
            type(self).seen = [n.op.name for n in graph.nodes]
            return super().compile(graph)

    lt.register_backend("mine", Mine)
    x, y = torch.arange(3.0).to("ltc"), torch.ones(3).to("ltc")
    for _ in range(2):
        lt.set_backend("mine")
        z = x + y
        lt.sync()
        assert Mine.seen == ["testkinds::scale_add"]
        assert z.tolist() == [1, 2, 3]
        pending = x + y
        w = x.clone().add_(y)
        with lt.backend("reference"):  # every backend can run a node kind of another: its meaning is a function
            assert pending.tolist() == [1, 2, 3]
            assert w.tolist() == [1, 2, 3]
            lt.sync()
            assert [n.op.name for n in graph_of(x + y).nodes] == ["aten::add.Tensor"]
    with lt.backend("ts"):
        for _ in range(3):
            assert (x + y).tolist() == [1, 2, 3]


class Boxed(lt.Backend):
    """A backend with memory of its own: NumPy-like boxes that only it can open."""

    own_memory = True

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = 0

    def to_device(self, tensor: torch.Tensor, spec: Spec, device: BackendDevice) -> BackendData:
        self.up += 1
        return BackendData(self, spec, device, ("box", tensor.clone(memory_format=torch.preserve_format)))

    def to_host(self, data: BackendData, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.down += 1
        return data.value[1].to(dtype or data.dtype, copy=True)

    def compile(self, graph: lt.Graph) -> Any:
        inner = graph.to_fx()
        device = self.devices()[0]

        def run(*inputs: Any) -> list[BackendData]:
            assert all(i.backend is self for i in inputs if isinstance(i, BackendData))
            assert not any(isinstance(i, torch.Tensor) for i in inputs)
            results = inner(*[i.value[1] if isinstance(i, BackendData) else i for i in inputs])
            return [BackendData(self, v.spec, device, ("box", r)) for v, r in zip(graph.outputs, results, strict=True)]

        return run


class BoxedPartly(Boxed):
    def supports(self, node: Node) -> bool:
        return node.op.name != "aten::tanh"


@pytest.mark.parametrize("kind", [Boxed, BoxedPartly])
def test_a_backend_with_memory_of_its_own(kind: type[Boxed]) -> None:
    lt.register_backend("boxed", kind)
    backend = lt.set_backend("boxed")
    assert isinstance(backend, Boxed)
    weight = torch.ones(3).to("ltc")
    for step in range(3):
        weight.mul_(2).sub_(torch.tanh(weight * 0))
        lt.sync()
        if kind is Boxed:
            assert backend.up == 1, f"uploaded again in step {step}"
    assert weight[1:].tolist() == [8, 8]
    view = weight[:2]
    view.add_(1)
    assert weight.tolist() == [9, 9, 8]
    lt.set_backend("reference")  # data is carried over
    assert (weight + 1).tolist() == [10, 10, 9]
    weight.add_(1)
    lt.set_backend("boxed")
    assert weight.tolist() == [10, 10, 9]
    with lt.backend("ts"):
        assert (weight * 2).tolist() == [20, 20, 18]
    assert (weight * 2).tolist() == [20, 20, 18]
    with pytest.raises(IndexError):
        torch.embedding(torch.ones(2, 2).to("ltc"), torch.tensor([5]).to("ltc")).cpu()
    assert weight.clone().tolist() == [10, 10, 9]
    file = io.BytesIO()
    torch.save(weight, file)
    file.seek(0)
    assert torch.load(file).tolist() == [10, 10, 9]
