"""An FX model compiled once through the lazy device, to be called on CPU tensors
(``torch._lazy.extract_compiled_graph``).
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten

import lazytensor as lt
from lazytensor.compat import computation as graphs
from lazytensor.compat.tensor_factory_functions import tensor_factory_functions
from lazytensor.inspect import metrics
from lazytensor.trace import storage


@dataclasses.dataclass
class GraphInputMatcher:
    """Which argument of the model each graph input is; what is none keeps the value it had when the graph was made."""

    tensor_id_to_arg_idx: dict[int, int]
    graph_input_tensor_ids: list[int]
    graph_input_ivalues: list[Any]

    def __call__(self, args: Sequence[torch.Tensor]) -> list[Any]:
        """The graph's inputs for these arguments."""
        found = []
        for number, kept in zip(self.graph_input_tensor_ids, self.graph_input_ivalues, strict=True):
            place = self.tensor_id_to_arg_idx.get(number)
            found.append(kept if place is None else args[place])
        return found


class ReturnValueHandler:
    """Results that are one and the same tensor are computed once and handed out as often as the model returns them."""

    def __init__(self, lazy_out_list: Sequence[torch.Tensor]) -> None:
        self.index: list[list[int]] = []
        places: dict[int, int] = {}
        for position, tensor in enumerate(lazy_out_list):
            if id(tensor) in places:
                self.index[places[id(tensor)]].append(position)
            else:
                places[id(tensor)] = len(self.index)
                self.index.append([position])
        self.total_count = len(lazy_out_list)

    def unique(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The first of each group."""
        return [tensors[group[0]] for group in self.index]

    def duplicate_eager_tensors(self, eager_tensor_list: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The results as the model returns them."""
        found: list[Any] = [None] * self.total_count
        for tensor, group in zip(eager_tensor_list, self.index, strict=True):
            for position in group:
                found[position] = tensor
        return found


def force_lazy_device(model: fx.GraphModule) -> None:
    """Let everything that the model makes or moves be on ``ltc``."""

    def moved(argument: Any) -> Any:
        return torch.device("ltc", 0) if isinstance(argument, torch.device) else argument

    for node in model.graph.nodes:
        node.args = tuple(map(moved, node.args))
        node.kwargs = {name: moved(argument) for name, argument in node.kwargs.items()}
        if node.op == "call_function" and node.target in tensor_factory_functions and "device" not in node.kwargs:
            node.kwargs = {**node.kwargs, "device": torch.device("ltc", 0)}
    model.recompile()


def get_fallback_ops() -> list[str]:
    """The ops that fell back since the counters were reset, with how often."""
    return [f"{name}={count}" for name, count in metrics.fallbacks().items()]


def extract_compiled_graph(
    model: fx.GraphModule, example_inputs: Sequence[torch.Tensor]
) -> Callable[..., list[torch.Tensor]]:
    """Trace the model once; a function of CPU tensors that runs the compiled graph and updates arguments the model
    updates in place.

    Raises RuntimeError if an op of the model falls back, since the graph would not be the whole model.
    """
    lt.sync()
    lazy_args = [argument.detach().to("ltc").requires_grad_(argument.requires_grad) for argument in example_inputs]
    lazy_model = copy.deepcopy(model)
    force_lazy_device(lazy_model)
    lazy_model = lazy_model.to("ltc")
    metrics.reset()
    with torch.no_grad():
        out = lazy_model(*lazy_args)
    outputs, _ = tree_flatten(out)
    fallbacks = get_fallback_ops()
    if fallbacks:
        raise RuntimeError(f"Fail to extract the compiled graph because of fallback: {','.join(fallbacks)}")
    handler = ReturnValueHandler(outputs)
    from lazytensor.compat import get_tensor_id

    updated = [place for place, argument in enumerate(lazy_args) if not storage.value_of(argument).leaf]
    roots = [*(lazy_args[place] for place in updated), *handler.unique(outputs)]
    places = {get_tensor_id(argument): place for place, argument in enumerate(lazy_args)}
    key = graphs.get_graph_hash(roots)
    ids, values = graphs.get_tensors_ts_device_data_node(roots)
    matcher = GraphInputMatcher(places, ids, [value.clone() for value in values])
    lt.sync(wait=True)
    count = len(lazy_args)

    def optimized_mod(*args: torch.Tensor) -> list[torch.Tensor]:
        if len(args) != count:
            raise TypeError(f"the model takes {count} arguments, and {len(args)} were given")
        results = graphs.run_cached_graph(key, matcher(args))
        with torch.no_grad():
            for place, result in zip(updated, results, strict=False):
                args[place].copy_(result)
        return handler.duplicate_eager_tensors(results[len(updated) :])

    return optimized_mod
