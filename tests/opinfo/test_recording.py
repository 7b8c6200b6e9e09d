"""What OpInfo found: conjugate views, draws over pending data, checks, sparse tensors, strides of fallbacks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import lazytensor as lt


def on_both(function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The function's result on the CPU and on ltc, under the same seed."""
    torch.manual_seed(0)
    expected = function(start.clone())
    torch.manual_seed(0)
    return expected, function(start.clone().to("ltc")).cpu()


def equal(function: Callable[[torch.Tensor], torch.Tensor], start: torch.Tensor) -> None:
    expected, found = on_both(function, start)
    assert torch.equal(found, expected)


COMPLEX = torch.view_as_complex(torch.arange(24.0).reshape(3, 4, 2))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.conj() * 2,
        lambda x: x.conj().imag.clone(),
        lambda x: x.conj() @ x.mT,
        lambda x: (x.conj().mul_(2j), x)[1],
        lambda x: (x.conj().t()[1:].mul_(2j), x)[1],
        lambda x: (x.conj().imag.add_(1), x)[1],
        lambda x: (x.imag.mul_(2), x)[1],
        lambda x: torch.fft.fft(x.conj()),
    ],
)
def test_conjugate_and_negative_views_read_and_write_as_on_cpu(
    function: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    equal(function, COMPLEX)


def test_a_write_through_a_part_of_an_overlapping_view_reaches_every_element_it_shares() -> None:
    equal(lambda x: (x.unfold(0, 2, 1)[0].mul_(10), x)[1], torch.arange(5.0))


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: torch.bernoulli(x * 0.5),
        lambda x: torch.multinomial(x + 1, 3),
        lambda x: torch.multinomial(x + 1, 5, replacement=True),
        lambda x: torch.normal(x, x + 1),
        lambda x: torch.normal(x, 2.0),
        lambda x: torch.empty_like(x).bernoulli_(x * 0.5),
        lambda x: torch.native_dropout(x * 2, 0.5, True)[0],
    ],
)
def test_draws_over_pending_data_are_recorded_and_bit_equal(draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
    start = torch.linspace(0.1, 0.9, 24).reshape(4, 6)
    before = lt.metrics.fallbacks()
    expected, found = on_both(lambda x: torch.cat([draw(x.sin()).float().flatten(), torch.rand(3).to(x.device)]), start)
    assert torch.equal(found, expected)  # the numbers drawn afterwards too: the generator moved on as on the CPU
    assert lt.metrics.fallbacks() == before


def test_draws_over_pending_data_do_not_recompile() -> None:
    x = torch.full((8,), 0.5, device="ltc")
    for _ in range(3):
        torch.bernoulli(x.sin()).sum().item()
    misses = lt.cache_info()["misses"]
    for _ in range(5):
        torch.bernoulli(x.sin()).sum().item()
    assert lt.cache_info()["misses"] == misses


def test_an_explicit_generator_moves_on_as_on_cpu() -> None:
    mine, theirs = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    weights = torch.arange(1.0, 9.0)
    for _ in range(3):
        expected = torch.multinomial(weights, 4, generator=theirs)
        assert torch.equal(torch.multinomial(weights.to("ltc"), 4, generator=mine).cpu(), expected)
    assert torch.equal(mine.get_state(), theirs.get_state())


def test_a_singular_matrix_raises_eagers_error_once_at_the_cut() -> None:
    singular = torch.zeros(3, 3, device="ltc")
    with pytest.raises(torch.linalg.LinAlgError) as expected:
        torch.linalg.inv(torch.zeros(3, 3))
    with pytest.raises(torch.linalg.LinAlgError) as found:
        torch.linalg.inv(singular).cpu()
    assert str(found.value) == str(expected.value)
    lt.sync()
    assert torch.equal((singular + 1).cpu(), torch.ones(3, 3))


def test_sparse_tensors_live_on_the_device() -> None:
    dense = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    for to_sparse in (torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr):
        sparse = to_sparse(dense.to("ltc"))
        assert sparse.device.type == "ltc"
        assert torch.equal(sparse.to_dense().cpu(), dense)
        assert torch.equal((sparse @ dense.to("ltc")).cpu(), dense @ dense)
        assert torch.equal(to_sparse(dense).to("ltc").cpu().to_dense(), dense)


def test_embedding_with_sparse_gradients_trains_as_on_cpu() -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(0)
        table = torch.nn.Embedding(6, 3, sparse=True).to(device)
        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.tensor([1, 2, 2], device=device)).square().sum().backward()
            optimizer.step()
        return table.weight.detach().cpu()

    assert torch.equal(train("ltc"), train("cpu"))


def test_results_of_a_fallback_keep_their_strides() -> None:
    a, b = torch.randn(4, 3), torch.randn(4, 3)
    expected = torch.linalg.lstsq(a, b).solution
    assert torch.linalg.lstsq(a.to("ltc"), b.to("ltc")).solution.stride() == expected.stride()


def test_out_of_a_factory_is_recorded() -> None:
    out = torch.empty(4, device="ltc", dtype=torch.float64)
    before = lt.metrics.fallbacks()
    torch.arange(4, out=out)
    assert torch.equal(out.cpu(), torch.arange(4, dtype=torch.float64))
    assert lt.metrics.fallbacks() == before
