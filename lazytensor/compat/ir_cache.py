"""The cache of nodes (``torch._lazy.ir_cache``)."""

from __future__ import annotations

from pathlib import Path

from lazytensor.backend.graph import Graph
from lazytensor.execute import cut
from lazytensor.inspect.dump import FORMATS
from lazytensor.trace.ir import Value


def dump(dot_file_name: str) -> None:
    """Write the nodes of every cached graph to a file, in Graphviz's dot; those that graphs share stand there once."""
    outputs: dict[Value, None] = {}
    for computation in cut.computations.values():
        outputs.update(dict.fromkeys(computation.graph.outputs))
    Path(dot_file_name).write_text(FORMATS["dot"](Graph(list(outputs))))


def reset() -> None:
    """Forget every cached node and every compiled graph.  What is pending stays pending."""
    cut.clear()
