"""Clean-up of a graph before any backend sees it: exact, each pass one file, each can be switched off.

A pass is a rule: given a node whose arguments are already cleaned, it names the value that its result equals, or says
nothing; the nodes it makes for that come with it.  Dead code needs no pass (a graph is what its outputs depend on), and
common subexpressions are one value by interning.  ``settings.without_passes`` names the passes to leave out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lazytensor import settings
from lazytensor.backend.graph import Graph
from lazytensor.backend.passes import casts, copies, views
from lazytensor.trace.ir import Node, Value, walk

Rule = Callable[[Node], "Value | copies.Instead | None"]

PASSES: dict[str, Rule] = {"copies": copies.rule, "casts": casts.rule, "views": views.rule}


def clean(graph: Graph) -> Graph:
    """The graph with every pass applied that is not switched off."""
    left_out = set(settings.without_passes.split(","))
    rules = [rule for name, rule in PASSES.items() if name not in left_out]
    return rewrite(graph, rules) if rules else graph


def rewrite(graph: Graph, rules: list[Rule]) -> Graph:
    """One walk in which each node is looked at by every rule, with its arguments already replaced."""
    new: dict[Value, Value] = {}
    order: list[Node] = []
    changed = False
    for node in graph.nodes:
        current = node
        if any(v in new for v in node.inputs):
            current = Node(node.op, _replace(node.args, new), node.line)
            current.outputs = tuple(None if v is None else Value(current, v.index, v.spec) for v in node.outputs)
            new.update((old, made) for old, made in zip(node.outputs, current.outputs, strict=True) if old is not None)  # type: ignore[misc]
        if len(current.outputs) == 1 and current.outputs[0] is not None:
            for rule in rules:
                same = rule(current)
                if same is not None:
                    if same.__class__ is not Value:
                        order += same.made  # type: ignore[union-attr]
                        same = same.value  # type: ignore[union-attr]
                    new[node.outputs[0]] = same  # type: ignore[index,assignment]
                    changed = True
                    break
        order.append(current)
    if not changed:
        return graph
    outputs = [new.get(v, v) for v in graph.outputs]
    needed = set(walk(outputs))
    cleaned = Graph(outputs, nodes=[n for n in dict.fromkeys(order) if n in needed])
    position = {v: i for i, v in enumerate(cleaned.data)}
    for number, at in graph.replaces.items():
        where = position.get(graph.data[at])
        if where is not None:
            cleaned.replaces[number] = where
    return cleaned


def _replace(args: tuple[Any, ...], new: dict[Value, Value]) -> tuple[Any, ...]:
    return tuple(
        _replace(a, new) if a.__class__ is tuple else new.get(a, a) if a.__class__ is Value else a for a in args
    )
