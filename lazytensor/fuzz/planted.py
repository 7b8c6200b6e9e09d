"""Bugs put into lazytensor on purpose, one kind each, to show that random programs find them.

Each is a context manager that breaks one mechanism and mends it afterwards.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from lazytensor.execute import cut
from lazytensor.trace import record, shapes, storage
from lazytensor.trace.ir import Spec, contiguous_stride, number_leaf, spec

BUGS: dict[str, Callable[[], contextlib.AbstractContextManager[None]]] = {}


def bug(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    """Register a bug under its function's name; nothing compiled or recorded outlives it."""

    @contextlib.contextmanager
    def planted() -> Iterator[None]:
        cut.clear()
        with contextlib.contextmanager(function)():
            yield
        cut.clear()

    BUGS[function.__name__] = planted
    return function


@contextlib.contextmanager
def _replaced(where: Any, name: str, new: Any) -> Iterator[None]:
    old = getattr(where, name)
    setattr(where, name, new)
    try:
        yield
    finally:
        setattr(where, name, old)


@bug
def stale_view() -> Iterator[None]:
    """A view keeps its old value when its base is written."""
    with _replaced(storage, "forget_views", lambda base: None):
        yield


@bug
def lost_update() -> Iterator[None]:
    """A write through a view is dropped."""
    from lazytensor.trace import scatter

    with _replaced(scatter, "replace", lambda view, new: storage.value_of_state(view.base)):
        yield


@bug
def wrong_leaf_order() -> Iterator[None]:
    """Two inputs that look alike change places."""
    original = cut.Computation.build

    def swapped(self: Any, *args: Any) -> None:
        original(self, *args)
        for i, one in enumerate(self.graph.data):
            for j in range(i):
                if self.graph.data[j].spec is one.spec:
                    self.data[i], self.data[j] = self.data[j], self.data[i]
                    return

    with _replaced(cut.Computation, "build", swapped):
        yield


@bug
def stale_cache_key() -> Iterator[None]:
    """A graph that was seen before runs with the numbers of its first run."""
    original = cut.Computation.build

    def frozen(self: Any, *args: Any) -> None:
        original(self, *args)
        count = len(self.data)
        first: list[Any] = []
        run = self.run

        def with_first_numbers(*inputs: Any) -> list[Any]:
            if not first:
                first.extend(inputs[count:])
            return run(*inputs[:count], *first)  # type: ignore[no-any-return]

        self.run = with_first_numbers

    with _replaced(cut.Computation, "build", frozen):
        yield


@bug
def double_execution() -> Iterator[None]:
    """A cut runs twice, the second time on its own results."""
    original = cut.Computation.build

    def twice(self: Any, *args: Any) -> None:
        original(self, *args)
        run, replaces = self.run, self.graph.replaces

        def again(*inputs: Any) -> list[Any]:
            results = run(*inputs)
            if not replaces:
                return results  # type: ignore[no-any-return]
            fed = list(inputs)
            for number, position in replaces.items():
                fed[position] = results[number]
            return run(*fed)  # type: ignore[no-any-return]

        self.run = again

    with _replaced(cut.Computation, "build", twice):
        yield


@bug
def missing_donation_check() -> Iterator[None]:
    """A result is written into the memory of any input that looks like it."""
    original = cut.Computation.build

    def greedy(self: Any, *args: Any) -> None:
        original(self, *args)
        run, graph = self.run, self.graph

        def overwrite(*inputs: Any) -> list[Any]:
            results = run(*inputs)
            for value, result in zip(graph.outputs, results, strict=True):
                for leaf, data in zip(graph.data, inputs, strict=False):
                    if leaf.spec is value.spec and isinstance(result, torch.Tensor):
                        data.copy_(result)
                        break
            return results  # type: ignore[no-any-return]

        self.run = overwrite

    with _replaced(cut.Computation, "build", greedy):
        yield


@bug
def wrong_promotion() -> Iterator[None]:
    """A Python integer is recorded as a float."""

    def as_float(number: Any) -> Any:
        storage.numbers.append(float(number) if type(number) is int else number)
        kind = float if type(number) is int else type(number)
        return number_leaf(len(storage.numbers) - 1, kind)

    with _in_kernels("lift", as_float):
        yield


@contextlib.contextmanager
def _in_kernels(name: str, new: Any) -> Iterator[None]:
    """Replace a name that the generated kernels use."""
    from lazytensor.device import registration

    some_kernel = next(iter(registration.generated_kernels.values()))
    scope = some_kernel.__globals__
    old = scope[name]
    scope[name] = new
    try:
        yield
    finally:
        scope[name] = old


@bug
def wrong_stride() -> Iterator[None]:
    """Every new tensor is taken for contiguous."""
    original = record.spec_of  # type: ignore[attr-defined]

    def contiguous(tensor: torch.Tensor, device: int) -> Spec:
        found = original(tensor, device)
        return spec(found.size, contiguous_stride(found.size), found.offset, found.dtype, found.device)

    with _replaced(record, "spec_of", contiguous):
        yield


@bug
def lost_error() -> Iterator[None]:
    """The CPU is not asked for the error of a call that its meta kernel refuses or lets pass."""

    def no_error(*args: Any, **kwargs: Any) -> Any:
        raise shapes.CannotInfer("nothing is known of it")

    def swallow(overload: Any, args: Any, reason: Any) -> Any:
        return torch.zeros((), device="ltc")

    with _replaced(shapes, "_without_meta", no_error), _replaced(record, "run_eagerly", swallow):
        yield


@bug
def mixed_up_list_results() -> Iterator[None]:
    """The parts of a split come in the opposite order."""
    original = record.record_view

    def backwards(op: Any, tensor: Any, args: Any) -> Any:
        made = original(op, tensor, args)
        return made[::-1] if isinstance(made, list) else made

    with _in_kernels("record_view", backwards):
        yield
