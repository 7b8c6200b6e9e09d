"""Counters (``torch._lazy.metrics``)."""

from __future__ import annotations

from lazytensor.inspect.metrics import counter_names, counter_value, reset
from lazytensor.inspect.metrics import report as metrics_report

__all__ = ["counter_names", "counter_value", "metrics_report", "reset"]
