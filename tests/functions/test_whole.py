"""A pure function is recorded as a whole: its calls give what they would, and whatever could change is noticed."""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lazytensor as lt
from lazytensor.backend import compiler
from lazytensor.device import recorder
from lazytensor.execute import cut
from lazytensor.functions import whole
from lazytensor.functions.whole import Whole

pytestmark = [
    pytest.mark.skipif(
        compiler.find() is None or not lt.settings.compiled_recorder,
        reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
    ),
    pytest.mark.usefixtures("alone"),
]

FACTOR = 2.0
CALLED: list[Any] = []


def calls(function: Callable[..., Any], *args: Any, times: int = 4, **kwargs: Any) -> Any:
    """What the last of some calls gives, each in a step of its own."""
    for _ in range(times):
        result = function(*args, **kwargs)
        lt.sync(wait=True)
    return result


def on(device: str, *values: Any) -> list[Any]:
    return [v.to(device) if isinstance(v, Tensor | nn.Module) else v for v in values]


def known(function: Any, *args: Any, **kwargs: Any) -> Whole:
    """The function, recorded as a whole for these arguments; its results are the CPU's."""
    made = Whole(function)
    ours = calls(function, *on("ltc", *args), **kwargs)
    assert made.reason is None and made.hits >= 1, made.reason
    with lt.settings.scope(check=True):  # each lookup is held against the function itself
        calls(function, *on("ltc", *args), times=1, **kwargs)
    theirs = function(*on("cpu", *args), **kwargs)
    for a, b in zip(_flat(ours), _flat(theirs), strict=True):
        if isinstance(a, Tensor):
            assert a.stride() == b.stride() and torch.equal(a.cpu(), b)
        else:
            assert a == b
    return made


def _flat(value: Any) -> list[Any]:
    return [x for each in value for x in _flat(each)] if isinstance(value, list | tuple) else [value]


def refused(function: Any, *args: Any) -> str:
    """Why the function is not recorded as a whole; it gives what it gives on the CPU at every call."""
    made = Whole(function)
    torch.manual_seed(0)
    ours = [calls(function, *on("ltc", *args), times=1) for _ in range(5)]
    torch.manual_seed(0)
    theirs = [function(*on("cpu", *args)) for _ in range(5)]
    assert all(torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True))
    assert function.__code__ is made.original.__code__
    assert made.reason is not None
    return made.reason


# --- what is found ----------------------------------------------------------------------------------------------------


def looped(x: Tensor, y: Tensor, times: int = 20, *, scale: float = 0.5) -> Tensor:
    """Numbers on the way, a keyword, a default and a loop."""
    for i in range(times):
        x = torch.tanh(x * y + i / times) - y * scale
        if i % 2 and x.dim() == 2:
            x = x[:, :2] @ y.t()[:2, :] if x.shape[0] == y.shape[1] else x * FACTOR
    return x.mean(dim=-1)


def test_a_loop_is_one_lookup_and_the_same_graph() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    ours = on("ltc", x, y)
    before = calls(looped, *ours)
    misses = cut.misses
    made = known(looped, x, y)
    found = recorder.module.calls_found()
    again = looped(*ours)
    assert recorder.module.calls_found() == found and made.hits > 1
    assert torch.equal(again.cpu(), before.cpu())
    assert cut.misses == misses
    assert torch.equal(calls(looped, *ours, 20, scale=0.25).cpu(), looped(x, y, 20, scale=0.25))


def test_the_line_of_an_operation_stays_that_of_the_function() -> None:
    known(looped, torch.randn(3, 4), torch.randn(3, 4))
    result = looped(*on("ltc", torch.randn(3, 4), torch.randn(3, 4)))
    assert "return x.mean(dim=-1)" in str(lt.why(result))


def many(x: Tensor, flag: bool) -> Any:
    parts = [part * 2 for part in x.split(2)]
    parts.append(x.sum())
    a, b = (p.transpose(0, 1) if p.dim() == 2 else p for p in parts[:2])
    return (a, [b.contiguous(), x.shape[0]], None if flag else parts[-1], math.sqrt(x.numel()))


