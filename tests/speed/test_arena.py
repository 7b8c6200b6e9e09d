"""What a compiled step makes and drops again has a place of its own, and nobody sees a difference but in memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

import lazytensor as lt
from lazytensor import native
from lazytensor.backend import compiler, heap

pytestmark = pytest.mark.skipif(
    compiler.find() is None or not lt.settings.compiled_recorder,
    reason=f"{compiler.MISSING}, or LAZYTENSOR_COMPILED_RECORDER=0",
)
KB = 1024


class Run:
    """A run of a plan that allocates as it is told, in this thread."""

    def __init__(self, plan: object) -> None:
        self.plan = plan
        self.blocks: dict[str, Tensor] = {}

    def __call__(self, script: str) -> dict[str, int]:
        """`a4` makes block a of 4 kB, `-a` drops it; where the blocks were."""
        places = {}
        self.plan.begin()  # type: ignore[attr-defined]
        for word in script.split():
            if word.startswith("-"):
                del self.blocks[word[1:]]
            else:
                self.blocks[word[0]] = torch.empty(int(word[1:]) * KB, dtype=torch.uint8)
                places[word[0]] = self.blocks[word[0]].data_ptr()
        self.plan.end(True)  # type: ignore[attr-defined]
        return places


@pytest.fixture
def run() -> Iterator[Run]:
    """A plan that has not seen a run yet."""
    extension = native.extension()
    extension.open_arena(lt.settings.keep_bytes)
    made = Run(extension.Plan())
    yield made
    made.blocks.clear()


def inside(place: int) -> bool:
    return bool(native.extension().arena_holds(place))


def test_blocks_that_are_never_there_together_share_a_place(run: Run) -> None:
    script = "a64 b32 -a c64 -b -c"
    run(script)
    assert run.plan.bytes() == 96 * KB  # type: ignore[attr-defined]
    first = run(script)
    assert first["a"] == first["c"] != first["b"]
    assert all(inside(place) for place in first.values())
    assert run(script) == first


def test_the_smallest_plan_is_found_where_the_order_of_making_would_not_find_it(run: Run) -> None:
    run("a16 b16 -a c32 -b d48 -c -d")  # b in the way of c, c of d, if each took the first place that is free
    assert run.plan.bytes() == 80 * KB  # type: ignore[attr-defined]


def test_what_outlives_a_run_is_made_as_usual(run: Run) -> None:
    run("r8 a16 -a")
    kept = run.blocks.pop("r")
    places = run("r8 a16 -a")
    assert inside(places["a"])
    assert not inside(places["r"])
    assert kept.data_ptr() != places["r"]


def test_other_sizes_more_and_less_blocks_do_no_harm(run: Run) -> None:
    run("a64 b32 c8 -a d64 -b -c -d")
    for script in (
        "a64 b16 c8 -a d64 -b -c -d",  # another size, as of a buffer for each thread
        "a64 x24 b32 c8 -a -x d64 -b -c -d",  # one more
        "a64 c8 -a d64 -c -d",  # one less
        "a64 b32 c8 d64 -a -b -c -d",  # dropped later than planned: its place is not free yet
        "a64 b32 -b c8 -a d64 -c -d",  # sooner
    ):
        run.plan.begin()  # type: ignore[attr-defined]
        alive: dict[str, tuple[Tensor, int]] = {}
        for number, word in enumerate(script.split()):
            if word.startswith("-"):
                block, written = alive.pop(word[1:])
                assert bool((block == written).all()), f"{script}: {word} was overwritten"
                del block
            else:
                alive[word[0]] = (torch.full((int(word[1:]) * KB,), number, dtype=torch.uint8), number)
        run.plan.end(True)  # type: ignore[attr-defined]
    places = run("a64 b32 c8 -a d64 -b -c -d")
    assert inside(places["a"])
    assert inside(places["d"])


def test_a_block_that_stays_is_safe_and_no_longer_planned(run: Run) -> None:
    script = "a64 b32 -b -a"
    run(script)
    places = run("a64 b32 -b")
    assert inside(places["a"])
    kept = run.blocks.pop("a").fill_(7)
    assert not any(inside(place) for place in run(script).values()), "its memory is in use"
    assert bool((kept == 7).all())
    del kept
    places = run(script)
    assert inside(places["b"])
    assert not inside(places["a"])


def test_one_run_at_a_time_has_the_arena(run: Run) -> None:
    other = Run(native.extension().Plan())
    for each in (run, other):
        each("a64 -a")
    run.plan.begin()  # type: ignore[attr-defined]
    with ThreadPoolExecutor(1) as elsewhere:
        place = elsewhere.submit(other, "a64 -a").result()["a"]
    run.plan.end(True)  # type: ignore[attr-defined]
    assert not inside(place)
    assert inside(other("a64 -a")["a"])


def test_what_the_first_tier_makes_and_drops_has_a_place_too() -> None:
    places = []

    def run(x: Tensor, keep: bool) -> list[Tensor]:
        between = x + 1
        places.append(between.data_ptr())
        return [between if keep else between * 2]

    planned = heap.planned(run, heap.WORTH)
    x = torch.zeros(16 * KB)
    results = [planned(x, False)[0] for _ in range(3)]
    assert places[1] == places[2]
    assert inside(places[2])
    kept = planned(x, True)[0]  # what every run before has dropped
    results += [planned(x, False)[0] for _ in range(2)]
    assert not any(inside(each.data_ptr()) for each in (kept, *results))
    assert bool((kept == 1).all())
    assert all(bool((each == 2).all()) for each in results)


def test_a_first_tier_that_raises_runs_again() -> None:
    def run(x: Tensor, fails: bool) -> list[Tensor]:
        between = x + 1
        if fails:
            raise ValueError("no")
        return [between * 2]

    planned = heap.planned(run, heap.WORTH)
    x = torch.zeros(16 * KB)
    for fails in (True, False, True, False):
        if fails:
            with pytest.raises(ValueError, match="no"):
                planned(x, True)
        else:
            assert bool((planned(x, False)[0] == 2).all())


def test_the_results_of_steps_with_a_plan_are_eager_s() -> None:
    def steps(device: str) -> list[Tensor]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 4, 3)).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        x = torch.randn(4, 3, 32, 32).to(device)
        kept = []
        for _ in range(8):
            optimizer.zero_grad()
            out = model(x)
            out.square().mean().backward()
            optimizer.step()
            lt.sync()
            kept.append(out.detach())
        return [each.cpu() for each in kept]

    with lt.backend("inductor", wait=True):
        ours = steps("ltc")
        lt.wait()
    for mine, eager in zip(ours, steps("cpu"), strict=True):
        torch.testing.assert_close(mine, eager)


PAGES = """
import resource, sys, torch
from pathlib import Path
import lazytensor as lt
lt.settings.keep_bytes = int(sys.argv[1])
lt.set_backend("inductor", wait=True)
w = torch.randn(1024, 1024).to("ltc")

def step():
    sums = [(w * k).cumsum(0) for k in range(10)]  # 4 MB each, all there at the same time
    total = sum((torch.flip(each, (0,)) * each).sum() for each in sums)
    del sums
    lt.sync(wait=True)

for _ in range(8):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(20):
    step()
pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def resident():
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith("VmRSS"))
    return int(line.split()[1])

before = resident()
torch.ltc.empty_cache()
given_back = before - resident()
step()  # finds its memory again
print(pages, given_back)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux how many pages were made")
def test_the_memory_of_a_step_is_there_for_the_next_until_it_is_given_back() -> None:
    line = [sys.executable, "-c", PAGES]
    without, (pages, given_back) = (
        list(map(int, subprocess.run([*line, str(allowed)], capture_output=True, text=True, check=True).stdout.split()))
        for allowed in (0, 1 << 30)
    )
    assert pages < 1_000 < 10_000 < without[0], "in 20 steps of 10,000 pages"
    assert given_back > 30_000, "kB, of 40,000"
