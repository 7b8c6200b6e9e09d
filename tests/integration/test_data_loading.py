"""``DataLoader`` with workers, pinned memory, and processes forked after ltc was used."""

from __future__ import annotations

import os

import pytest
import torch
from support import bits
from torch.utils.data import DataLoader, Dataset, TensorDataset


class Squares(Dataset[torch.Tensor]):
    """A data set of the CPU."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((2,), float(index * index))


def batches(loader: DataLoader[torch.Tensor]) -> list[list[float]]:
    return [(batch.to("ltc", non_blocking=True) + 1)[:, 0].tolist() for batch in loader]


EXPECTED = [[1, 2, 5], [10, 17, 26], [37, 50]]


@pytest.mark.parametrize("pin_memory", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_reach_the_device(workers: int, pin_memory: bool) -> None:
    torch.ones(3, device="ltc").sum().item()  # the workers are forked from a process that has used the device
    loader = DataLoader(Squares(), batch_size=3, num_workers=workers, pin_memory=pin_memory)
    assert batches(loader) == EXPECTED
    assert batches(loader) == EXPECTED


def test_a_data_set_on_the_device() -> None:
    data = torch.arange(8.0, device="ltc")
    loader = DataLoader(TensorDataset(data, data * 2), batch_size=4)
    assert [(a.tolist(), b.sum().item()) for a, b in loader] == [([0, 1, 2, 3], 12.0), ([4, 5, 6, 7], 44.0)]


def test_shuffling_is_the_same_as_without_the_device() -> None:
    def order(generator: torch.Generator) -> list[float]:
        loader = DataLoader(Squares(), batch_size=8, shuffle=True, generator=generator)
        return next(iter(loader))[:, 0].tolist()

    assert order(torch.Generator(device="ltc").manual_seed(3)) == order(torch.Generator().manual_seed(3))


def test_pinned_memory() -> None:
    x = torch.arange(3.0)
    pinned = x.pin_memory()
    assert pinned.is_pinned()
    assert not x.is_pinned()
    assert pinned.pin_memory() is pinned
    pinned.add_(1)
    assert x.tolist() == [0, 1, 2], "pinning copies"
    assert pinned.to("ltc", non_blocking=True).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="only dense CPU tensors can be pinned"):
        x.to("ltc").pin_memory()
    assert not x.to("ltc").is_pinned()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_forked_process_can_use_the_device() -> None:
    x = torch.arange(4.0, device="ltc")
    (x * 2).tolist()
    pending = x + 1
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # the child must not return into pytest
        try:
            torch.set_num_threads(1)
            os.write(writing, bits(pending * 3))
        finally:
            os._exit(0)
    os.close(writing)
    got = os.read(reading, 1000)
    os.close(reading)
    os.waitpid(child, 0)
    assert got == bits((x.cpu() + 1) * 3)
    assert pending.tolist() == [1, 2, 3, 4]
