"""What must hold for long: memory over 10,000 steps, chains of 200,000 operations, clean exits; and a quick import.

``python -m lazytensor.bench.endurance memory | chain | exits | imports [count]``.  The tests have quick forms.
"""

from __future__ import annotations

import gc
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn


def resident_bytes() -> int:
    """The resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def memory(steps: int = 10_000) -> dict[str, Any]:
    """Resident memory over training steps of an MLP with Adam: the figures after 500 steps, and at the end."""
    import lazytensor as lt

    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 8)).to("ltc")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    seen: list[int] = []
    for i in range(steps):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="ltc")).pow(2).mean().backward()
        optimizer.step()
        lt.sync()
        if i + 1 >= min(500, steps // 2) and (i + 1) % max(steps // 100, 1) == 0:
            seen.append(resident_bytes())
    return {
        "steps": steps,
        "after 500 steps": seen[0],
        "at the end": seen[-1],
        "largest": max(seen),
        "growth": round(max(seen) / seen[0] - 1, 4),
        "graphs compiled": lt.cache_info()["misses"],
    }


def chain(length: int = 200_000) -> dict[str, Any]:
    """Microseconds per op to record, run and free a chain that is new, at half the length and at the whole."""
    import lazytensor as lt

    found: dict[str, Any] = {}
    for count in (length // 4, length // 2, length):
        lt.clear_cache()
        gc.collect()
        with lt.settings.scope(max_pending=10 * length):
            x = torch.zeros(1, device="ltc")
            started = time.perf_counter()
            for _ in range(count):
                x = x + 1
            recorded = time.perf_counter()
            assert x.item() == count
            ran = time.perf_counter()
            lt.clear_cache()
            gc.collect()
            freed = time.perf_counter()
        found[f"{count:,} ops"] = {
            "record": round((recorded - started) / count * 1e6, 2),
            "compile and run": round((ran - recorded) / count * 1e6, 2),
            "free": round((freed - ran) / count * 1e6, 2),
        }
    return found


_TRAINING = """
import torch, lazytensor as lt
from torch import nn
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 1)).to("ltc")
optimizer = torch.optim.Adam(model.parameters())
for i in range(6):
    optimizer.zero_grad()
    loss = model(torch.randn(8, 8, device="ltc")).pow(2).mean()
    loss.backward()
    optimizer.step()
pending = (model(torch.randn(8, 8, device="ltc")) ** 2).sum()
"""


def exits(count: int = 100) -> dict[str, Any]:
    """How many of so many processes that ran ``backward()`` ended cleanly, four at once."""

    def one(_: int) -> tuple[int, str]:
        done = subprocess.run([sys.executable, "-c", _TRAINING], capture_output=True, text=True, check=False)
        return done.returncode, done.stderr

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(one, range(count)))
    return {"processes": count, "clean": results.count((0, "")), "others": [r for r in results if r != (0, "")][:3]}


def imports(count: int = 10) -> dict[str, Any]:
    """Seconds that a warm ``import lazytensor`` takes after ``import torch``: least and median."""
    timed = "import time, torch; before = time.perf_counter(); import lazytensor; print(time.perf_counter() - before)"
    command = [sys.executable, "-c", timed]
    subprocess.run(command, capture_output=True, check=True)  # generates the kernels, if that was not done
    taken = [float(subprocess.run(command, capture_output=True, text=True, check=True).stdout) for _ in range(count)]
    return {"imports": count, "least": round(min(taken), 3), "median": round(statistics.median(taken), 3)}


def main(arguments: list[str]) -> None:
    """Run what the arguments name and print its figures as JSON."""
    runs = {"memory": memory, "chain": chain, "exits": exits, "imports": imports}
    if not arguments or arguments[0] not in runs:
        raise SystemExit(__doc__)
    counts = [int(a) for a in arguments[1:2]]
    print(json.dumps(runs[arguments[0]](*counts), indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
