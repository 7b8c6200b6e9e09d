"""The command line: its manual opens without PyTorch, and every command keeps to its output and exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support import subprocess_run
from typer.testing import CliRunner

SCRIPTS = Path(__file__).parent / "scripts"
REPOSITORY = Path(__file__).parents[2]


def lazytensor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the command as a user does, in a process of its own."""
    command = [sys.executable, "-m", "lazytensor_cli", *arguments]
    everything = os.environ | environment
    return subprocess.run(command, env=everything, capture_output=True, text=True, timeout=300, check=False)


def test_the_manual_opens_without_pytorch() -> None:
    program = """
import sys, lazytensor_cli
sys.argv = ["lazytensor", "--help"]
try:
    lazytensor_cli.main()
except SystemExit as end:
    assert end.code == 0
assert "torch" not in sys.modules and "lazytensor" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for word in ("demo", "doctor", "run", "bench", "Exit codes"):
        assert word in done.stdout


def test_a_wrong_command_line_is_exit_code_2() -> None:
    assert lazytensor("paint").returncode == 2


def test_the_demo_is_bit_equal_to_the_cpu() -> None:
    done = lazytensor("demo", "--steps", "12", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["losses_equal"]
    assert told["fallbacks"] == {}
    assert told["graphs_compiled"] + told["cuts_from_cache"] >= 12
    assert told["graphs_compiled"] <= 4
    assert told["ops_per_step"] > 100
    assert told["record_microseconds_per_op"] > 0


def test_the_doctor_tries_every_backend_and_lists_every_setting() -> None:
    import lazytensor as lt

    done = lazytensor("doctor", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    # Those of a new process: other tests have registered more in this one.
    known = subprocess_run("import lazytensor as lt; print(*lt.backends())").stdout.split()
    assert sorted(b["name"] for b in told["backends"]) == sorted(known) and "reference" in known
    reference = next(b for b in told["backends"] if b["name"] == "reference")
    assert reference["works"]
    assert reference["equal"]
    assert [s["name"] for s in told["settings"]] == [s.name for s in lt.settings.all_settings()]


def test_the_doctor_is_exit_code_1_if_the_backend_in_use_does_not_work() -> None:
    from lazytensor.cli import doctor

    told = doctor.examine(["no-such-backend"])
    assert not told["healthy"]
    assert "no-such-backend" in told["backends"][0]["error"]


def run_script(name: str, *arguments: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    done = lazytensor("run", "--json", str(SCRIPTS / name), *arguments)
    summary = done.stdout[done.stdout.index('{\n  "script"') :]  # the last thing on stdout
    return done, json.loads(summary)


def test_a_cuda_program_runs_unchanged() -> None:
    done, summary = run_script("cuda_program.py", "--epochs", "3")
    assert done.returncode == 0, done.stderr
    assert "device ltc epochs 3 loss finite True" in done.stdout
    assert summary["replaced"] == "cuda"
    assert summary["from_cache"] > summary["compiled"] > 0
    assert summary["fallbacks"] == {}


def test_a_cpu_program_runs_unchanged_and_prints_the_same_numbers() -> None:
    script = SCRIPTS / "cpu_program.py"
    eager = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    done, summary = run_script("cpu_program.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(eager.stdout)
    assert summary["replaced"] == "cpu"
    assert summary["cuts"] >= 8


def test_a_failing_program_shows_its_own_traceback_and_exit_code_1() -> None:
    done, summary = run_script("failing_program.py")
    assert done.returncode == summary["exit_code"] == 1
    assert "in broken" in done.stderr
    assert "runpy" not in done.stderr
    assert "mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)" in done.stderr


def test_every_mounted_command_has_its_manual() -> None:
    from lazytensor.cli import mounts
    from lazytensor.cli.app import app

    found = [mount for mount in mounts.MOUNTS if mounts.exists(mount.module)]
    for mount in found:
        told = CliRunner().invoke(app, [mount.name, "--help"])
        assert told.exit_code == 0, (mount, told.output, told.exception)
        assert "Usage" in told.output


@pytest.mark.parametrize("question", ["trace", "backends", "models", "codegen"])
def test_every_measurement_that_exists_has_its_manual(question: str) -> None:
    from lazytensor.cli import mounts
    from lazytensor.cli.app import app

    told = CliRunner().invoke(app, ["bench", question, "--help"])
    assert told.exit_code == (0 if mounts.exists(f"lazytensor.bench.{question}") else 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("backends", "nosuch"), "lazytensor: there is no backend 'nosuch'; known are auto, inductor, reference, ts."),
        (("fuzz", "--programs", "1", "--backend", "nosuch"), "lazytensor: there is no backend 'nosuch'"),
        (("conformance", "nosuch"), "lazytensor: there is no backend 'nosuch'"),
        (("bench", "models", "--workload", "nosuch"), "no workload named 'nosuch'"),
    ],
)
def test_a_wrong_name_is_told_in_a_sentence(arguments: tuple[str, ...], said: str) -> None:
    done = lazytensor(*arguments)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_a_package_of_an_extra_that_is_missing_is_told_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ModuleNotFoundError('No module named numpy', name='numpy')")
    done = lazytensor("conformance", "reference", "--op", "add", PYTHONPATH=f"{tmp_path}{os.pathsep}{REPOSITORY}")
    assert done.returncode == 1
    assert "lazytensor: this needs numpy: pip install 'lazytensor[test]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_cache_build_without_a_compiler_says_what_is_missing(tmp_path: Path) -> None:
    done = lazytensor("cache", "build", PATH=str(tmp_path), CXX="", LAZYTENSOR_CACHE_DIR=str(tmp_path))
    assert done.returncode == 2
    assert "no C++ compiler was found: install g++ or clang++" in " ".join(done.stderr.replace("│", " ").split())
    assert "Traceback" not in done.stderr


def test_cache_import_of_a_file_that_is_no_archive_says_so(tmp_path: Path) -> None:
    (tmp_path / "notes.tar").write_text("no archive")
    done = lazytensor("cache", "import", str(tmp_path / "notes.tar"), LAZYTENSOR_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1
    assert done.stderr.strip() == "nothing was imported: not a gzip file"
