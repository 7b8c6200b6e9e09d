"""A graph as a ``torch.fx.GraphModule``, for whoever has an FX compiler already."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx

from lazytensor.backend.graph import Graph, output_paths
from lazytensor.backend.text import Names


def module(graph: Graph) -> torch.fx.GraphModule:
    """One ``placeholder`` an input, one ``call_function`` an operation, ``operator.getitem`` for the parts of several
    results.

    ``meta["spec"]`` holds the geometry of a tensor, ``meta["number"]`` the type of a lifted number, ``meta["source"]``
    the user's line.
    """
    made = torch.fx.Graph()
    names = Names(graph)
    at: dict[Any, torch.fx.Node] = {}
    for value in graph.data:
        at[value] = made.placeholder(names.of[value])
        at[value].meta["spec"] = value.spec
    for number in graph.numbers:
        at[number] = made.placeholder(names.of[number])
        at[number].meta["number"] = number.kind
    for node in graph.nodes:
        positional, keyword = graph.call(node, at.__getitem__)
        call = made.call_function(node.op.overload, tuple(positional), keyword)
        call.meta["source"] = node.line
        call.stack_trace = _trace(node.line)
        parts: dict[tuple[int, ...], torch.fx.Node] = {(): call}
        for part_value, path in zip(node.outputs, output_paths(node), strict=True):
            if part_value is None:
                continue
            for depth in range(len(path)):
                if path[: depth + 1] not in parts:
                    part = made.call_function(operator.getitem, (parts[path[:depth]], path[depth]))
                    part.meta["source"] = node.line
                    parts[path[: depth + 1]] = part
            at[part_value] = parts[path]
            at[part_value].meta["spec"] = part_value.spec
    results = []
    for position, value in enumerate(graph.outputs):
        result = at[value]
        if position in graph.shared_outputs:
            spec = value.spec
            empty = made.call_function(
                torch.ops.aten.empty_strided.default, (list(spec.size), list(spec.stride)), {"dtype": spec.dtype}
            )
            result = made.call_function(torch.ops.aten.copy.default, (empty, result))
            empty.meta["spec"] = result.meta["spec"] = spec
        results.append(result)
    made.output(results)
    return torch.fx.GraphModule(torch.nn.Module(), made)


def _trace(line: Any) -> str | None:
    """A line in the form of a Python traceback, which FX compilers print."""
    if line is None or not hasattr(line, "file"):
        return None
    return f'  File "{line.file}", line {line.number}, in {line.function}\n'
