"""The long run goes on after crashes and hangs, continues where it was interrupted, and knows what was expected."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lazytensor.conformance import expected, longrun, table
from lazytensor.conformance.opinfo import DIFFERENT, EQUAL, EXPECTED, Outcome

# A worker that makes three checks of each chunk; at the second of "crash" it dies, at that of "hang" it is silent.
WORKER = """
import json, os, sys, time
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    chunk = json.loads(line)
    for sample in range(chunk["skip"], 3):
        if sample == 1 and chunk["op"] == "crash":
            os.abort()
        if sample == 1 and chunk["op"] == "hang":
            time.sleep(3600)
        row = {"op": chunk["op"], "dtype": chunk["dtype"], "sample": sample, "form": "forward", "status": "equal"}
        print(json.dumps(row), flush=True)
    print(json.dumps({"done": True}), flush=True)
"""


def run(path: Path, names: list[str], script: str = WORKER) -> longrun.State:
    state = longrun.State(path, "a test")
    chunks = [longrun.Chunk(name, "float32", None, ("forward",)) for name in names]
    longrun.run(chunks, state, [sys.executable, "-c", script], jobs=2, patience=2.0)
    return state


def test_a_crash_and_a_hang_cost_one_check_each(tmp_path: Path) -> None:
    state = run(tmp_path / "state.jsonl", ["fine", "crash", "hang", "also fine"])
    found = {
        name: [r["status"] for r in state.rows if r["op"] == name] for name in ("fine", "crash", "hang", "also fine")
    }
    assert found == {
        "fine": [EQUAL] * 3,
        "crash": [EQUAL, longrun.CRASH, EQUAL],
        "hang": [EQUAL, longrun.HANG, EQUAL],
        "also fine": [EQUAL] * 3,
    }


def test_an_interrupted_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "state.jsonl"
    run(path, ["one"])
    with path.open("a") as file:  # as if it had been interrupted in the middle of the next chunk, and of a line
        file.write(json.dumps({"op": "two", "dtype": "float32", "sample": 0, "form": "forward", "status": "equal"}))
        file.write('\n{"op": "tw')
    state = longrun.State(path, "a test")
    assert {key[0] for key in state.finished} == {"one"}
    assert [row["op"] for row in state.rows] == ["one"] * 3


def test_another_target_does_not_continue_it(tmp_path: Path) -> None:
    run(tmp_path / "state.jsonl", ["one"])
    assert longrun.State(tmp_path / "state.jsonl", "another").rows == []


def test_a_worker_that_does_not_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no module for this"):
        run(tmp_path / "state.jsonl", ["one"], "raise ImportError('no module for this')")


def test_an_expected_failure_that_passes_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = expected.parse("# comment\nadd | float32 | forward, out | 3 | a reason\n")
    monkeypatch.setattr(expected, "lines", lambda: {"add": lines})
    failing = Outcome("add", "float32", 3, "out", DIFFERENT, "by 1")
    assert expected.judged(failing).status == EXPECTED
    assert expected.judged(Outcome("add", "float32", 3, "out", EQUAL)).status == expected.UNEXPECTED
    assert expected.judged(Outcome("add", "float32", 2, "out", DIFFERENT)).status == DIFFERENT
    with pytest.raises(ValueError, match="line 1"):
        expected.parse("add | no reason")


def test_the_table_counts_and_is_written(tmp_path: Path) -> None:
    rows = [
        {"op": "add", "dtype": "float32", "sample": 0, "form": "forward", "status": EQUAL},
        {"op": "add", "dtype": "float32", "sample": 1, "form": "forward", "status": DIFFERENT, "detail": "<b>"},
        {
            "op": "nonzero",
            "dtype": "float32",
            "sample": 0,
            "form": "forward",
            "status": EQUAL,
            "fallbacks": ["aten::nonzero"],
        },
    ]
    found = table.table(rows, {"target": "a test", "torch": "1", "lazytensor": "2"})
    assert (found["checks"], found["entries"], found["equal_percent"]) == (3, 2, 66.667)
    assert found["entries_with_avoidable_fallback"] == []  # the shape of nonzero's result depends on data
    table.write_json(found, tmp_path / "t.json")
    table.write_html(found, tmp_path / "t.html")
    assert json.loads((tmp_path / "t.json").read_text()) == found
    page = (tmp_path / "t.html").read_text()
    assert "1/2" in page
    assert "<b>" not in page.split("<tbody>")[1]