def test_views_and_nested_results_are_given_again() -> None:
    made = known(many, torch.randn(4, 6), False)
    a, *_ = calls(many, torch.randn(4, 6, device="ltc"), False)
    assert a._is_view() and made.reason is None


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.LayerNorm(6)
        self.body = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Dropout(0.5), nn.Linear(12, 6))
        self.scale = 2
        self.style = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.relu(layer(x))
        x = self.body(self.norm(x)) * self.scale
        return torch.tanh(x) if self.style == "tanh" else x.sigmoid()


@pytest.fixture
def block() -> Block:
    torch.manual_seed(3)
    return Block().eval()


def same_as_cpu(model: nn.Module, x: Tensor, times: int = 3) -> bool:
    """Whether a model on ltc gives what its copy on the CPU does."""
    import copy

    theirs = copy.deepcopy(model).to("cpu")(x)
    return all(torch.equal(calls(model, x.to("ltc"), times=1).cpu(), theirs) for _ in range(times))


@torch.no_grad()
def test_a_model_is_one_lookup_whatever_its_weights(block: Block) -> None:
    model, x = block.to("ltc"), torch.randn(4, 6)
    made = Whole(Block.forward)
    assert same_as_cpu(model, x, 4) and made.reason is None and made.hits >= 2
    for parameter in model.parameters():
        parameter.mul_(1.25)
    hits = made.hits
    assert same_as_cpu(model, x, 4) and made.hits > hits


# --- what changes -----------------------------------------------------------------------------------------------------


def replace_layer(model: Block) -> None:
    model.layers[1] = nn.Linear(6, 6).to("ltc")


def add_layer(model: Block) -> None:
    model.layers.append(nn.Linear(6, 6).to("ltc"))


def change_number(model: Block) -> None:
    model.scale = 3


def change_kind_of_number(model: Block) -> None:
    model.scale = True  # type: ignore[assignment]


def change_text(model: Block) -> None:
    model.style = "sigmoid"


def remove_bias(model: Block) -> None:
    model.layers[0].bias = None


def hook(model: Block) -> None:
    model.layers[2].register_forward_hook(lambda module, args, result: result * 2)


def own_forward(model: Block) -> None:
    model.layers[0].forward = lambda x: x * 3


@pytest.mark.parametrize(
    "change",
    [replace_layer, add_layer, change_number, change_kind_of_number, change_text, remove_bias, hook, own_forward],
)
@torch.no_grad()
def test_what_the_function_reads_may_change(block: Block, change: Callable[[Block], None]) -> None:
    model, x = block.to("ltc"), torch.randn(4, 6)
    made = Whole(Block.forward)
    assert same_as_cpu(model, x, 3) and made.hits >= 1
    change(model)
    assert same_as_cpu(model, x, 3)


def double(x: Tensor) -> Tensor:
    return x * FACTOR


def outer(x: Tensor) -> Tensor:
    return double(x) + 1


