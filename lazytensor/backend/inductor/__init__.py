"""The ``inductor`` and ``auto`` backends: whole steps compiled by TorchInductor, in another process, without waiting
for it.

On an accelerator the first tier is the reference interpreter, whose ops are then eager's kernels there.  What is for
the CPU only is left out: running ahead, runs in the background and without Python, places in memory, shares of cores.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.backend import plan  # noqa: F401  (needed for the first graph, which should not wait for it)
from lazytensor.backend.data import Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.hardware import HardwareBackend, traits
from lazytensor.backend.inductor.build import no_compiler
from lazytensor.backend.inductor.tiers import READY, SENT, STAYS, FirstTier, Tiered, lowering_digest
from lazytensor.backend.reference import Program

log = logging.getLogger("lazytensor")


class AutoBackend(HardwareBackend):
    """Starts every graph on the first tier and moves it to compiled code when that is ready."""

    name = "auto"
    version = torch.__version__
    asynchronous = True
    _after = 1

    def __init__(self, wait: bool = False, first: str = "ts", device: str | None = None) -> None:
        """``wait``: compile at the first cut and wait for it.  ``first``: the backend of the first tier, on the CPU.
        ``device``: cpu or cuda, by default as the setting ``hardware`` says.
        """
        super().__init__(device)
        self.wait = wait
        self.first_name = first
        self.graphs: list[Tiered] = []

    def prepare(self) -> None:
        """Make the first tier; say so where there is no compiler."""
        from lazytensor.backend import registry

        if not self.own_memory:
            self.first = registry.instance(self.first_name)
            if self.first.own_memory:  # it takes no CPU tensors
                self.first = registry.instance("reference")
            self.first.prepare()
        elif self.target is not None:
            traits(self.target)  # while the device answers for itself: ltc may come to stand in for it
        self.missing = no_compiler(self.target)
        lowering_digest()  # rather now than when compiled code is looked for on disk
        if self.missing:
            tier = "reference" if self.own_memory else self.first_name
            log.warning("lazytensor: %s: graphs stay on the %r backend", self.missing, tier)

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """A callable that starts on the first tier."""
        if not self.missing:
            tiered = Tiered(graph, self._on_first, self.wait, self._after, self.target)
            self.graphs.append(tiered)
            return self.on_data(tiered, graph) if self.own_memory else tiered
        return self.on_data(self._on_first(graph), graph) if self.own_memory else self.first.compile(graph)

    def _on_first(self, graph: Graph) -> Callable[..., list[Any]]:
        """The graph on the first tier."""
        target = self.target
        return FirstTier(graph, self.first.compile) if target is None else Program(graph, target)

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
