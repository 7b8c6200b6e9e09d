"""Every operator of PyTorch's own database gives on ltc what it gives on the CPU: the first two samples, forward and
backward.
"""

from __future__ import annotations

import pytest
import torch

from lazytensor.conformance import expected, opinfo

NAMES = [name for name, op in opinfo.entries().items() if opinfo.supports(op, torch.float32)]


@pytest.mark.parametrize("name", NAMES)
def test_first_two_samples_equal_cpu(name: str, record_property: pytest.RecordProperty) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the CPU's own sums depend on how many threads share them
    try:
        entry = opinfo.entries()[name]
        found = [expected.judged(o) for o in opinfo.check_entry(entry, torch.float32, opinfo.ltc(), 2, ("forward",))]
    finally:
        torch.set_num_threads(threads)
    record_property("opinfo", [(o.op, o.status, sorted(opinfo.avoidable(o))) for o in found])
    wrong = [o for o in found if o.status not in (opinfo.EQUAL, opinfo.EXPECTED)]
    assert found, "the entry has no samples"
    assert not wrong, "\n".join(f"sample {o.sample}, {o.form}: {o.status}: {o.detail}" for o in wrong)


def test_at_most_one_entry_in_a_hundred_is_expected_to_fail() -> None:
    known = opinfo.entries()
    assert set(expected.lines()) <= set(known), "an expected failure names an entry that does not exist"
    assert len(expected.lines()) <= len(NAMES) / 100