def test_globals_functions_and_their_code_may_change(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(3)
    ours = x.to("ltc")
    known(outer, x)
    monkeypatch.setitem(globals(), "FACTOR", 5.0)
    assert torch.equal(calls(outer, ours).cpu(), x * 5.0 + 1)
    monkeypatch.setattr(double, "__code__", (lambda x: x - 1).__code__)
    assert torch.equal(calls(outer, ours).cpu(), x - 1 + 1)
    monkeypatch.setitem(globals(), "double", torch.neg)
    assert torch.equal(calls(outer, ours).cpu(), -x + 1)


@pytest.mark.parametrize(("first", "second"), [(1, 1.0), (1, True), (0.0, -0.0), (2.0, 3.0)])
def test_numbers_differ_by_type_and_sign(first: Any, second: Any) -> None:
    def scaled(x: Tensor, number: Any) -> Tensor:
        return x / number if number else number / x

    x = torch.tensor([-2, -1, 1, 2])
    known(scaled, x, first)
    for number in (second, first):
        ours, theirs = calls(scaled, x.to("ltc"), number), scaled(x, number)
        assert ours.dtype == theirs.dtype and str(ours.cpu()) == str(theirs)


def test_another_shape_dtype_or_alias_is_another_call() -> None:
    known(looped, torch.randn(3, 4), torch.randn(3, 4))
    x = torch.randn(3, 4)
    for a, b in [
        (torch.randn(4, 4), torch.randn(4, 4)),
        (torch.randn(3, 4).double(), torch.randn(3, 4)),
        (torch.randn(4, 3).t(), torch.randn(3, 4)),
        (x, x),
    ]:
        ours = on("ltc", a, b) if a is not b else [a.to("ltc")] * 2
        assert torch.equal(calls(looped, *ours).cpu(), looped(a, b))


def test_modes_are_noticed() -> None:
    x = torch.randn(3, 4)
    y = torch.randn(3, 4)
    known(looped, x, y)
    with torch.inference_mode():
        result = calls(looped, *on("ltc", x, y))
        assert result.is_inference() and torch.equal(result.cpu(), looped(x, y))
    wanted = x.to("ltc").requires_grad_()
    result = calls(looped, wanted, y.to("ltc"))
    assert result.requires_grad
    result.sum().backward()
    theirs = x.clone().requires_grad_()
    looped(theirs, y).sum().backward()
    assert torch.equal(wanted.grad.cpu(), theirs.grad)


def test_the_cpu_and_another_device_are_left_alone() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    made = known(looped, x, y)
    for _ in range(20):
        assert looped(x, y).device.type == "cpu"
        assert looped(x.to("ltc:1"), y.to("ltc:1")).device.index == 1
    assert made.reason is None
    hits = made.hits
    calls(looped, *on("ltc", x, y))
    assert made.hits > hits


# --- what is refused --------------------------------------------------------------------------------------------------


def remembers(x: Tensor) -> Tensor:
    CALLED.append(1)
    return x + len(CALLED) * 0


def writes(x: Tensor) -> Tensor:
    y = x + 1
    y += 1
    return y


def writes_in_place(x: Tensor) -> Tensor:
    return (x * 2).add_(1)


def reads(x: Tensor) -> Tensor:
    return x * (2 if x.sum().item() > 0 else 3)


def branches(x: Tensor) -> Tensor:
    return x if (x.sum() > 0) else -x


def prints(x: Tensor) -> Tensor:
    print("called")
    return x * 2


def draws(x: Tensor) -> Tensor:
    return F.dropout(x, 0.5, training=True)


def returns_its_argument(x: Tensor) -> Tensor:
    return x.view(-1)


def catches(x: Tensor) -> Tensor:
    try:
        return x * 2
    except RuntimeError:
        return x


def counts(x: Tensor) -> Tensor:
    global FACTOR
    FACTOR = FACTOR + 0
    return x * FACTOR


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (remembers, "hands on|append"),
        (writes, "in place"),
        (writes_in_place, "asks a tensor for add_"),
        (reads, "reads values"),
        (branches, "reads values"),
        (prints, "calls print"),
        (draws, "it draws random numbers"),
        (returns_its_argument, "part of its arguments"),
        (catches, "a Try"),
        (counts, "a Global"),
    ],
)
def test_what_is_not_pure_is_refused_with_its_reason(function: Any, reason: str) -> None:
    assert any(each in refused(function, torch.randn(3, 4)) for each in reason.split("|"))
    CALLED.clear()


def test_a_variable_of_a_function_around_it_refuses_it() -> None:
    offset = torch.ones(3)

    def closed(x: Tensor) -> Tensor:
        return x + offset.to(x.device)

    made = Whole(closed)
    assert made.reason is not None and "around it" in made.reason
    assert torch.equal(closed(torch.zeros(3)), offset)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.batch_norm(x, self.norm.running_mean, self.norm.running_var, training=True, momentum=0.5)


