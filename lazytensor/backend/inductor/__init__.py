"""The ``inductor`` and ``auto`` backends: whole steps compiled by TorchInductor, in another process, without waiting
for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.backend import plan  # noqa: F401  (needed for the first graph, which should not wait for it)
from lazytensor.backend.data import Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.inductor.build import no_compiler
from lazytensor.backend.inductor.tiers import READY, SENT, STAYS, FirstTier, Tiered, lowering_digest
from lazytensor.backend.interface import Backend

log = logging.getLogger("lazytensor")


class AutoBackend(Backend):
    """Starts every graph on the first tier and moves it to compiled code when that is ready."""

    name = "auto"
    version = torch.__version__
    asynchronous = True
    _after = 1

    def __init__(self, wait: bool = False, first: str = "ts") -> None:
        """``wait``: compile at the first cut and wait for it.  ``first``: the backend of the first tier."""
        super().__init__()
        self.wait = wait
        self.first_name = first
        self.graphs: list[Tiered] = []

    def prepare(self) -> None:
        """Make the first tier; say so where there is no compiler."""
        from lazytensor.backend import registry

        self.first = registry.instance(self.first_name)
        self.first.prepare()
        self.missing = no_compiler()
        lowering_digest()  # rather now than when compiled code is looked for on disk
        if self.missing:
            log.warning("lazytensor: %s: graphs stay on the %r backend", self.missing, self.first_name)

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """A callable that starts on the first tier."""
        if self.missing:
            return self.first.compile(graph)
        tiered = Tiered(graph, self._on_first, self.wait, self._after)
        self.graphs.append(tiered)
        return tiered

    def _on_first(self, graph: Graph) -> Callable[..., list[Any]]:
        """The graph on the first tier."""
        return self.first.compile(graph) if self.first.own_memory else FirstTier(graph, self.first.compile)

    @property
    def runs_ahead(self) -> bool:  # type: ignore[override]
        """The first tier goes op by op as well; but whoever waits for the compiler wants what it made."""
        return not self.wait and self._after > 0

    def ran_ahead(self, computation: Computation) -> None:
        """That was its run on the first tier."""
        if isinstance(computation.callable, Tiered):
            computation.callable.runs += 1

    def metrics(self) -> dict[str, float]:
        """How many graphs are compiled, being compiled, and stay on the first tier."""
        states = [g.state for g in self.graphs]
        found = dict(super().metrics())
        found |= {"compiled": states.count(READY), "compiling": states.count(SENT), "stay": states.count(STAYS)}
        return found


class InductorBackend(AutoBackend):
    """The same, but every graph is sent to be compiled at its first cut."""

    name = "inductor"
    _after = 0
