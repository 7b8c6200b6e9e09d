"""Pending graphs as text (``torch._lazy.debug``)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from lazytensor.inspect.dump import dump


def render_ir_graph(tensors: Iterable[torch.Tensor]) -> str:
    """The graph that makes these tensors, in Graphviz's dot."""
    return dump(tensors, "dot")


def dump_ir(tensors: Iterable[torch.Tensor], ir_format: str) -> str:
    """The graph as ``text``, or as the backend in force compiles it (``backend``)."""
    if ir_format not in ("text", "backend"):
        raise RuntimeError(f"Unrecognized IR format: {ir_format}")
    return dump(tensors, ir_format)
