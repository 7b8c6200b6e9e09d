"""A graph as an SVG picture, laid out in layers: a node stands below everything it uses, near what it uses."""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from typing import Any

from lazytensor.trace.ir import Node, Value

WIDTH, HEIGHT, ACROSS, DOWN = 190, 40, 24, 46
LIMIT = 3000  # nodes that a picture of this kind can show


def layers(nodes: list[Any], inputs: Callable[[Any], list[Any]]) -> list[list[Any]]:
    """Nodes in layers, each below what it uses, and within a layer ordered by the mean place of what it uses."""
    depth: dict[Any, int] = {}
    rows: list[list[Any]] = []
    for node in nodes:
        depth[node] = 1 + max([depth[i] for i in inputs(node) if i in depth], default=-1)
        while len(rows) <= depth[node]:
            rows.append([])
        rows[depth[node]].append(node)
    place: dict[Any, float] = {}
    for row in rows:
        means = {n: _mean([place[i] for i in inputs(n) if i in place]) for n in row}
        row.sort(key=lambda n: means[n])
        for index, node in enumerate(row):
            place[node] = index - len(row) / 2
    return rows


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def svg(graph: Any, title: Callable[[Node], str]) -> str:
    """The picture."""
    if len(graph.nodes) > LIMIT:
        raise ValueError(
            f"the graph has {len(graph.nodes)} operations, more than the {LIMIT} that an svg can show: use lt.report()"
        )
    leaves = list(graph.data)
    keys: list[Any] = [*leaves, *graph.nodes]
    feeds = {node: [v if v.leaf else v.node for v in node.inputs] for node in graph.nodes}
    rows = layers(keys, lambda key: feeds.get(key, []))
    widest = max(map(len, rows), default=1)
    total = widest * (WIDTH + ACROSS) + ACROSS
    at: dict[Any, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (total - len(row) * (WIDTH + ACROSS)) / 2
        for index, key in enumerate(row):
            at[key] = (left + index * (WIDTH + ACROSS), ACROSS + level * (HEIGHT + DOWN))
    results = {v.node for v in graph.outputs}
    parts = []
    for node in graph.nodes:
        x, y = at[node]
        for key in feeds[node]:
            if key in at:
                a, b = at[key]
                parts.append(
                    f'<path d="M{a + WIDTH / 2:.0f},{b + HEIGHT} C{a + WIDTH / 2:.0f},{b + HEIGHT + DOWN / 2:.0f} '
                    f'{x + WIDTH / 2:.0f},{y - DOWN / 2:.0f} {x + WIDTH / 2:.0f},{y:.0f}"/>'
                )
    for key, (x, y) in at.items():
        parts.append(_box(key, x, y, key in results, title))
    height = len(rows) * (HEIGHT + DOWN) + ACROSS
    style = (
        "rect{fill:#eef;stroke:#447;rx:6}.leaf rect{fill:#efe;stroke:#474}.root rect{stroke-width:3}"
        "path{fill:none;stroke:#999}text{font:12px monospace;fill:#112}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {height}" width="{total}" height="{height}">'
        f"<style>{style}</style>{''.join(parts)}</svg>\n"
    )


def _box(key: Any, x: float, y: float, root: bool, title: Callable[[Node], str]) -> str:
    if isinstance(key, Value):
        kind, head, below, hint = "leaf", key.name, str(key.spec), escape(repr(key))
    else:
        kind, head = "root" if root else "op", key.op.name.removeprefix("aten::")
        below = ", ".join(str(v.spec) for v in key.outputs if v is not None)
        hint = title(key)
    return (
        f'<g class="{kind}"><title>{hint}</title><rect x="{x:.0f}" y="{y:.0f}" width="{WIDTH}" height="{HEIGHT}"/>'
        f'<text x="{x + 8:.0f}" y="{y + 16:.0f}">{escape(head[:24])}</text>'
        f'<text x="{x + 8:.0f}" y="{y + 32:.0f}" opacity=".7">{escape(below[:24])}</text></g>'
    )
