"""A graph's instructions in C++: op by op as :mod:`lazytensor.backend.reference` runs them, without Python's lock.

The first runs are the reference interpreter's: they show which values the CPU's kernels lay out otherwise than
declared.  Then the same operations are handed to ``native/interpreter.cpp``, with a copy where one is needed, and the
interpreter's own instructions are dropped.  A run that fails there goes on in the interpreter, from the operation that
failed, which it names: every operation runs once.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from lazytensor import native
from lazytensor.backend import heap
from lazytensor.backend.contract import Failure
from lazytensor.backend.graph import Graph
from lazytensor.backend.reference import Program
from lazytensor.trace.ir import Number, Spec, Value
from lazytensor.trace.shapes import clean, may_overlap


class Instructions:
    """A graph in C++: called with its inputs, gives the list of its results."""

    def __init__(self, extension: Any, graph: Graph, mends: dict[Value, Spec]) -> None:
        """``mends``: the values that their operations lay out otherwise than declared.

        Raises if an argument has no translation.
        """
        self.graph = graph
        self.mends = mends
        self.program: Program | None = None  # instead, if this fails where that does not
        slots: dict[Any, int] = {value: i for i, value in enumerate(_values(graph))}
        kinds = [number.kind for number in graph.numbers]
        planned = heap.worth_planning(extension, graph.nbytes)
        self.run = run = extension.Instructions(len(graph.data), kinds, len(slots), planned)
        slot = extension.Slot

        def convert(argument: Any) -> Any:
            return slot(slots[argument]) if argument.__class__ is Value or argument.__class__ is Number else argument

        def copy(spec: Spec, origin: int, target: int, dying: list[int]) -> None:
            if may_overlap(spec):
                raise ValueError(f"{spec} cannot be written by one operation")
            memory = run.slot()
            size, stride, cpu = list(spec.size), list(spec.stride), torch.device("cpu")
            run.add("aten::empty_strided", "", [size, stride, spec.dtype, None, cpu, None], [memory], [])
            run.add("aten::copy_", "", [slot(memory), slot(origin), False], [target], [memory, *dying])

        last_uses = graph.last_uses
        for node in graph.nodes:
            positional, keyword = graph.call(node, convert)
            name, _, overload = node.op.name.partition(".")
            outputs = [slots.get(value) for value in node.outputs]
            dying = [slots[value] for value in last_uses.get(node, ())]
            wrong = _mended(node, mends)
            run.add(name, overload, [*positional, *keyword.values()], outputs, [] if wrong else dying)
            for value in wrong:
                copy(value.spec, slots[value], slots[value], dying if value is wrong[-1] else [])
        results = [slots[value] for value in graph.outputs]
        for number in graph.shared_outputs:
            target = run.slot()
            copy(graph.outputs[number].spec, results[number], target, [])
            results[number] = target
        run.finish(results)

    def __call__(self, *inputs: Any) -> list[Any]:
        """Run it."""
        if self.program is not None:
            return self.program(*inputs)
        with clean():
            found = self.run(inputs)
        return found if found.__class__ is list else self._go_on(inputs, *found)

    def _go_on(self, inputs: tuple[Any, ...], position: int, held: list[Any]) -> list[Any]:
        """The rest of a run in which an instruction failed."""
        done = 0
        for node in self.graph.nodes:
            position -= 1 + 2 * len(_mended(node, self.mends))
            if position < 0:
                break
            done += 1
        values = {value: tensor for value, tensor in zip(_values(self.graph), held) if tensor is not None}
        held.clear()
        results = Program(self.graph).resume(inputs, done, values)
        if not any(result.__class__ is Failure for result in results):
            self.program = Program(self.graph)
        return results


def _values(graph: Graph) -> Iterator[Value | Number]:
    """What has a slot, in order."""
    outputs = itertools.chain.from_iterable(node.outputs for node in graph.nodes)
    return itertools.chain(graph.inputs, (value for value in outputs if value is not None))


def _mended(node: Any, mends: dict[Value, Spec]) -> list[Value]:
    return [value for value in node.outputs if value in mends] if mends else []


def translated(graph: Graph, program: Program) -> Instructions | None:
    """The same graph in C++; None if the extension has not been built, or an argument has no translation."""
    extension = native.extension()
    if extension is None:
        return None
    try:
        return Instructions(extension, graph, program.mends)
    except Exception:  # of PyTorch's conversions, whatever they raise: Python's calls take more than they do
        return None
