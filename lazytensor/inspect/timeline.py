"""Cuts as a timeline: record, compile, execute and wait, for Perfetto and ``chrome://tracing``."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from lazytensor.inspect import events


def spans() -> list[dict[str, Any]]:
    """What the program did, in order: each span with its kind, start and length in seconds."""
    found: list[dict[str, Any]] = []
    before: float | None = None
    for cut in events.all_cuts():
        if before is not None and cut.started > before:
            found.append({"kind": "record", "start": before, "seconds": cut.started - before, "step": cut.step})
        timing, at = cut.timing, cut.started
        order = ("collect", "compile", "execute", "install")
        if cut.background:  # the results were promised before they were there
            order = ("collect", "compile", "install", "execute")
        common = {
            "step": cut.step,
            "graph": cut.known.name,
            "reason": cut.reason,
            "place": str(cut.place),
            "hit": cut.hit,
        }
        for kind in order:
            seconds = getattr(timing, kind)
            if seconds:
                found.append({"kind": kind, "start": at, "seconds": seconds, **common})
            at += seconds
        before = cut.started + cut.seconds
    for event in events.fallbacks:
        found.append(
            {
                "kind": "fallback",
                "start": event.started,
                "seconds": event.seconds,
                "step": event.step,
                "reason": event.name,
                "place": str(event.place),
            }
        )
    return sorted(found, key=lambda s: s["start"])


def chrome_trace(path: str | os.PathLike[str]) -> None:
    """Write the timeline as a trace file that Perfetto and ``chrome://tracing`` open."""
    rows = {"record": 1, "collect": 2, "compile": 2, "execute": 2, "install": 2, "fallback": 3}
    names = {1: "record", 2: "cut", 3: "fallback"}
    process = os.getpid()
    trace: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": process, "args": {"name": "lazytensor"}}]
    for row, name in names.items():
        trace.append({"ph": "M", "name": "thread_name", "pid": process, "tid": row, "args": {"name": name}})
    for span in spans():
        trace.append(
            {
                "ph": "X",
                "name": span["kind"] if span["kind"] != "fallback" else span["reason"],
                "cat": "lazytensor",
                "pid": process,
                "tid": rows[span["kind"]],
                "ts": (span["start"] + events.epoch) * 1e6,
                "dur": span["seconds"] * 1e6,
                "args": {k: v for k, v in span.items() if k not in ("kind", "start", "seconds")},
            }
        )
    Path(path).write_text(json.dumps({"traceEvents": trace, "displayTimeUnit": "ms"}))
