"""The ``inductor`` and ``auto`` backends: whole steps compiled by TorchInductor, in another process, without waiting
for it.

On an accelerator the first tier is the reference interpreter, whose ops are then eager's kernels there.  What is for
the CPU only is left out: running ahead, runs in the background and without Python, places in memory, shares of cores.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.backend import (
    diskcache,
    plan,  # noqa: F401  (needed for the first graph, which should not wait for it)
)
from lazytensor.backend.data import Computation
from lazytensor.backend.graph import Graph
from lazytensor.backend.hardware import HardwareBackend, traits
from lazytensor.backend.inductor.build import no_compiler
from lazytensor.backend.inductor.tiers import READY, SENT, STAYS, FirstTier, Tiered, lowering_digest
from lazytensor.backend.interface import Backend
from lazytensor.backend.reference import Program

log = logging.getLogger("lazytensor")


class AutoBackend(HardwareBackend):
    """Starts every graph on the first tier and moves it to compiled code when that is ready."""

    name = "auto"
    version = torch.__version__
    asynchronous = True
    _after = 1

    def __init__(self, wait: bool = False, first: str | None = None, device: str | None = None) -> None:
        """``wait``: compile at the first cut and wait for it.

        ``first``: the backend that a graph goes to after some runs on the first tier, instead of to the interpreter in
        C++; on the CPU.  By default none, but where that has not been built or cannot take a graph, ``ts``.

        ``device``: cpu or cuda, by default as the setting ``hardware`` says.
        """
        super().__init__(device)
        self.wait = wait
        self.first_name = first
        self.graphs: list[Tiered] = []

    def prepare(self) -> None:
        """Say so where there is no compiler."""
        if self.target is not None:
            traits(self.target)  # while the device answers for itself: ltc may come to stand in for it
        elif self.first_name is not None:
            self.first  # noqa: B018  (a backend that cannot be used is told now)
        self.missing = no_compiler(self.target)
        lowering_digest()  # rather now than when compiled code is looked for on disk
        diskcache.look()
        if self.missing:
            tier = "first tier" if self.target is None else "'reference' backend"
            log.warning("lazytensor: %s: graphs stay on the %s", self.missing, tier)

    @functools.cached_property
    def first(self) -> Backend:
        """The backend of the first tier, made when a graph needs it."""
        from lazytensor.backend import registry

        made = registry.instance(self.first_name or "ts")
        if made.own_memory:  # it takes no CPU tensors
            made = registry.instance("reference")
        made.prepare()
        return made

    def compile(self, graph: Graph) -> Callable[..., list[Any]]:
        """A callable that starts on the first tier."""
        run = self._on_first(graph) if self.missing else self._tiered(graph)
        return run if self.target is None else self.on_data(run, graph)

    def _tiered(self, graph: Graph) -> Tiered:
        self.graphs.append(Tiered(graph, self._on_first, self.wait, self._after, self.target))
        return self.graphs[-1]

    def _on_first(self, graph: Graph) -> Callable[..., list[Any]]:
        """The graph on the first tier."""
        if self.target is not None:
            return Program(graph, self.target)
        return FirstTier(graph, lambda graph: self.first.compile(graph), in_python=self.first_name is not None)

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
