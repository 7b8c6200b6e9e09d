"""Where data of a backend with memory of its own meets the rest: at the inputs of a cut, at a read, and at a switch.

``State.data`` is a CPU tensor, or a :class:`BackendData` once a backend with its own memory made or used it.  The
conversion is done once per tensor: whoever converts puts the new form back into the state.  A process that never had
such a backend pays one test of ``in_use`` per cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lazytensor import errors
from lazytensor.backend.data import BackendData, held
from lazytensor.backend.interface import Backend
from lazytensor.trace import storage
from lazytensor.trace.future import Future
from lazytensor.trace.ir import spec_of

in_use = False  # whether a backend with memory of its own was ever in force


def host(data: Any) -> torch.Tensor:
    """Device data as a CPU tensor.  The caller must not write into it."""
    if isinstance(data, BackendData):
        if data.value is None:
            raise errors.LazyTensorError(f"{data!r} has no value yet")
        if isinstance(data.value, Home):
            return data.value.tensor
        return data.backend.to_host(data)
    return data  # type: ignore[no-any-return]


def fit(backend: Backend, leaves: Sequence[int]) -> list[Any]:
    """The data behind these leaves in the form that the backend takes; states keep the new form."""
    found = []
    for number in leaves:
        data = storage.leaf_data[number]
        if data.__class__ is Future:
            if backend.asynchronous and not backend.own_memory and not data.run.own_memory:
                found.append(data)  # a CPU tensor in the making, which the pipeline will have by then
                continue
            owner = storage.leaf_states[number]()
            data = data.settle(storage.State() if owner is None else owner)
        fitted = _fitted(backend, data)
        if fitted is not storage.leaf_data[number]:
            state = storage.leaf_states[number]()
            if state is not None and state.data is data:
                state.data = fitted
            storage.leaf_data[number] = fitted
        found.append(fitted)
    return found


def _fitted(backend: Backend, data: Any) -> Any:
    if not backend.own_memory:
        return host(data)
    if isinstance(data, BackendData) and data.backend is backend and not isinstance(data.value, Home):
        return data
    tensor = host(data)
    if isinstance(data, BackendData):
        return backend.to_device(tensor, data.spec, data.device)
    device = backend.device(torch.device("ltc", 0))
    return backend.to_device(tensor, spec_of(tensor, 0), device)


class Home:
    """Stands in device data whose backend was closed: the value, brought to the host."""

    __slots__ = ("tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


def bring_home(backend: Backend) -> None:
    """Bring everything that lives in this backend's memory to the host, before it is closed."""
    for data in list(held):
        if data.backend is backend and data.has_value and not isinstance(data.value, Home):
            data.value = Home(backend.to_host(data))