@torch.no_grad()
def test_statistics_that_no_schema_tells_of_move_once_a_call() -> None:
    ours, theirs = Normed().to("ltc"), Normed()
    x = torch.randn(8, 4)
    made = Whole(Normed.forward)
    for _ in range(4):
        calls(ours, x.to("ltc"), times=1)
        theirs(x)
    assert made.reason is not None
    assert torch.equal(ours.norm.running_mean.cpu(), theirs.norm.running_mean)
    assert torch.equal(ours.norm.running_var.cpu(), theirs.norm.running_var)


class Computed(nn.Module):
    asked = 0

    @property
    def factor(self) -> int:
        self.asked += 1
        return self.asked

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def test_a_property_refuses_and_is_asked_once_a_call() -> None:
    model = Computed()
    made = Whole(Computed.forward)
    for wanted in range(1, 6):
        assert calls(model, torch.ones(2, device="ltc"), times=1).tolist() == [wanted] * 2
    assert made.reason == "Computed.factor is computed"


# --- who else looks ---------------------------------------------------------------------------------------------------


def test_a_debugger_sees_every_line() -> None:
    ours = on("ltc", torch.randn(3, 4), torch.randn(3, 4))
    known(looped, torch.randn(3, 4), torch.randn(3, 4))
    seen = set()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_name == "looped":
            seen.add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        looped(*ours)
    finally:
        sys.settrace(before)
    assert len(seen) > 4


def test_the_function_stays_what_it_is() -> None:
    signature, text = inspect.signature(looped), inspect.getsource(looped)
    known(looped, torch.randn(3, 4), torch.randn(3, 4))
    assert inspect.signature(looped) == signature and inspect.getsource(looped) == text
    with pytest.raises(TypeError, match=r"looped\(\) missing 1 required positional argument: 'y'"):
        looped(torch.randn(3, 4))  # type: ignore[call-arg]
    with pytest.raises(RuntimeError, match="must match") as caught:
        looped(*on("ltc", torch.randn(3, 4), torch.randn(3, 5)))
    assert any("x * y" in str(entry.statement) for entry in caught.traceback)


class Deep(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        for i in range(30):
            x = torch.tanh(x) * i
        return x


@pytest.mark.parametrize("how", ["compiled", "in one graph", "traced", "exported"])
def test_other_compilers_see_the_function_itself(how: str) -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    made = known(looped, x, y)
    if how == "traced":
        function: Any = torch.jit.trace(looped, (x, y))
    elif how == "exported":
        Whole(Deep.forward)
        assert sum(node.op == "call_function" for node in torch.export.export(Deep(), (x,)).graph.nodes) == 60
        return
    else:
        function = torch.compile(looped, backend="eager", fullgraph=how == "in one graph")
    assert torch.equal(function(x, y), looped(x, y))
    hits = made.hits
    calls(looped, *on("ltc", x, y))
    assert made.hits > hits


def test_transforms_see_the_function_itself() -> None:
    x, y = torch.randn(5, 3, 4), torch.randn(3, 4)
    made = known(looped, x[0], y)
    ours = torch.func.vmap(looped, in_dims=(0, None))(*on("ltc", x, y))
    torch.testing.assert_close(ours.cpu(), torch.func.vmap(looped, in_dims=(0, None))(x, y))
    assert made.reason is None


def test_another_thread_runs_the_function_itself() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    made = known(looped, x, y)
    hits = made.hits
    found = []
    thread = threading.Thread(target=lambda: found.append(looped(x, y)))
    thread.start()
    thread.join()
    assert torch.equal(found[0], looped(x, y)) and made.hits == hits


def test_forgotten_graphs_are_recorded_anew() -> None:
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    known(looped, x, y)
    lt.clear_cache()
    assert torch.equal(calls(looped, *on("ltc", x, y)).cpu(), looped(x, y))


def test_values_that_are_new_at_every_call_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole, "MOST_CALLS", 4)
    made = Whole(double)
    x = torch.ones(2, device="ltc")
    for _ in range(
        3
    ):  # the values of each call are those of the call before; all have been recorded in an earlier step
        y = x
        for _ in range(8):
            y = double(y)
        lt.sync(wait=True)
    assert y.tolist() == [256.0] * 2
    assert made.reason == "its values are new at every call"
