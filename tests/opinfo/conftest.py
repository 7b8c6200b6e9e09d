"""Prints the OpInfo counts at the end of the run, whichever process ran the tests."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter: Any) -> None:
    checks = [
        tuple(check)
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport) and report.when == "call"
        for name, found in report.user_properties
        if name == "opinfo"
        for check in found
    ]
    if not checks:
        return
    entries = {op for op, _, _ in checks}
    failing = {op for op, status, _ in checks if status != "equal"}
    fell_back = {op for op, _, fallbacks in checks if fallbacks}
    counts = Counter(status for _, status, _ in checks)
    terminalreporter.section("OpInfo: ltc against CPU eager, float32")
    terminalreporter.write_line(
        f"{len(entries) - len(failing)} of {len(entries)} entries equal CPU ("
        + ", ".join(f"{count} samples {status}" for status, count in counts.most_common())
        + ")"
    )
    expected = {op for op, status, _ in checks if status == "expected failure"}
    terminalreporter.write_line(
        f"{len(expected)} entries are expected to fail: {', '.join(sorted(expected)) or 'none'}"
    )
    terminalreporter.write_line(
        f"{100 * (1 - len(fell_back) / len(entries)):.1f} % of entries recorded without fallback, "
        f"data-dependent shapes apart; the others: {', '.join(sorted(fell_back)) or 'none'}"
    )
