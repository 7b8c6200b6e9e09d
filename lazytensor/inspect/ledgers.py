"""The ledgers: every cut with its cause and price, every fallback, and the history of steps and graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lazytensor import errors
from lazytensor.inspect import events, places
from lazytensor.inspect.events import Cut
from lazytensor.inspect.render import Report, Table, duration, size
from lazytensor.trace import source
from lazytensor.trace.ir import Op

SHOWN = 40


def splits(cuts: list[Cut]) -> list[bool]:
    """For each cut, whether it split a step: it was not asked for, and the same step was cut again after it."""
    last: dict[int, int] = {}
    for index, cut in enumerate(cuts):
        last[cut.step] = index
    return [not cut.explicit and last[cut.step] != index for index, cut in enumerate(cuts)]


def cut_data(cut: Cut, split: bool) -> dict[str, Any]:
    """One cut as plain data."""
    timing = cut.timing
    return {
        "step": cut.step,
        "cause": cut.cause,
        "reason": cut.reason,
        **places.data(cut.place),
        "graph": cut.known.name,
        "hit": cut.hit,
        "ops": cut.known.nodes,
        "outputs": timing.outputs,
        "bytes": cut.known.bytes_out,
        "started": cut.started,
        "collect": timing.collect,
        "compile": timing.compile,
        "execute": timing.execute,
        "install": timing.install,
        "seconds": cut.seconds,
        "split": split,
        "background": cut.background,
        "failed": cut.error,
        "backend": cut.known.backend,
    }


def syncs() -> Report:
    """Every cut by cause and line: how often, the bytes it made, how long the program waited, which steps it split."""
    cuts = events.all_cuts()
    data = [cut_data(c, s) for c, s in zip(cuts, splits(cuts), strict=True)]
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in data:
        groups.setdefault((row["reason"], row["file"], row["line"]), []).append(row)
    lines = [
        {
            "reason": reason,
            "cause": rows[0]["cause"],
            "file": file,
            "line": line,
            "text": rows[0]["text"],
            "count": len(rows),
            "splits": sum(r["split"] for r in rows),
            "misses": sum(not r["hit"] for r in rows),
            "bytes": sum(r["bytes"] for r in rows),
            "seconds": sum(r["seconds"] for r in rows),
        }
        for (reason, file, line), rows in groups.items()
    ]
    lines += _waits()
    lines.sort(key=lambda r: r["seconds"], reverse=True)
    rows = [
        [
            r["reason"],
            f"{places.short(r['file'])}:{r['line']}",
            r["count"],
            r["splits"],
            r["misses"],
            size(r["bytes"]),
            duration(r["seconds"]),
            r["text"][:60],
        ]
        for r in lines[:SHOWN]
    ]
    columns = ["cause", "line", ">cuts", ">split", ">compiled", ">bytes", ">waited", "code"]
    waited = sum(r["seconds"] for r in lines)
    notes = [
        f"{len(cuts)} cuts, {sum(r['splits'] for r in lines)} of them split a step; waited {duration(waited)} in all"
    ]
    table = Table("By cause and line", columns, rows, max(len(lines) - SHOWN, 0))
    return Report("lazytensor: sync ledger", notes, [table], {"lines": lines, "cuts": data})


def _waits() -> list[dict[str, Any]]:
    """Reads that waited for a cut in the background, by line: they cut nothing."""
    groups: dict[Any, list[events.Wait]] = {}
    for wait in events.waits:
        groups.setdefault((wait.cause, wait.code, wait.instruction), []).append(wait)
    return [
        {
            "reason": f"waits for {places.reason(*key)}",
            "cause": key[0],
            "file": (place := places.place(key[1], key[2])).file,
            "line": place.line,
            "text": place.text,
            "count": 0,
            "waits": len(rows),
            "splits": 0,
            "misses": 0,
            "bytes": 0,
            "seconds": sum(w.seconds for w in rows),
        }
        for key, rows in groups.items()
    ]


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise :class:`errors.SyncForbidden` at any line that would cut: a read of a value, or an op that falls back.

    ``lt.sync()`` is allowed, since it is asked for and waits for nobody's value; so is a cut by the budget.
    """
    before = events.guard

    def forbid(cause: str) -> None:
        if cause in events.EXPLICIT or cause == events.BUDGET:
            return
        frame = source.user_frame()
        code, instruction = places.where(frame)
        place = places.place(code, instruction)
        raise errors.SyncForbidden(
            f"{places.reason(cause, code, instruction)} at {place} would run everything pending, inside "
            "`with lt.no_sync():`\n"
            f"    {place.text}\n"
            "Read the value after the scope, or log it without a cut by lt.observe(name, tensor)."
        )

    events.guard = forbid
    try:
        yield
    finally:
        events.guard = before


