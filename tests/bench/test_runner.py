"""The runner starts workers, alternates among them, and turns what goes wrong in one into a line of the result."""

from __future__ import annotations

import json
import statistics
import subprocess
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from lazytensor.bench import report, runner, worker, workloads

EAGER = runner.EAGER
TWIN = runner.System("twin", "eager")


@pytest.fixture(scope="module")
def race() -> runner.Race:
    """Two equal eager lanes after a few steps."""
    with runner.Race([(EAGER, "mlp_adam"), (TWIN, "mlp_adam")]) as race:
        race.warm(seconds=0.05, budget=60.0)
        race.alternate(turns=3, seconds=0.01)
    return race


def test_each_lane_takes_every_turn(race: runner.Race) -> None:
    for result in race.results():
        assert result["error"] is None
        assert len(result["turns"]) == 3
        assert 0 < result["min_s"] <= result["step_s"]
        assert result["first_s"] > 0
        assert result["peak_mb"] > 0


def test_equal_programs_have_equal_losses(race: runner.Race) -> None:
    results = race.results()
    assert len(results[0]["losses"]) >= 3
    assert report.loss_difference(results, results[1], EAGER.name) == 0


def test_ratio_pairs_the_turns(race: runner.Race) -> None:
    assert report.ratio(race.results(), EAGER.name, EAGER.name, "mlp_adam") == 1.0
    assert report.ratio(race.results(), "absent", EAGER.name, "mlp_adam") is None


def test_first_steps_are_those_of_new_processes_in_turns() -> None:
    said: list[str] = []
    found = runner.first_steps((EAGER, TWIN), "chain_10", 2, said.append)
    assert {name: len(seconds) for name, seconds in found.items()} == {EAGER.name: 2, TWIN.name: 2}
    assert all(seconds > 0 for row in found.values() for seconds in row)
    assert said == ["chain_10: starting eager", "chain_10: starting twin"] * 2


def test_results_are_plain_data(race: runner.Race) -> None:
    results = race.results()
    assert json.loads(json.dumps(results)) == results


def test_a_step_is_compared_with_its_computation_alone() -> None:
    with runner.Race([(EAGER, "mlp_adam"), (runner.AUTO, "mlp_adam"), (runner.AUTO, "control_flow")]) as race:
        race.hide(turns=2, seconds=0.01)  # one step each: to wait for compiled code would take a minute
    eager, ours, reads = race.lanes
    assert [lane.error for lane in race.lanes] == [None] * 3
    assert eager.shown == reads.shown == [], "eager records nothing, and a step that reads values is many cuts"
    assert len(ours.shown) == 2
    # How large they are depends on when TorchScript takes its time for the first runs.
    assert race.results()[1]["of_graph_alone"] == statistics.median(ours.shown) > 0


def test_ops_of_a_step_are_counted() -> None:
    with runner.Race([(EAGER, "chain_100")]) as race:
        answer = race.lanes[0].ask("count")
    assert answer is not None
    assert answer["by_name"] == {"aten.add.Tensor": 100}


def test_an_error_ends_its_lane_only() -> None:
    with runner.Race([(EAGER, "no_such_workload"), (EAGER, "chain_100")]) as race:
        race.warm(seconds=0.01, budget=60.0)
        race.alternate(turns=1, seconds=0.01)
    wrong, right = race.results()
    assert wrong["error"].startswith("ValueError: no workload named 'no_such_workload'")
    assert right["error"] is None
    assert len(right["turns"]) == 1
    console = Console(file=StringIO(), width=200)
    console.print(*report.lanes_tables(race.results(), {"first": lambda lane: report.duration(lane["first_s"])}))
    assert "no_such_workload" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_lane_over_its_budget_is_cut_off() -> None:
    with runner.Race([(EAGER, "chain_1000")]) as race:
        lane = race.lanes[0]
        lane.allow(0.05)
        assert lane.round(1_000_000) is None
        assert lane.error == "cut off after 0 s"
        assert lane.round(1) is None


def test_a_lane_whose_compiler_works_when_its_time_is_over_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    ask = runner.Lane.ask

    def noted(lane: runner.Lane, request: str) -> dict[str, Any] | None:
        answer = ask(lane, request)
        asked.append(request.split()[0])
        return answer if answer is None or asked[-1] == "rest" else answer | {"busy": True}

    monkeypatch.setattr(runner.Lane, "ask", noted)
    with runner.Race([(EAGER, "chain_100")]) as race:
        race.warm(seconds=1.0, budget=3.0, rest=True)
        (lane,) = race.lanes
        assert lane.error is None
        assert asked[-6:] == ["rest", *["round"] * 5]
        assert len(lane.warmup) == asked.index("rest"), "steps that follow the rest say nothing of the time to settle"
        assert lane.rounds == []


def test_a_worker_that_dies_says_how() -> None:
    with runner.Race([(EAGER, "chain_100")]) as race:
        lane = race.lanes[0]
        lane._process.kill()
        assert lane.round(1) is None
        assert lane.error == "killed by SIGKILL"


def test_a_process_of_another_system_never_loads_lazytensor() -> None:
    line, environment = worker.command(["--system=eager", "--workload=chain_100", "--steps=2", "--json"])
    code = "import sys, runpy; sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__'); "
    code += "print([name for name in sys.modules if name.split('.')[0] == 'lazytensor'], file=sys.stderr)"
    line[2:2] = ["-c", code]
    done = subprocess.run(line, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["workload"] == "chain_100"
    assert done.stderr.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", [*workloads.RECIPES, "chain_7"])
def test_a_workload_builds_the_same_every_time(name: str) -> None:
    first, second = (workloads.build(name, "cpu").step() for _ in range(2))
    assert first.isfinite().all()
    assert first.equal(second)
