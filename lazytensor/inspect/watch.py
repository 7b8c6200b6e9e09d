"""Running a graph under observation, op by op: how long each op took, and which was the first to make a NaN."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from lazytensor import errors
from lazytensor.backend import memory
from lazytensor.backend.reference import Program
from lazytensor.execute import cut
from lazytensor.inspect import events, names, places
from lazytensor.trace import source
from lazytensor.trace.ir import Node, Value


class Timed(Program):
    """The reference interpreter with a clock at each op."""

    def __init__(self, graph: Any, seconds: dict[Node, float]) -> None:
        super().__init__(graph)
        self.seconds = seconds

    def _run(self, slots: list[Any], instruction: list[Any]) -> None:
        before = time.perf_counter()
        super()._run(slots, instruction)
        if instruction[0] is not None:
            self.seconds[instruction[0]] = time.perf_counter() - before


class Checked(Program):
    """The reference interpreter that stops at the first op whose result has a NaN that its inputs did not have."""

    def _check(self, slots: list[Any]) -> None:
        for leaf in self.graph.data:
            tensor = slots[self.slots[leaf]]
            if _nans(tensor):
                raise Found(_from_data(leaf, tensor))
        super()._check(slots)

    def _run(self, slots: list[Any], instruction: list[Any]) -> None:
        super()._run(slots, instruction)
        node: Node | None = instruction[0]
        if node is None or node.op.view or node.op.name.startswith(("aten::empty", "aten::new_empty")):
            return  # uninitialised memory may hold anything
        for value in node.outputs:
            if value is not None and _nans(slots[self.slots[value]]):
                raise Found(
                    _made(node, value, {v: slots[self.slots[v]] for v in node.inputs}, slots[self.slots[value]])
                )


class Found(BaseException):
    """Carries the finding out through the interpreter, which would take an Exception for the op's own failure."""

    def __init__(self, error: errors.NotANumber) -> None:
        super().__init__()
        self.error = error


def _nans(tensor: Any) -> int:
    if not isinstance(tensor, torch.Tensor) or not (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    return int(tensor.isnan().sum())


def _from_data(leaf: Value, tensor: torch.Tensor) -> errors.NotANumber:
    return errors.NotANumber(
        f"{names.of_leaf(leaf)} ({leaf.spec}) already had {_nans(tensor)} NaN of {tensor.numel()} values when the "
        "graph began"
    )


def _made(node: Node, value: Value, inputs: dict[Value, Any], result: torch.Tensor) -> errors.NotANumber:
    place = places.of(node.line)
    module = f" in {node.line.module}" if node.line is not None and node.line.module else ""
    lines = [
        f"{node.op.name} at {place}{module} made the first NaN: {_nans(result)} of {result.numel()} values of "
        f"{value.spec}",
        f"    {place.text}",
        f"    {node!r}",
        *(f"    {names.of_leaf(v) if v.leaf else v.name}: {v.spec} {_summary(t)}" for v, t in inputs.items()),
    ]
    if node.line is not None and node.line.forward is not None:
        lines.insert(
            1, f"    in the backward of this line, called from {places.short(node.line.file)}:{node.line.number}"
        )
    error = errors.NotANumber("\n".join(lines))
    error.op, error.line, error.place = node.op.name, node.line, place
    return error


def _summary(tensor: Any) -> str:
    if not isinstance(tensor, torch.Tensor) or not tensor.numel() or tensor.is_complex():
        return ""
    infinite = int(tensor.isinf().sum()) if tensor.is_floating_point() else 0
    return f"min {tensor.min().item():g}, max {tensor.max().item():g}" + (f", {infinite} infinite" if infinite else "")


@contextmanager
def instead(program: Callable[[Any], Any]) -> Iterator[None]:
    """Let cuts in this scope run their graph by this program instead of the compiled computation."""
    before = events.take_over

    def run(computation: Any, inputs: list[Any]) -> list[Any]:
        result: list[Any] = program(computation.graph)(*map(memory.host, inputs))
        return result

    events.take_over = run
    try:
        yield
    finally:
        events.take_over = before


@contextmanager
def detect_nan() -> Iterator[None]:
    """Raise :class:`errors.NotANumber` for the first operation that makes a NaN, with its line and its inputs.

    Graphs run op by op on the reference interpreter inside the scope, so it is slow.  What is still pending at the
    end of the scope is run there.
    """

    def run(graph: Any) -> Any:
        def checked(*inputs: Any) -> list[Any]:
            names.use(names.look(source.user_frame()))
            try:
                return Checked(graph)(*inputs)
            except Found as found:
                raise found.error from None
            finally:
                names.forget()

        return checked

    with instead(run):
        yield
        cut.cut("detect_nan")
