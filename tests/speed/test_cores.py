"""A cut in the background has as many cores as let the program's steps come fastest."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

import lazytensor as lt
from lazytensor.backend import openmp
from lazytensor.backend.reference import ReferenceBackend
from lazytensor.execute import cores, cut
from lazytensor.execute.cores import Share


def run(
    share: Share, times: int, interval: Callable[[int], float], seconds: float = 0.001, kernels: int = 0
) -> list[int]:
    """Run a computation this often, the time from one run to the next depending on its threads."""
    now, used = 1.0, []
    for _ in range(times):
        threads = share.begin(now)
        used.append(threads)
        share.end(seconds, kernels)
        now += interval(threads)
    return used


TRIAL = cores.FIRST + cores.LATER + cores.RUNS * cores.ROUNDS * 2


@pytest.mark.parametrize(("one", "two", "best"), [(0.0019, 0.0027, 1), (0.0027, 0.0019, 2), (0.00201, 0.002, 1)])
def test_both_are_tried_and_the_better_is_kept(one: float, two: float, best: int) -> None:
    share = Share(2)
    used = run(share, TRIAL + 50, lambda threads: one if threads == 1 else two)
    assert set(used[:TRIAL]) == {1, 2}
    assert set(used[TRIAL:]) == {best}


def test_what_is_over_before_it_could_be_handed_over_is_brief() -> None:
    share = Share(2, 0)
    run(share, TRIAL, lambda _: 0.0001, seconds=cores.BRIEF / 2)
    run(share, 4, lambda _: 0.0001, seconds=cores.BRIEF / 2)
    assert share.brief
    with lt.settings.scope(share_cores=False):
        assert not share.brief, "every run is to have all cores"
    slower = Share(2, 0)
    run(slower, TRIAL + 4, lambda _: 0.0001, seconds=cores.BRIEF * 2)
    assert not slower.brief


def test_a_few_slow_steps_decide_nothing() -> None:
    share = Share(2)
    steps = iter(range(1000))
    used = run(share, TRIAL + 5, lambda threads: 0.5 if next(steps) % 7 == 0 else 0.001 * (1 + threads))
    assert used[-1] == 1


def test_a_long_run_is_left_on_all_cores() -> None:
    assert set(run(Share(2), TRIAL, lambda _: 1.0, seconds=2 * cores.LONG)) == {2}
    assert set(run(Share(2), TRIAL, lambda _: 1.0, seconds=2 * cores.LONG, kernels=cores.FEW - 1)) == {2}


@pytest.mark.parametrize(
    ("seconds", "kernels", "threads"),
    [(0.0039, 0, 1), (0.0039, 50, 1), (0.0041, 0, 2), (0.0041, 1, 2), (0.0041, 50, -2), (0.04, 50, -2), (0.06, 50, 2)],
)
def test_a_short_run_has_one_core_at_first_and_one_of_many_kernels_gives_way(
    seconds: float, kernels: int, threads: int
) -> None:
    assert run(Share(2), cores.FIRST + 1, lambda _: 0.001, seconds, kernels)[-1] == threads
    assert run(Share(8), cores.FIRST + 1, lambda _: 0.001, seconds / 4, kernels)[-1] == (
        1 if threads == 1 else -8 if seconds / 4 < kernels * cores.FINE else 8
    )


def test_what_computes_little_has_one_core_from_the_start() -> None:
    assert set(run(Share(2, cores.LARGE - 1), 20, lambda _: 0.001)) == {1}
    assert run(Share(2, cores.LARGE - 1), cores.FIRST + 1, lambda _: 0.001, 0.03)[-1] == 2, "unless that is slow"
    assert run(Share(2, cores.LARGE), 1, lambda _: 0.001) == [2]


def test_slow_first_runs_do_not_mislead_for_long() -> None:
    share = Share(2)
    assert run(share, cores.FIRST + 1, lambda _: 0.01, 0.01, kernels=20)[-1] == -2
    assert run(share, 2, lambda _: 0.003, 0.001, kernels=20)[-1] == 1


def test_a_long_run_of_many_kernels_is_tried_with_and_without_giving_way() -> None:
    for best in (2, -2):
        used = run(Share(2), TRIAL + 5, lambda threads, best=best: 0.04 if threads == best else 0.05, 0.04, 100)
        assert set(used) == {2, -2}
        assert used[-1] == best


def test_code_that_takes_over_is_guessed_anew() -> None:
    share = Share(2)
    assert run(share, TRIAL, lambda _: 0.04, 0.04)[-1] == 2
    assert run(share, cores.FIRST + 2, lambda _: 0.04, 0.04, kernels=100)[-1] == -2


class Kept:
    """A memory of the number of threads."""

    def __init__(self, threads: int | None = None) -> None:
        self.threads = threads

    def threads_of_before(self) -> int | None:
        return self.threads

    def keep_threads(self, threads: int) -> None:
        self.threads = threads


def test_what_was_decided_is_kept_for_the_next_process() -> None:
    kept = Kept()
    decided = run(Share(2, memory=kept), TRIAL + 5, lambda threads: 0.002 / threads, kernels=2)[-1]
    assert decided == kept.threads == 2
    again = run(Share(2, 0, kept), 2 * TRIAL, lambda threads: 0.002 / threads, kernels=2)
    assert set(again[1:]) == {2}, "no guess and no trial"
    assert 1 in run(Share(2, 0, Kept()), 2 * TRIAL, lambda threads: 0.002 / threads, kernels=2)[1:]


def test_a_slow_start_with_a_kept_number_is_no_other_code() -> None:
    share = Share(2, memory=Kept(2))
    assert run(share, 2, lambda _: 0.01, 0.01, kernels=2)[-1] == 2
    assert set(run(share, TRIAL, lambda _: 0.003, 0.001, kernels=2)) == {2}


@pytest.mark.parametrize("wrong", [0, 3, -4, 1 << 40])
def test_a_kept_number_that_cannot_be_is_ignored(wrong: int) -> None:
    assert set(run(Share(2, memory=Kept(wrong)), TRIAL, lambda _: 0.001, kernels=2)) <= {1, 2, -2}


def test_on_many_cores_a_hopeless_number_is_tried_once() -> None:
    share = Share(64)
    used, now = [], 1.0
    for _ in range(cores.LATER + 10 * cores.RUNS):
        threads = share.begin(now)
        used.append(threads)
        seconds = 0.3 if threads == 1 else 0.01
        share.end(seconds)
        now += seconds
    assert used.count(1) == 1
    assert set(used) == {64, 1}
    assert used[-1] == 64


def test_other_code_is_tried_anew() -> None:
    share = Share(2)
    assert run(share, TRIAL + 5, lambda threads: 0.001 * threads)[-1] == 1
    assert 2 in run(share, 2 * TRIAL, lambda threads: 0.001 * threads, seconds=0.0002)
    assert run(Share(2), TRIAL, lambda threads: 0.001 / threads, seconds=0.0002)[-1] == 2


def test_what_cannot_give_way_while_it_runs_leaves_a_core_from_the_start() -> None:
    assert cores.candidates(8) == [8, -8, 1]
    assert cores.candidates(1) == [1]
    assert [cores.constant(threads) for threads in (8, 1, -8, -2, -1)] == [8, 1, 7, 1, 1]


def test_one_number_only_where_results_have_to_be_the_same_bits() -> None:
    share = Share(8, size=0)
    assert share.begin(1.0) == 1
    torch.use_deterministic_algorithms(True)
    try:
        assert cores.candidates(8) == [8]
        assert share.begin(1.0) == 8, "also for what has run before"
    finally:
        torch.use_deterministic_algorithms(False)
    with lt.settings.scope(share_cores=False):
        assert set(run(Share(8), TRIAL, lambda threads: 0.001)) == {8}


def test_only_the_thread_that_asks_is_limited() -> None:
    before = torch.get_num_threads()
    seen = []

    def limited() -> None:
        openmp.use(1)
        seen.append((torch.get_num_threads(), openmp.all_threads()))
        openmp.use(before)
        seen.append((torch.get_num_threads(), openmp.all_threads()))

    thread = threading.Thread(target=limited)
    thread.start()
    thread.join()
    assert seen == [(1, before), (before, before)]
    assert torch.get_num_threads() == before


class Background(ReferenceBackend):
    """Tells with how many threads each cut ran."""

    asynchronous = True
    name = "background"
    threads: list[int]

    def compile(self, graph):  # type: ignore[no-untyped-def]
        program = super().compile(graph)

        def noted(*inputs):  # type: ignore[no-untyped-def]
            self.threads.append(torch.get_num_threads())
            return program(*inputs)

        return noted


@pytest.mark.skipif(torch.get_num_threads() < 2, reason="PyTorch has one thread")
def test_cuts_in_the_background_are_tried_with_fewer_threads() -> None:
    backend = Background()
    backend.threads = []
    with lt.backend(backend):
        x = torch.ones(3, device="ltc")
        for _ in range(TRIAL):
            x = x + 1
            lt.sync()
        lt.wait()
        assert x.tolist() == [1 + TRIAL] * 3
    assert {1, torch.get_num_threads()} <= set(backend.threads)
    assert {c.share.threads for c in cut.computations.values()} <= set(cores.candidates(openmp.all_threads()))
