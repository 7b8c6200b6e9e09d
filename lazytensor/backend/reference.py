"""The reference backend: op by op on the CPU.  It is the living definition of what a graph means.

A graph is turned into a flat list of instructions over numbered slots.  Each runs one ATen op; a slot is emptied at the
last use of what it holds.  The first run also checks every result against the declared geometry: where PyTorch's meta
kernel predicted other strides than the CPU kernel gives, a copy into the declared strides is put in for good.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.backend import cpu_only
from lazytensor.backend.contract import Failure, misplaced, out_of_memory, restrided
from lazytensor.backend.graph import Graph, single
from lazytensor.backend.interface import Backend
from lazytensor.trace.ir import Node, Spec, Value
from lazytensor.trace.shapes import clean

_CPU = torch.device("cpu")


def _pack(*items: Any) -> list[Any]:
    return list(items)


def _one(slot: int) -> Callable[[list[Any]], tuple[Any]]:
    def get(slots: list[Any]) -> tuple[Any]:
        return (slots[slot],)

    return get


def _none(slots: list[Any]) -> tuple[()]:
    return ()


def getter(positions: list[int]) -> Callable[[list[Any]], tuple[Any, ...]]:
    """A fast function from the slots to the tuple of arguments at these positions."""
    if not positions:
        return _none
    if len(positions) == 1:
        return _one(positions[0])
    return operator.itemgetter(*positions)  # type: ignore[return-value]


class Program:
    """The instructions of one graph.  Calling it with the graph's inputs gives the list of its results.

    The inputs are tensors of one device, and so are the results: of the CPU, but for the first tier of an accelerator.
    """

    @property
    def guarded(self) -> Program:
        """It keeps a backend's promises by itself."""
        return self

    def __init__(self, graph: Graph, device: torch.device | None = None) -> None:
        self.graph = graph
        self.device = device
        self.slots: dict[Any, int] = {}
        self.initial: list[Any] = []
        for leaf in graph.inputs:
            self._slot(leaf)
        self.instructions: list[list[Any]] = []
        last_uses = graph.last_uses
        for node in graph.nodes:
            self._emit(node, last_uses.get(node, []))
        self.results = [self.slots[v] for v in graph.outputs]
        self.copies = graph.shared_outputs
        self.checked = False
        self.mends: dict[Value, Spec] = {}  # values whose kernel gives another layout than declared

    def _slot(self, key: Any, initial: Any = None) -> int:
        self.slots[key] = len(self.initial)
        self.initial.append(initial)
        return self.slots[key]

    def _place(self, argument: Any) -> int:
        """The slot of an argument: a value's, a constant's, or that of a list put together just before the call."""
        if isinstance(argument, list):
            if any(isinstance(a, _Ref) for a in argument):
                slot = self._slot(object())
                self.instructions.append([None, _pack, getter([self._place(a) for a in argument]), None, slot, ()])
                return slot
            return self._slot(object(), argument)
        if isinstance(argument, _Ref):
            return self.slots[argument.value]
        return self._slot(object(), argument)

    def _emit(self, node: Node, dying: list[Value]) -> None:
        positional, keyword = self.graph.call(node, _Ref, self.device or _CPU)
        function = node.op.overload._op
        if self.device is not None:
            function = cpu_only.instead(node.op) or function
        fixed = {k: v for k, v in keyword.items() if not isinstance(v, _Ref)}
        moving = [(k, self.slots[v.value]) for k, v in keyword.items() if isinstance(v, _Ref)]
        if fixed:
            function = functools.partial(function, **fixed)
        get = getter([self._place(a) for a in positional])
        outputs = [None if v is None else self._slot(v) for v in node.outputs]
        target: Any = outputs
        if len(outputs) == 1 and single(node):
            target = outputs[0]
        self.instructions.append([node, function, get, moving or None, target, tuple(self.slots[v] for v in dying)])

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run every instruction; where an op failed, what depends on it is a Failure."""
        slots = self.initial.copy()
        slots[: len(inputs)] = inputs
        with clean():
            if not self.checked:
                self._check(slots)
            else:
                position = 0
                try:
                    for position, (_node, function, get, moving, target, dying) in enumerate(self.instructions):  # noqa: B007  (it is used after a failure)
                        if moving is None:
                            result = function(*get(slots))
                        else:
                            result = function(*get(slots), **{k: slots[i] for k, i in moving})
                        if target.__class__ is int:
                            slots[target] = result
                        else:
                            _spread(slots, target, result)
                        for slot in dying:
                            slots[slot] = None
                except Exception as error:
                    self._go_on(slots, position, error)
            return self._collect(slots)

    def resume(self, inputs: tuple[Any, ...], done: int, values: dict[Any, Any]) -> list[Any]:
        """Run what comes after the first operations, so many, which have run elsewhere and left these values.

        Only a program that has not run can do this, and only once.
        """
        slots = self.initial.copy()
        slots[: len(inputs)] = inputs
        for value in list(values):
            slots[self.slots[value]] = values.pop(value)
        position = 0
        while done:
            done -= self.instructions[position][0] is not None
            position += 1
        del self.instructions[:position]
        with clean():
            self._check(slots)
            results = self._collect(slots)
        slots.clear()  # which the traceback of a failure holds
        return results

    def _collect(self, slots: list[Any]) -> list[Any]:
        results = [slots[i] for i in self.results]
        for number in self.copies:
            value = results[number]
            if not isinstance(value, Failure):
                results[number] = restrided(value, self.graph.outputs[number].spec)
        return results

    def _check(self, slots: list[Any]) -> None:
        """The first run: compare each result with what was declared, and mend the program where they differ."""
        mended: list[list[Any]] = []
        failed = False
        alias = {slots[i].untyped_storage().data_ptr() for i in range(len(self.graph.data))} - {0}
        for instruction in self.instructions:
            mended.append(instruction)
            node, target, dying = instruction[0], instruction[4], instruction[5]
            if failed and self._poisoned(slots, instruction):
                continue
            try:
                self._run(slots, instruction)
                if node is not None and not node.op.view:
                    for value in node.outputs:
                        if value is not None:
                            self._compare(slots, value, alias, mended)
            except Exception as error:
                self._fail(slots, instruction, error)
                failed = True
                continue
            for slot in dying:
                slots[slot] = None
            del target
        if not failed:
            self.instructions = mended
            self.checked = True

    def _compare(self, slots: list[Any], value: Value, inputs: set[int], mended: list[list[Any]]) -> None:
        slot = self.slots[value]
        tensor, spec = slots[slot], value.spec
        if tuple(tensor.shape) != spec.size or tensor.dtype is not spec.dtype:
            raise AssertionError(
                f"{value.node.op.name} was declared {spec} and gave {tensor.dtype}{list(tensor.shape)}: "
                "its shape rule is wrong"
            )
        shares = tensor.untyped_storage().data_ptr() in inputs and spec.numel
        if shares or misplaced(tensor, spec):
            self.mends[value] = spec
            fix = functools.partial(restrided, spec=spec)
            mended.append([None, fix, _one(slot), None, slot, ()])
            mended[-2][5], mended[-1][5] = (), mended[-2][5]
            slots[slot] = fix(tensor)

    def _run(self, slots: list[Any], instruction: list[Any]) -> None:
        _node, function, get, moving, target, _dying = instruction
        result = function(*get(slots), **{k: slots[i] for k, i in moving or ()})
        if target.__class__ is int:
            slots[target] = result
        else:
            _spread(slots, target, result)

    def _go_on(self, slots: list[Any], position: int, error: Exception) -> None:
        """After a failure: everything that does not depend on the failed op still runs."""
        self._fail(slots, self.instructions[position], error)
        for instruction in self.instructions[position + 1 :]:
            if self._poisoned(slots, instruction):
                continue
            try:
                self._run(slots, instruction)
            except Exception as another:
                self._fail(slots, instruction, another)

    def _poisoned(self, slots: list[Any], instruction: list[Any]) -> bool:
        for argument in instruction[2](slots):
            cause = (
                next((a for a in argument if isinstance(a, Failure)), None) if isinstance(argument, list) else argument
            )
            if isinstance(cause, Failure):
                self._put_failure(slots, instruction[4], cause)
                return True
        return False

    def _fail(self, slots: list[Any], instruction: list[Any], error: Exception) -> None:
        """Go on without this result.

        Out of memory ends the run instead, the first time: what is pending can run when there is room.  The second
        time only what needs the memory is given up: a tensor too large for the machine does not stop everything else.
        """
        if out_of_memory(error) and self.graph not in _ran_out:
            _ran_out.add(self.graph)
            if instruction[0] is not None:
                error.add_note(f"lazytensor: in {instruction[0].op.name}, recorded at {instruction[0].line}")
            error.add_note("lazytensor: nothing is lost: free memory and sync again, or delete what needs it.")
            raise error
        self._put_failure(slots, instruction[4], Failure(error, instruction[0]))

    def _put_failure(self, slots: list[Any], target: Any, failure: Failure) -> None:
        for slot in [target] if target.__class__ is int else target:
            if slot is not None:
                slots[slot] = failure


_ran_out: weakref.WeakSet[Graph] = weakref.WeakSet()  # graphs for which there was no memory


class _Ref:
    """A value or number among a call's arguments."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _spread(slots: list[Any], targets: list[int | None], result: Any) -> None:
    """Put the parts of a result, lists opened, into their slots."""
    parts = [result] if isinstance(result, torch.Tensor) else list(_leaves(result))
    for slot, part in zip(targets, parts, strict=True):
        if slot is not None:
            slots[slot] = part


def _leaves(result: Any) -> Any:
    for part in result:
        if isinstance(part, list | tuple):
            yield from _leaves(part)
        else:
            yield part


class ReferenceBackend(Backend):
    """Op by op on the CPU: the definition of what a graph means.  Every other backend is compared with it."""

    name = "reference"
    version = torch.__version__

    def compile(self, graph: Graph) -> Program:
        """The graph's instructions.  They check themselves, so nothing guards them."""
        return Program(graph)