# --- fallbacks ------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def decomposition(name: str) -> str | None:
    """Where PyTorch has a decomposition of this op, which a backend or shape rule could use instead."""
    from torch._decomp import decomposition_table

    try:
        overload = Op(name).overload
    except AttributeError:
        return None
    packet = overload._overloadpacket
    for each in (overload, *(getattr(packet, o) for o in packet.overloads())):
        function = decomposition_table.get(each)
        if function is not None:
            inner = getattr(function, "__wrapped__", function)
            return f"{inner.__module__}.{inner.__name__}"
    return None


def fallbacks() -> Report:
    """Every op that ran eagerly on the CPU, by line: why, the bytes moved, the time, and the nearest decomposition."""
    groups: dict[Any, list[events.Fallback]] = {}
    for event in events.fallbacks:
        groups.setdefault((event.name, event.place), []).append(event)
    data = [
        {
            "op": name,
            **places.data(place),
            "reason": rows[0].reason,
            "count": len(rows),
            "bytes": sum(r.bytes_in + r.bytes_out for r in rows),
            "bytes_in": sum(r.bytes_in for r in rows),
            "bytes_out": sum(r.bytes_out for r in rows),
            "seconds": sum(r.seconds for r in rows),
            "decomposition": decomposition(name),
        }
        for (name, place), rows in groups.items()
    ]
    data.sort(key=lambda r: r["seconds"], reverse=True)
    rows = [
        [
            r["op"],
            f"{places.short(r['file'])}:{r['line']}",
            r["count"],
            size(r["bytes"]),
            duration(r["seconds"]),
            r["decomposition"] or "none known",
            r["reason"][:80],
        ]
        for r in data[:SHOWN]
    ]
    columns = ["op", "line", ">times", ">moved", ">time", "nearest decomposition", "why"]
    table = Table("By op and line", columns, rows, max(len(data) - SHOWN, 0))
    return Report("lazytensor: fallback ledger", [f"{len(events.fallbacks)} operations ran eagerly"], [table], data)


# --- history --------------------------------------------------------------------------------------------------------


def tier(known: events.Known) -> str:
    """Which tier the next run of a graph takes, where its backend has tiers; else the backend."""
    compiled = getattr(known.computation(), "compiled", None)
    return str(getattr(getattr(compiled, "callable", None), "tier", None) or known.backend)


def history() -> Report:
    """Steps, graphs, hits and misses: which steps compiled which graphs, and which ran what was known."""
    cuts = events.all_cuts()
    steps: dict[int, list[Cut]] = {}
    for cut in cuts:
        steps.setdefault(cut.step, []).append(cut)
    data: list[dict[str, Any]] = [
        {
            "step": number,
            "graphs": [c.known.name for c in row],
            "hits": sum(c.hit for c in row),
            "misses": sum(not c.hit for c in row),
            "seconds": sum(c.seconds for c in row),
        }
        for number, row in steps.items()
    ]
    spans: list[list[Any]] = []
    for row in data:
        kind = (tuple(row["graphs"]), row["misses"])
        if spans and spans[-1][0] == kind:
            spans[-1][2] = row["step"]
            spans[-1][3] += row["seconds"]
        else:
            spans.append([kind, row["step"], row["step"], row["seconds"]])
    rows = [
        [
            str(first) if first == last else f"{first}–{last}",
            " ".join(kind[0][:12]) + (" …" if len(kind[0]) > 12 else ""),
            len(kind[0]),
            f"{kind[1]} compiled" if kind[1] else "hit",
            duration(seconds / (last - first + 1)),
        ]
        for kind, first, last, seconds in spans[-SHOWN:]
    ]
    known = [
        {
            "graph": k.name,
            "ops": k.nodes,
            "inputs": k.inputs,
            "outputs": k.outputs,
            "runs": k.runs,
            "hits": k.hits,
            "compile_seconds": k.compile_seconds,
            "backend": k.backend,
            "tier": tier(k),
            "cached": k.computation() is not None,
            **places.data(places.place(*k.where)),
        }
        for k in events.graphs.values()
    ]
    graph_rows = [
        [
            k["graph"],
            k["ops"],
            k["outputs"],
            k["runs"],
            k["hits"],
            duration(float(k["compile_seconds"])),
            k["tier"],
            f"{places.short(k['file'])}:{k['line']}",
        ]
        for k in known[-SHOWN:]
    ]
    hits = sum(c.hit for c in cuts)
    notes = [f"{len(steps)} steps, {len(cuts)} cuts: {hits} hit the cache, {len(cuts) - hits} compiled"]
    tables = [
        Table("Steps", ["steps", "graphs", ">cuts", "cache", ">time a step"], rows, max(len(spans) - SHOWN, 0)),
        Table(
            "Graphs",
            ["graph", ">ops", ">results", ">runs", ">hits", ">compile", "tier", "first cut at"],
            graph_rows,
            max(len(known) - SHOWN, 0),
        ),
    ]
    return Report("lazytensor: history", notes, tables, {"steps": data, "graphs": known})
