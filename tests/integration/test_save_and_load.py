"""``torch.save``, ``torch.load``, ``pickle``, ``copy.deepcopy`` and ``state_dict`` of tensors on ltc."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from support import bits, same, subprocess_run
from torch import nn

from lazytensor.trace.storage import State, state_of


def through_file(value: Any, **load: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **load)


TENSORS = {
    "float32": lambda d: torch.arange(6.0, device=d),
    "bfloat16": lambda d: torch.arange(6.0, device=d).bfloat16(),
    "bool": lambda d: torch.arange(6, device=d) > 2,
    "complex": lambda d: torch.arange(6.0, device=d) * 1j,
    "uint16": lambda d: torch.arange(6, device=d).to(torch.uint16),
    "number": lambda d: torch.tensor(3, device=d),
    "empty": lambda d: torch.empty(0, 3, device=d),
    "transposed": lambda d: torch.arange(6.0, device=d).view(2, 3).t(),
    "channels_last": lambda d: (
        torch.arange(24.0, device=d).view(1, 2, 3, 4).contiguous(memory_format=torch.channels_last)
    ),
    "part": lambda d: torch.arange(9.0, device=d)[3:7:2],
    "expanded": lambda d: torch.arange(3.0, device=d).expand(2, 3),
    "conjugate": lambda d: (torch.arange(6.0, device=d) * 1j).conj(),
    "requires_grad": lambda d: torch.ones(3, device=d, requires_grad=True),
    "parameter": lambda d: nn.Parameter(torch.ones(3, device=d)),
}


@pytest.mark.parametrize("kind", TENSORS)
def test_a_tensor_comes_back_as_it_was(kind: str) -> None:
    def program(device: str) -> tuple[Any, ...]:
        tensor = TENSORS[kind](device)
        saved = through_file(tensor, weights_only=True)
        pickled = pickle.loads(pickle.dumps(tensor))
        copied = copy.deepcopy(tensor)
        assert saved.device == pickled.device == copied.device == tensor.device
        assert type(saved) is type(pickled) is type(copied) is type(tensor)
        return saved, pickled, copied

    same(program)


def test_aliases_share_a_storage_after_loading() -> None:
    def program(device: str) -> Any:
        whole = torch.arange(8.0, device=device)
        loaded = through_file([whole, whole[2:], whole.view(2, 4).t()])
        loaded[0].add_(10)
        loaded[1][0] = -1
        return loaded

    same(program)


def test_aliases_share_a_storage_after_deepcopy() -> None:
    def program(device: str) -> Any:
        whole = torch.arange(8.0, device=device)
        copied = copy.deepcopy([whole, whole[2:], whole])
        copied[0].mul_(2)
        copied[1][0] = -1
        return copied, whole

    same(program)


def test_a_pending_tensor_is_copied_without_running() -> None:
    from lazytensor.execute import cut

    x = torch.arange(3.0, device="ltc") * 2
    before = cut.hits + cut.misses
    y = copy.deepcopy(x)
    x.add_(1)
    assert cut.hits + cut.misses == before
    assert y.tolist() == [0, 2, 4]
    assert x.tolist() == [1, 3, 5]


@pytest.mark.parametrize("location", ["cpu", torch.device("cpu"), {"ltc:0": "cpu"}, lambda storage, tag: storage])
def test_map_location_to_the_cpu(location: Any) -> None:
    x = torch.arange(6.0, device="ltc")
    whole, part = through_file([x, x[2:]], map_location=location)
    assert whole.device.type == part.device.type == "cpu"
    part[0] = -1
    assert whole.tolist() == [0, 1, -1, 3, 4, 5]


@pytest.mark.parametrize("location", ["ltc", "ltc:1", torch.device("ltc:1"), {"cpu": "ltc:1"}, lambda s, tag: s.ltc()])
def test_map_location_to_ltc(location: Any) -> None:
    x = torch.arange(6.0)
    whole, part = through_file([x, x[2:]], map_location=location)
    assert whole.device == part.device
    assert whole.device.type == "ltc"
    if not callable(location) and "1" in str(location):
        assert whole.device.index == 1
    assert bits(whole) == bits(x)
    assert bits(part) == bits(x[2:])


def test_sharing_survives_map_location_to_ltc() -> None:
    x = torch.arange(6.0)
    whole, part = through_file([x, x[2:]], map_location="ltc")
    part[0] = -1
    assert whole.tolist() == [0, 1, -1, 3, 4, 5]


def test_a_device_that_is_not_there_is_named() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    file.seek(0)
    with pytest.raises(RuntimeError, match="there is no device ltc:7"):
        torch.load(file, map_location="ltc:7")


def test_the_file_does_not_need_lazytensor(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    torch.save({"x": torch.arange(3.0, device="ltc"), "p": nn.Parameter(torch.ones(2, device="ltc"))}, path)
    code = f"""
        import torch
        loaded = torch.load({str(path)!r}, map_location="cpu")
        print(loaded["x"].tolist(), type(loaded["p"]).__name__)
    """
    result = subprocess_run(code)
    assert result.stdout.strip() == "[0.0, 1.0, 2.0] Parameter", result.stderr


def test_the_old_file_format() -> None:
    file = io.BytesIO()
    x = torch.arange(6.0, device="ltc")
    torch.save([x, x[1:]], file, _use_new_zipfile_serialization=False)
    file.seek(0)
    whole, part = torch.load(file)
    part[0] = -1
    assert whole.device.type == "ltc"
    assert whole.tolist() == [0, -1, 2, 3, 4, 5]


def test_mmap(tmp_path: Path) -> None:
    torch.save(torch.arange(6.0, device="ltc"), tmp_path / "x.pt")
    x = torch.load(tmp_path / "x.pt", mmap=True)
    x.add_(1)
    assert x.tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.load(tmp_path / "x.pt").tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_saved_is_what_was_there_at_the_time() -> None:
    file = io.BytesIO()
    x = torch.zeros(3, device="ltc")
    torch.save(x, file)
    x.add_(1)
    file.seek(0)
    assert torch.load(file).tolist() == [0, 0, 0]


def test_a_loaded_tensor_is_recorded_as_quickly_as_any() -> None:
    loaded = through_file(torch.arange(6.0, device="ltc").view(2, 3))
    assert type(state_of(loaded)) is State, "a loaded tensor is a view of raw bytes"


def test_modules_and_optimizers() -> None:
    def program(device: str) -> Any:
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(device)
        model[2].weight = nn.Parameter(model[2].weight.detach().clone())
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
        model(torch.randn(5, 3).to(device)).sum().backward()
        optimizer.step()
        state = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, weights_only=True)
        whole = through_file(model, weights_only=False)
        copied = copy.deepcopy(model)
        other = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).to(device)
        other.load_state_dict(state["model"])
        again = torch.optim.Adam(other.parameters(), lr=0.1)
        again.load_state_dict(state["optimizer"])
        other(torch.randn(5, 3).to(device)).sum().backward()
        again.step()
        return whole, copied, other, again.state_dict()["state"]

    same(program, versions=False)  # a parameter made on the CPU and moved has a history of its own


def test_tied_weights_stay_tied_in_a_file() -> None:
    model = nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)).to("ltc")
    model[1].weight = model[0].weight
    loaded = through_file(model, weights_only=False)
    assert loaded[0].weight is loaded[1].weight
    state = through_file(model.state_dict())
    state["0.weight"].zero_()
    assert not state["1.weight"].any()


def test_load_state_dict_across_devices_and_with_assign() -> None:
    model = nn.Linear(2, 2)
    ours = nn.Linear(2, 2).to("ltc")
    ours.load_state_dict(model.state_dict())
    assert bits(ours.weight) == bits(model.weight)
    assert ours.weight.device.type == "ltc"
    model.load_state_dict({k: v * 2 for k, v in ours.state_dict().items()})
    assert bits(ours.weight * 2) == bits(model.weight)
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    empty.load_state_dict(ours.state_dict(), assign=True)
    assert empty.weight.device.type == "ltc"
    assert bits(empty.weight) == bits(ours.weight)


def test_storages() -> None:
    x = torch.arange(6.0, device="ltc")
    memory = x[2:].untyped_storage()
    assert memory.nbytes() == memory.size() == len(memory) == 24
    assert bytes(memory.cpu().tolist()) == bits(x)
    assert bytes(memory.clone().tolist()) == bits(x)
    new = torch.UntypedStorage(8, device="ltc")
    assert new.device == torch.device("ltc:0")
    assert new.tolist() == [0] * 8
    y = torch.empty(0, device="ltc").set_(new)
    y.fill_(1.0)
    assert torch.empty(0, device="ltc").set_(y.untyped_storage(), 0, (2,), (1,)).tolist() == [1.0, 1.0]
