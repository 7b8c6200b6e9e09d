"""How long the parts of the last cut took."""

from __future__ import annotations

from lazytensor.execute import cut
from lazytensor.execute.cut import CutTiming


def last_cut() -> CutTiming:
    """The last cut's times: ``collect_us`` is everything but compilation and execution."""
    return cut.last
