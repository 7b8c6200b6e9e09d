"""Strides of results too large for the CPU to be asked are still the CPU's."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.preserve_format])
def test_a_large_clone_has_the_strides_of_its_memory_format(layout: torch.memory_format) -> None:
    strides = [
        torch.zeros(64, 512, device=device).t().clone(memory_format=layout).stride() for device in ("cpu", "ltc")
    ]
    assert strides[0] == strides[1]
