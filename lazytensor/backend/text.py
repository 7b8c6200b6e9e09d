"""A graph as a Python program: one line an operation, each under the line of the user's program that recorded it."""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.backend.graph import Graph, output_paths
from lazytensor.trace.ir import Node, Number, Value, contiguous_stride


class Names:
    """Names of values that read well and are unique in the program: inputs x0, n0, results v0, v1, …"""

    def __init__(self, graph: Graph) -> None:
        self.of: dict[Any, str] = {}
        for number, value in enumerate(graph.data):
            self.of[value] = f"x{number}"
        for number, lifted in enumerate(graph.numbers):
            self.of[lifted] = f"n{number}"
        for number, node in enumerate(graph.nodes):
            for made in node.outputs:
                if made is not None:
                    self.of[made] = f"v{number}" + (f"_{made.index}" if len(node.outputs) > 1 else "")


class Raw:
    """Text that stands for itself when an argument is printed."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def literal(argument: Any) -> str:
    """An argument as Python source."""
    if isinstance(argument, torch.device):
        return f"torch.device({str(argument)!r})"
    if isinstance(argument, list | tuple):
        return "[" + ", ".join(map(literal, argument)) + "]"
    if isinstance(argument, float) and (argument != argument or argument in (float("inf"), float("-inf"))):
        return f"float({str(argument)!r})"
    return repr(argument)


def statement(graph: Graph, node: Node, names: Names) -> str:
    """One operation as an assignment."""
    positional, keyword = graph.call(node, lambda leaf: Raw(names.of[leaf]))
    arguments = [literal(a) for a in positional] + [f"{k}={literal(a)}" for k, a in keyword.items()]
    namespace, _, rest = node.op.name.partition("::")
    base, _, overload = rest.partition(".")
    call = f"torch.ops.{namespace}.{base}.{overload or 'default'}({', '.join(arguments)})"
    targets = ["_" if v is None else names.of[v] for v in node.outputs]
    paths = output_paths(node)
    if paths == [()]:
        return f"{targets[0]} = {call}"
    if all(len(p) == 1 for p in paths):
        return f"{', '.join(targets)}{',' if len(targets) == 1 else ''} = {call}"
    parts: dict[int, Any] = {}
    for path, target in zip(paths, targets, strict=True):
        parts[path[0]] = [*parts.get(path[0], []), Raw(target)] if len(path) == 2 else Raw(target)
    return f"{', '.join(map(literal, parts.values()))} = {call}"


def results(graph: Graph, names: Names) -> list[str]:
    """What the program returns: what would share memory is copied into memory of its own."""
    found = []
    for number, value in enumerate(graph.outputs):
        name = names.of[value]
        if number in graph.shared_outputs:
            spec = value.spec
            name = f"torch.empty_strided({list(spec.size)}, {list(spec.stride)}, dtype={spec.dtype}).copy_({name})"
        found.append(name)
    return found


def _made_up(leaf: Value | Number) -> str:
    """An input of the right geometry, for running the program by itself."""
    if isinstance(leaf, Number):
        return repr(leaf.kind(1))
    spec = leaf.spec
    if spec.dtype.is_floating_point or spec.dtype.is_complex:
        made = f"torch.ones({list(spec.size)}, dtype={spec.dtype})"
    else:
        made = f"torch.zeros({list(spec.size)}, dtype={spec.dtype})"
    if spec.stride != contiguous_stride(spec.size):
        made = f"torch.empty_strided({list(spec.size)}, {list(spec.stride)}, dtype={spec.dtype}).copy_({made})"
    return made


def program(graph: Graph) -> str:
    """The whole program."""
    names = Names(graph)
    lines = ["import torch", "", "", f"def step({', '.join(names.of[i] for i in graph.inputs)}):"]
    lines += [f"    # {names.of[v]}: {v.spec}" for v in graph.data]
    lines += [f"    # {names.of[n]}: a lifted {n.kind.__name__}" for n in graph.numbers]
    line = None
    for node in graph.nodes:
        if node.line is not line:
            line = node.line
            lines.append(f"    # {line}")
        lines.append("    " + statement(graph, node, names))
    lines.append(f"    return [{', '.join(results(graph, names))}]")
    lines += ["", "", "def inputs():", "    return ["]
    lines += [f"        {_made_up(leaf)},  # {names.of[leaf]}" for leaf in graph.inputs]
    lines += [
        "    ]",
        "",
        "",
        'if __name__ == "__main__":',
        "    for result in step(*inputs()):",
        "        print(result)",
    ]
    return "\n".join(lines) + "\n"
