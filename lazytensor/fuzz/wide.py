"""Long and wide: many tensors in one cut, many distinct graphs, many small cuts, and what they leave behind.

``python -m lazytensor.fuzz.wide`` runs the full form of each and prints a line; the tests run short ones.
"""

from __future__ import annotations

import gc
import sys
import time

import torch

import lazytensor as lt
from lazytensor.bench.endurance import resident_bytes
from lazytensor.execute import cut
from lazytensor.trace import ir


def wide_cut(tensors: int = 10_000) -> bool:
    """One cut with this many results; each must be right."""
    x = torch.arange(4.0, device="ltc")
    results = [x + float(i) for i in range(tensors)]
    lt.sync(wait=True)
    total = torch.stack(results).sum(1)
    expected = torch.arange(tensors, dtype=torch.float32) * 4 + 6
    return bool(torch.equal(total.cpu(), expected))


def distinct_graphs(count: int = 5_000) -> dict[str, int]:
    """This many different graphs one after the other: how many stay, and how much memory grew over the second half."""
    grown = 0
    for number in range(count):
        x = torch.ones(2, 3 + number % 40, device="ltc")
        for bit in range(14):
            x = x.sin() if number >> bit & 1 else x.cos()
        lt.sync(wait=True)
        if number == count // 2:
            gc.collect()
            grown = resident_bytes()
    gc.collect()
    return {"graphs": len(cut.computations), "nodes": ir.node_count(), "grown": resident_bytes() - grown}


def small_cuts(count: int = 1_000_000) -> int:
    """This many cuts of one small step; how many bytes the second half of them left behind."""
    x = torch.zeros(3, device="ltc")
    middle = 0
    for number in range(count):
        x.add_(1)
        lt.sync()
        if number == count // 2:
            gc.collect()
            middle = resident_bytes()
    lt.wait()
    gc.collect()
    assert x[0].item() == min(count, 1 << 24)
    return resident_bytes() - middle


def main() -> None:
    """The full forms."""
    for name, run in (("10,000 tensors", wide_cut), ("5,000 graphs", distinct_graphs), ("1,000,000 cuts", small_cuts)):
        before = time.perf_counter()
        sys.stdout.write(f"{name}: {run()} in {time.perf_counter() - before:.1f} s\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
