"""A program that never reads anything is cut by itself before it has recorded too much.

Asked on a miss only: a structure that is recorded again was within the budget when it was new.  Three things are
bounded: how deep the pending graph is, how many operations were new since the last cut, and how many bytes the pending
results need.
"""

from __future__ import annotations

import logging
from typing import Any

from lazytensor import settings
from lazytensor.execute import cut as cutting
from lazytensor.inspect import events
from lazytensor.trace import ir, source

log = logging.getLogger("lazytensor")


class _Since:
    """What was new since the last cut.  The bytes are an upper bound: what has died is still counted."""

    cuts = (-1, -1)
    nodes = 0
    bytes = 0


_most_pending = settings._ALL["max_pending"]
_most_bytes = settings._ALL["max_pending_bytes"]
_said = False


def check(entry: Any) -> None:
    """Cut if what is pending, with this new table entry, is over the budget."""
    _enforce(entry, sum(part.spec.nbytes for part in ir.values_in(_parts(entry))))


_SELDOM = 128  # operations after which the compiled recorder asks in any case: a bound may have been changed


def room(entry: Any, made: int) -> tuple[int, int]:
    """Check this entry, with which so many bytes are new; how many operations and bytes may be new until the next."""
    pending = _enforce(entry, made)
    if pending is None:
        return 0, 0
    return min(_SELDOM, _most_pending.value - pending), _most_bytes.value - _Since.bytes


def _enforce(entry: Any, made: int) -> int | None:
    """Cut if what is pending is over the budget; else how many operations are."""
    cuts = (cutting.cuts_made(), cutting.cleared)
    if cuts != _Since.cuts:
        _Since.cuts, _Since.nodes, _Since.bytes = cuts, ir.nodes_made(), 0
    _Since.bytes += made
    depth = max((part.node.depth for part in ir.values_in(_parts(entry))), default=0)
    pending = max(depth, ir.nodes_made() - _Since.nodes)
    if pending > _most_pending.value:
        _cut(f"{pending:,} operations are pending (max_pending is {settings.max_pending:,})")
        return None
    if _Since.bytes > _most_bytes.value:
        _Since.bytes = sum(s.value.spec.nbytes for s in cutting.pending() if s.value is not None)
        if _Since.bytes > settings.max_pending_bytes:
            _cut(f"pending results need {_Since.bytes:,} bytes (max_pending_bytes is {settings.max_pending_bytes:,})")
            return None
    return pending


def _parts(entry: Any) -> tuple[Any, ...]:
    """A table entry, of which parts may be lists, as nested tuples."""
    if isinstance(entry, list | tuple):
        return tuple([_parts(part) for part in entry])
    return (entry,)


def _cut(why: str) -> None:
    global _said
    if not _said:
        _said = True
        frame = source.user_frame()
        where = f"{frame.f_code.co_filename}:{frame.f_lineno}" if frame is not None else "<unknown>"
        log.warning(
            "lazytensor: %s at %s, so they run now.  Call lazytensor.sync() where a step ends.  (This is said once.)",
            why,
            where,
        )
    guard, events.guard = events.guard, None  # nobody reads a value here
    try:
        cutting.cut("budget")
    finally:
        events.guard = guard
