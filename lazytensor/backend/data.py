"""What passes between lazytensor and a backend: devices, device data, computations.

A backend without memory of its own (``own_memory = False``: all built-in ones on the CPU) takes and returns plain CPU
tensors.  One that has its own takes and returns :class:`BackendData`; lazytensor asks it to convert when a value is
uploaded or read.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from lazytensor.trace.ir import Number, Spec, Value

if TYPE_CHECKING:
    from lazytensor.backend.graph import Graph
    from lazytensor.backend.interface import Backend


@dataclass(frozen=True, order=True)
class BackendDevice:
    """The hardware behind an ltc device: a type and an ordinal (``torch::lazy::BackendDevice``)."""

    type: str
    ordinal: int = 0

    def __str__(self) -> str:
        return f"{self.type.upper()}{self.ordinal}"


@dataclass(frozen=True)
class MemoryInfo:
    """How many bytes a device has, and how many of them are free (the ``MemoryInfo`` of ``GetMemoryInfo``)."""

    total: int
    free: int

    @property
    def used(self) -> int:
        """The bytes that are not free."""
        return self.total - self.free


class BackendData:
    """One tensor in a backend's own memory (``torch::lazy::BackendData``).

    lazytensor owns the object and drops it when no tensor needs it; the backend owns what ``value`` refers to, and may
    free it when the object dies (``weakref.finalize``).  ``value`` is None in a placeholder that is still to be filled.
    """

    __slots__ = ("__weakref__", "backend", "device", "info", "spec", "value")

    def __init__(self, backend: Backend, spec: Spec, device: BackendDevice, value: Any = None) -> None:
        self.backend = backend
        self.spec = spec
        self.device = device
        self.value = value
        self.info: Any = None  # whatever the backend wants to tie to it (SetInfo)
        if backend.own_memory:
            held.add(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of the tensor (``shape()``)."""
        return self.spec.size

    @property
    def dtype(self) -> torch.dtype:
        """The element type (the other half of ``shape()``)."""
        return self.spec.dtype

    @property
    def handle(self) -> int:
        """A number that tells this piece of memory from any other alive (``GetHandle``)."""
        return id(self.value) if self.value is not None else id(self)

    @property
    def has_value(self) -> bool:
        """Whether it is filled (``HasValue``)."""
        return self.value is not None

    def assign(self, other: BackendData) -> None:
        """Take over what another one holds (``Assign``); both then refer to the same memory."""
        if (other.spec.size, other.spec.dtype) != (self.spec.size, self.spec.dtype):
            raise ValueError(f"data of {other.spec} cannot be assigned to data of {self.spec}")
        self.value = other.value

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.spec} on {self.device}{'' if self.has_value else ', empty'}>"


held: weakref.WeakSet[BackendData] = weakref.WeakSet()  # all data in memory that belongs to a backend


class Computation:
    """A graph and, once compiled, how to run it (``torch::lazy::Computation``).

    ``callable`` is what the backend's ``compile`` returned; ``run`` is the same with the backend's promises checked,
    and is what a cut calls.  Made on the thread that cuts; kept in the computation cache, which owns it.
    """

    __slots__ = (
        "backend",
        "callable",
        "compile_seconds",
        "data",
        "decomposed",
        "device",
        "graph",
        "in_mark_step",
        "interpreted",
        "name",
        "numbers",
        "run",
        "runs",
    )

    def __init__(self, backend: Backend, graph: Graph, device: BackendDevice, name: str = "step") -> None:
        self.backend = backend
        self.graph = graph
        self.device = device
        self.name = name
        self.callable: Callable[..., list[Any]] | None = None
        self.run: Callable[..., list[Any]] = self._not_compiled
        # Which leaves of the trace are its inputs.  (A part of a greater graph takes other values: they have no
        # number.)
        self.data: list[int] = [v.node.args[1] for v in graph.data if v.leaf]
        self.numbers: list[int] = [n.index for n in graph.numbers]
        self.runs = 0
        self.compile_seconds = 0.0
        self.in_mark_step = False  # whether a cut asked for it, and not a tool
        self.decomposed: dict[str, int] = {}  # op -> how many nodes were replaced by simpler ops
        self.interpreted: dict[str, int] = {}  # op -> how many nodes the reference interpreter runs

    def _not_compiled(self, *inputs: Any) -> list[Any]:
        raise RuntimeError(f"{self!r} has not been compiled")

    @property
    def parameter_names(self) -> list[str]:
        """What the inputs are called (``parameter_names``)."""
        return [leaf.name for leaf in self.graph.inputs]

    @property
    def parameter_shapes(self) -> list[Spec | type]:
        """The geometry of each input; for a lifted number its type (``parameter_shapes``)."""
        return [leaf.kind if isinstance(leaf, Number) else leaf.spec for leaf in self.graph.inputs]

    @property
    def result_shapes(self) -> list[Spec]:
        """The geometry of each result (``result_shape``)."""
        return [value.spec for value in self.graph.outputs]

    @property
    def text(self) -> str:
        """The compiled form as text (``to_string``)."""
        return self.backend.text(self)

    def __repr__(self) -> str:
        return f"<Computation {self.name!r} on {self.device} by {self.backend.name}: {self.graph!r}>"


Leaf = Value | Number

__all__ = ["BackendData", "BackendDevice", "Computation", "Leaf", "MemoryInfo", "held"]
