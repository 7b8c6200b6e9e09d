"""Counters and timed metrics, under the names that ``torch._lazy`` gives them where it has them."""

from __future__ import annotations

from collections import Counter

_counters: Counter[str] = Counter()


def count(name: str, by: int = 1) -> None:
    """Add to a counter."""
    _counters[name] += by


def counter_names() -> list[str]:
    """The counters that are not zero."""
    return sorted(name for name, value in _counters.items() if value)


def counter_value(name: str) -> int | None:
    """The value of a counter; None if it was never counted."""
    return _counters.get(name) or None


def reset() -> None:
    """Set every counter to zero."""
    _counters.clear()
