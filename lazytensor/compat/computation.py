"""Graphs by their hash, to be run again with other inputs (``torch._lazy.computation``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from lazytensor import settings
from lazytensor.backend import graphfile, memory, registry
from lazytensor.backend.contract import Failure, restrided
from lazytensor.backend.data import Computation
from lazytensor.backend.graph import Graph
from lazytensor.trace import future, storage
from lazytensor.trace.ir import Number

_graphs: dict[tuple[bytes, str], Graph] = {}  # by hash and backend, the least recently used first
_compiled: dict[tuple[bytes, str], Computation] = {}


def graph_of(tensors: Iterable[torch.Tensor]) -> Graph:
    """The graph that makes these tensors."""
    return Graph([storage.value_of(tensor) for tensor in tensors])


def get_tensors_ts_device_data_node(tensors: Iterable[torch.Tensor]) -> tuple[list[int], list[torch.Tensor]]:
    """The inputs of the graph that makes these tensors, in the order in which ``run_cached_graph`` takes them: ids and
    values.

    An input without a tensor of its own (a lifted number, memory whose tensor is gone) has an id that no tensor has.
    """
    from lazytensor.compat import state_id

    graph = graph_of(tensors)
    ids, values = [], []
    for leaf in graph.data:
        number = leaf.node.args[1]
        state = storage.leaf_states[number]()
        ids.append(state_id(object.__new__(storage.State) if state is None else state))
        data = storage.leaf_data[number]
        values.append(memory.host(data.settle(state or storage.State()) if isinstance(data, future.Future) else data))
    for lifted in graph.numbers:
        ids.append(state_id(object.__new__(storage.State)))
        values.append(torch.tensor(storage.numbers[lifted.index], dtype=_DTYPES[lifted.kind]))
    return ids, values


_DTYPES = {float: torch.float64, int: torch.int64, bool: torch.bool, complex: torch.complex128}


def get_graph_hash(tensors: Iterable[torch.Tensor]) -> bytes:
    """16 bytes that tell the graph of these tensors from any other; the graph can be run by them from now on."""
    graph = graph_of(tensors)
    found = hashlib.sha256(graphfile.dumps(graph).encode()).digest()[:16]
    key = (found, registry.current().name)
    _graphs.pop(key, None)
    _graphs[key] = graph
    while len(_graphs) > settings.cache_size:
        oldest = next(iter(_graphs))
        del _graphs[oldest]
        _compiled.pop(oldest, None)
    return found


def run_cached_graph(hash_str: bytes, graph_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run the graph of this hash on CPU tensors (numbers as tensors without dimensions, or as numbers); its results on
    the CPU.
    """
    backend = registry.current()
    key = (hash_str, backend.name)
    if key not in _graphs:
        raise RuntimeError(
            f"Failed to find the graph {hash_str.hex()}. Maybe the entry get kicked out of the LRU cache, "
            "or it was hashed under another backend."
        )
    graph = _graphs[key] = _graphs.pop(key)
    if key not in _compiled:
        _compiled[key] = backend.computation(graph)
    if len(graph_inputs) != len(graph.inputs):
        raise RuntimeError(f"the graph has {len(graph.inputs)} inputs, and {len(graph_inputs)} were given")
    given = [_fitted(backend, leaf, each) for leaf, each in zip(graph.inputs, graph_inputs, strict=True)]
    results = _compiled[key].run(*given)
    for result in results:
        if isinstance(result, Failure):
            raise result.error
    return [memory.host(result) for result in results]


def _fitted(backend: Any, leaf: Any, given: Any) -> Any:
    if isinstance(leaf, Number):
        return leaf.kind(given.item() if isinstance(given, torch.Tensor) else given)
    spec = leaf.spec
    if tuple(given.shape) != spec.size or given.dtype is not spec.dtype:
        raise RuntimeError(f"an input is {given.dtype}{list(given.shape)}, and the graph takes {spec}")
    given = (
        given.detach()
        if given.stride() == spec.stride and not given.storage_offset()
        else restrided(given.detach(), spec)
    )
    return backend.to_device(given, spec, backend.devices()[0]) if backend.own_memory else given
