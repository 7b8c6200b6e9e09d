"""What a backend must do beyond single ops: behaviours checked against CPU eager, and which ops it takes by itself.

:func:`behaviours` runs the programs of :mod:`suite_programs` and the promises of the interface that no program can see.
:func:`coverage` runs one sample of each OpInfo entry and tells, op by op, whether the backend took it, or it was
decomposed, or the interpreter ran it.  Both return plain data; :func:`run` puts them together and can write a
machine-readable file.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

import lazytensor as lt
from lazytensor.backend import registry
from lazytensor.backend.data import BackendData
from lazytensor.backend.interface import Backend
from lazytensor.backend.reference import Program
from lazytensor.conformance.compare import Rule, difference
from lazytensor.conformance.suite_programs import PROGRAMS
from lazytensor.execute import cut
from lazytensor.trace import storage

RUNS = 3


@dataclass(frozen=True)
class Finding:
    """One behaviour: kept, or how it was broken."""

    group: str
    name: str
    kept: bool
    detail: str = ""


@contextlib.contextmanager
def _alone(backend: str) -> Iterator[Backend]:
    """The backend in force, its failures raised and not covered up by another backend."""
    lt.sync()
    with lt.settings.scope(on_backend_failure="raise"), registry.scope(backend) as chosen:
        try:
            yield chosen
        finally:
            _settle()


def _settle() -> None:
    """Leave nothing pending, whatever state a broken backend left things in."""
    gc.collect()
    with registry.scope("reference"), contextlib.suppress(Exception):
        lt.sync()


def behaviours(backend: str, groups: Iterable[str] | None = None) -> list[Finding]:
    """Check every behaviour."""
    found = []
    rule = Rule(exact=backend == "reference")
    with _alone(backend) as chosen:
        for group, programs in PROGRAMS.items():
            if groups is not None and group not in groups:
                continue
            for name, program in programs.items():
                expected = program("cpu")
                found.append(Finding(group, name, *_judged(program, expected, rule)))
        if groups is None or "interface" in groups:
            found += [Finding("interface", name, *check(chosen)) for name, check in _INTERFACE.items()]
    return found


def _judged(program: Any, expected: Any, rule: Rule) -> tuple[bool, str]:
    for number in range(RUNS):
        try:
            result = program("ltc")
            told = difference(expected, result, rule)
        except Exception as error:
            _settle()
            return False, f"run {number + 1} raised {type(error).__name__}: {error}"
        if told is not None:
            return False, f"run {number + 1}: {told}"
        del result
    return True, ""


# --- promises that no program can see ----------------------------------------


def _step(device: str = "ltc") -> tuple[lt.Graph, list[Any]]:
    """A graph with an update, and its inputs."""
    x, w = torch.arange(1.0, 5.0).to(device), torch.full((4,), 0.5).to(device)
    lt.sync()
    new, other = w * 2 - x, (x + w).sum()
    graph = lt.Graph([storage.value_of(new), storage.value_of(other)])
    weight = storage.value_of(w)
    graph.replaces = {0: graph.data.index(weight)}
    return graph, [lt.to_cpu(t) if hasattr(lt, "to_cpu") else t.cpu() for t in (x, w)]


def _given(backend: Backend, graph: lt.Graph, tensors: list[torch.Tensor]) -> list[Any]:
    order = sorted(range(len(graph.data)), key=lambda i: graph.data[i].node.args[1])
    host = [tensors[i].clone() for i in order]
    device = backend.devices()[0]
    given: list[Any] = list(host)
    if backend.own_memory:
        given = [backend.to_device(t, v.spec, device) for t, v in zip(host, graph.data, strict=True)]
    return given + [n.kind(storage.numbers[n.index]) for n in graph.numbers]


def _host(backend: Backend, results: Iterable[Any]) -> list[torch.Tensor]:
    return [backend.to_host(r) if isinstance(r, BackendData) else r for r in results]


def _donated_inputs(backend: Backend) -> tuple[bool, str]:
    """Whether results are right when an input may be overwritten, and the other inputs are left alone."""
    graph, tensors = _step()
    want = Program(graph)(*_host(backend, _given(backend, graph, tensors)))
    computation = backend.computation(graph)
    for number in range(RUNS):
        given = _given(backend, graph, tensors)
        kept = [g.clone() if isinstance(g, torch.Tensor) else g for g in _host(backend, given)]
        try:
            results = _host(backend, computation.run(*given))
        except Exception as error:
            return False, f"run {number + 1} raised {type(error).__name__}: {error}"
        for place, (before, after) in enumerate(zip(kept, _host(backend, given), strict=True)):
            if place not in graph.donatable and isinstance(before, torch.Tensor) and not torch.equal(before, after):
                return False, f"run {number + 1}: input {place}, which was not donated, was overwritten"
        told = difference(want, results, Rule(exact=False))
        if told is not None:
            return False, f"run {number + 1}: {told}"
    return True, ""


def _round_trip(backend: Backend) -> tuple[bool, str]:
    """Whether data survives the way to the device and back."""
    from lazytensor.trace.ir import spec_of

    device = backend.devices()[0]
    for tensor in (torch.arange(6.0).view(2, 3).t(), torch.tensor(True), torch.empty(0, 2), torch.tensor([1, 2])):
        data = backend.to_device(tensor, spec_of(tensor, 0), device)
        back = backend.to_host(data)
        if not torch.equal(back, tensor) or back.dtype is not tensor.dtype:
            return False, f"{tensor.dtype}{list(tensor.shape)} came back as {back.dtype}{list(back.shape)}"
        if not data.has_value or data.shape != tuple(tensor.shape):
            return False, "its data does not know its shape"
    return True, ""


def _descriptions(backend: Backend) -> tuple[bool, str]:
    """Whether it can say what it is and what it compiled."""
    graph, _ = _step()
    computation = backend.computation(graph)
    if not isinstance(computation.text, str) or not computation.text:
        return False, "a computation has no text"
    if not isinstance(backend.metric_report(), str) or not backend.devices():
        return False, "it has no metrics or no devices"
    if backend.memory_info().total <= 0:
        return False, "it does not know its memory"
    return True, ""


_INTERFACE = {
    "only donated inputs are overwritten": _donated_inputs,
    "data goes to the device and back": _round_trip,
    "it describes itself and what it compiled": _descriptions,
}

# --- coverage ----------------------------------------

NATIVE, DECOMPOSED, INTERPRETED, FALLBACK = "native", "decomposed", "interpreted", "fallback"


def coverage(backend: str, entries: Iterable[str] | None = None) -> dict[str, dict[str, int]]:
    """How each ATen op that OpInfo's samples need was run: op -> {native, decomposed, interpreted, fallback: how
    often}.
    """
    from lazytensor.conformance import opinfo

    known = opinfo.entries()
    found: dict[str, Counter[str]] = {}
    levels = {name: logging.getLogger(name).level for name in ("lazytensor", "lazytensor.recompile")}
    for name in levels:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        with _alone(backend) as chosen:
            target = opinfo.ltc(backend)
            for name in entries if entries is not None else known:
                before = set(cut.computations)
                if not opinfo.supports(known[name], torch.float32):
                    continue
                for outcome in opinfo.check_entry(known[name], torch.float32, target, limit=1, forms=("forward",)):
                    for fallback in outcome.fallbacks:
                        found.setdefault(fallback, Counter())[FALLBACK] += 1
                for key in [k for k in cut.computations if k not in before and k[0] is chosen]:
                    _count(found, cut.computations[key].compiled)
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
    return {name: dict(count) for name, count in sorted(found.items())}


def _count(found: dict[str, Counter[str]], computation: Any) -> None:
    nodes = Counter(node.op.name for node in computation.graph.nodes)
    for name, number in nodes.items():
        count = found.setdefault(name, Counter())
        count[DECOMPOSED] += computation.decomposed.get(name, 0)
        count[INTERPRETED] += min(number, computation.interpreted.get(name, 0))
        count[NATIVE] += max(0, number - computation.decomposed.get(name, 0) - computation.interpreted.get(name, 0))
    for name in nodes:
        found[name] = +found[name]


def broken(backend: str, into: dict[str, Any]) -> list[dict[str, Any]]:
    """Check the behaviours, put them into a table of results, and give those that are broken."""
    into["behaviours"] = [asdict(finding) for finding in behaviours(backend)]
    return [finding for finding in into["behaviours"] if not finding["kept"]]


def run(backend: str, entries: Iterable[str] | None = ()) -> dict[str, Any]:
    """Everything; ``entries`` are the OpInfo entries for the coverage (None: all)."""
    return {
        "backend": backend,
        "behaviours": [asdict(finding) for finding in behaviours(backend)],
        "coverage": coverage(backend, entries),
    }
