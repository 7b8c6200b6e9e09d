"""Graphs as text, dot, Python, the backend's own text, or a picture: what would run to make some tensors."""

from __future__ import annotations

import hashlib
import html
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import registry
from lazytensor.backend.graph import Graph
from lazytensor.inspect import draw, events, places
from lazytensor.trace import source, storage
from lazytensor.trace.ir import Node, Number, Value, show


def dump(tensors: torch.Tensor | Iterable[torch.Tensor], format: str = "text") -> str:
    """The graph that makes these tensors: ``text``, ``dot``, ``python`` (a program that runs), ``backend`` or ``svg``.

    In ``torch._lazy`` this is ``debug.dump_ir`` and ``debug.render_ir_graph``.  Nothing runs.
    """
    writer = FORMATS.get(format)
    if writer is None:
        raise ValueError(f"Unrecognized IR format: {format}; known are {', '.join(FORMATS)}")
    if isinstance(tensors, torch.Tensor):
        tensors = [tensors]
    return writer(Graph(list(dict.fromkeys(storage.value_of(t) for t in tensors))))


def text(graph: Graph) -> str:
    """One line a node: name, shape, op, arguments, where it is a root, and the line that recorded it."""
    roots = {value: number for number, value in enumerate(graph.outputs)}
    lines = ["IR {"]
    for leaf in graph.inputs:
        kind = leaf.spec if isinstance(leaf, Value) else leaf.kind.__name__
        root = f", ROOT={roots[leaf]}" if isinstance(leaf, Value) and leaf in roots else ""
        lines.append(f"  %{leaf.name} = {kind} lazytensor::{'data' if isinstance(leaf, Value) else 'number'}(){root}")
    for node in graph.nodes:
        outputs = [v for v in node.outputs if v is not None]
        marks = "".join(f", ROOT={roots[v]}" for v in outputs if v in roots)
        names = ", ".join("%" + v.name for v in outputs)
        shapes = ", ".join(str(v.spec) for v in outputs)
        lines.append(f"  {names} = {shapes} {node.op.name}({_arguments(node)}){marks}  # {_where(node)}")
    return "\n".join([*lines, "}", ""])


def _arguments(node: Node) -> str:
    schema = node.op.overload._schema.arguments
    parts = []
    for position, argument in enumerate(node.args):
        if _is_reference(argument):
            parts.append(_referenced(argument))
        else:
            parts.append(f"{schema[position].name}={show(argument)}")
    return ", ".join(parts)


def _is_reference(argument: Any) -> bool:
    if isinstance(argument, tuple):
        return any(map(_is_reference, argument))
    return isinstance(argument, Value | Number)


def _referenced(argument: Any) -> str:
    if isinstance(argument, tuple):
        return "[" + ", ".join(map(_referenced, argument)) + "]"
    return f"%{argument.name}" if isinstance(argument, Value | Number) else show(argument)


def _where(node: Node) -> str:
    if node.line is None or node.line is source.UNKNOWN:
        return "?"
    module = f" {node.line.module}" if node.line.module else ""
    return f"{places.of(node.line)}{module}{' (backward)' if node.line.forward is not None else ''}"


def dot(graph: Graph) -> str:
    """The graph in the language of Graphviz."""
    lines = ["digraph G {", '  node [shape=box, fontname="monospace"];']
    names: dict[Any, str] = {}
    for number, leaf in enumerate(graph.inputs):
        names[leaf] = f"i{number}"
        kind = leaf.spec if isinstance(leaf, Value) else leaf.kind.__name__
        lines.append(f'  i{number} [label="{_escaped(f"{leaf.name}: {kind}")}", style=rounded];')
    roots = set(graph.outputs)
    for number, node in enumerate(graph.nodes):
        constants = ", ".join(show(a) for a in node.args if not _is_reference(a))[:64]
        shapes = ", ".join(str(v.spec) for v in node.outputs if v is not None)
        label = "\\n".join(_escaped(part) for part in (node.op.name, shapes, constants, _where(node)) if part)
        bold = ", penwidth=3" if any(v in roots for v in node.outputs) else ""
        lines.append(f'  n{number} [label="{label}"{bold}];')
        for position, value in enumerate([*node.inputs, *node.numbers]):
            lines.append(f'  {names[value]} -> n{number} [label="i={position}"];')
        for value in node.outputs:
            if value is not None:
                names[value] = f"n{number}"
    return "\n".join([*lines, "}", ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def python(graph: Graph) -> str:
    """The graph as a Python program that runs by itself."""
    return graph.python()


def backend(graph: Graph) -> str:
    """What the backend in force makes of the graph, as it shows it."""
    return registry.current().computation(graph).text


def svg(graph: Graph) -> str:
    """The graph as a picture; pointing at a node shows its line."""
    return draw.svg(graph, lambda node: html.escape(f"{node!r}\n{_where(node)}"))


FORMATS: dict[str, Callable[[Graph], str]] = {
    "text": text,
    "dot": dot,
    "python": python,
    "backend": backend,
    "svg": svg,
}


# --- the save-tensors file ------------------------------------------------------------------------------------------


def _save(graph: Graph) -> None:
    """Append the graph of a cut to the file named by ``LTC_SAVE_TENSORS_FILE``."""
    format = settings.save_tensors_format
    body = FORMATS.get(format, text)(graph)
    stack = "".join(
        traceback.format_list([f for f in traceback.extract_stack() if not source.is_library(f.filename)])
    ).rstrip()
    digest = hashlib.sha256(text(graph).encode()).hexdigest()[:32]
    with Path(settings.save_tensors_file).open("a") as file:
        file.write(
            f"[ScheduleSyncTensorsGraph]\nPython Stacktrace:\n{stack}\nHashes: ({digest})\n\n"
            f"## BEGIN_GRAPH\n{body}## END_GRAPH\n\n"
        )


def save_graphs() -> None:
    """Begin to save, if the settings name a file; called at import."""
    events.after_cut = _save if settings.save_tensors_file else None
    if settings.save_tensors_file and settings.save_tensors_format not in FORMATS:
        events.log.warning("lazytensor: Invalid save graph format: %s; text is written", settings.save_tensors_format)


save_graphs()
