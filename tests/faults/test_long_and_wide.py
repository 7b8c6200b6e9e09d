"""Wide cuts, many graphs, many cuts, spawned processes and signals: the short forms of lazytensor.fuzz.wide."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lazytensor as lt
from lazytensor.execute import cut
from lazytensor.fuzz import wide
from lazytensor.trace import ir


def test_a_cut_of_thousands_of_tensors() -> None:
    assert wide.wide_cut(2_000)


def test_caches_stay_bounded_however_many_graphs_there_are() -> None:
    with lt.settings.scope(cache_size=20, max_nodes=1_000):
        lt.clear_cache()
        left = wide.distinct_graphs(200)
        assert left["graphs"] <= 20
        assert left["nodes"] <= 1_000 + 100  # a sweep comes after the cut that went over
    lt.clear_cache()
    assert not cut.computations and ir.node_count() < 1_000


def test_many_small_cuts_leave_no_memory_behind() -> None:
    assert wide.small_cuts(10_000) < 3 << 20


def run(script: str, tmp_path: Path) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(script))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=200)


def test_spawned_processes_have_devices_of_their_own(tmp_path: Path) -> None:
    done = run(
        """
        import multiprocessing, torch
        import lazytensor as lt

        def child(numbers, answers):
            import lazytensor
            x = torch.tensor(numbers).to("ltc")
            answers.put((x * 2).tolist())

        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            x = torch.ones(3, device="ltc") + 1  # pending while the child runs
            answers = context.SimpleQueue()
            process = context.Process(target=child, args=([1.0, 2.0], answers))
            process.start()
            print(answers.get(), x.tolist())
            process.join()
            print(process.exitcode)
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[:2] == ["[2.0, 4.0] [2.0, 2.0, 2.0]", "0"]


@pytest.mark.parametrize("backend", ["reference", "ts"])
def test_signals_that_keep_coming_while_graphs_run(tmp_path: Path, backend: str) -> None:
    """A handler that raises, at a random place of recording, compiling, running or installing."""
    done = run(
        f"""
        import signal, torch
        import lazytensor as lt
        lt.set_backend("{backend}")

        class Tick(KeyboardInterrupt): pass
        def tick(*_): raise Tick
        x = torch.zeros(3, device="ltc")
        lt.sync(wait=True)
        signal.signal(signal.SIGALRM, tick)
        ticks = 0
        for n in range(30):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002 + n * 0.00005)
                for _ in range(400):
                    y = (x + 1).exp().sum()
                    lt.sync()
            except Tick:
                ticks += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        print(ticks > 5, x.tolist(), (x + 1).tolist(), round((x + 1).exp().sum().item(), 3))
        """,
        tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split("\n")[0] == "True [0.0, 0.0, 0.0] [1.0, 1.0, 1.0] 8.155"
