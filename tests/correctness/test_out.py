"""``out=`` that resizes, overlaps or grows into what is read does to aliases what eager does, errors included."""

from __future__ import annotations

import pytest
import torch


def test_an_out_tensor_that_is_resized_leaves_its_other_aliases_as_they_were() -> None:
    x = torch.full([2], 3.0, device="ltc")
    empty = torch.full([0, 2], 0.0, device="ltc")
    alias = empty.detach()
    torch.mul(x, 2, out=alias)
    assert alias.tolist() == [6.0, 6.0]
    assert empty.exp().shape == (0, 2)


def test_out_into_overlapping_memory_of_another_size_has_eagers_error() -> None:
    def program(device: str) -> str:
        x, out = torch.ones(2, 2, device=device), torch.zeros([], device=device)
        with pytest.raises(RuntimeError) as caught:
            torch.sub(x, 1.5, out=out.expand(2))
        return str(caught.value)

    assert program("ltc") == program("cpu")


def test_a_number_like_tensor_written_into_itself_is_left_alone() -> None:
    x = torch.tensor(3.0, device="ltc")
    x.view(-1)[...] = x
    assert x.item() == 3.0


def test_an_out_tensor_that_grows_into_what_is_read_has_eagers_error() -> None:
    def program(device: str) -> str:
        index = torch.tensor([2, 1, 0], device=device)
        with pytest.raises(RuntimeError) as caught, pytest.warns(UserWarning, match="was resized"):
            torch.gather(index.clone(), 0, index[1:], out=index[:1])
        return str(caught.value)

    assert program("ltc") == program("cpu")
