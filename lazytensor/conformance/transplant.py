"""Copies of a sample's arguments on another device, with the same geometry and the same sharing of memory.

``tensor.to(device)`` makes an expanded or sliced tensor dense; a test of strides and aliasing needs the original's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


class Transplant:
    """Copies trees of arguments to one device; tensors that share a storage share one there too."""

    def __init__(self, device: str, plain: bool = False) -> None:
        self.device = device
        self.plain = plain  # let PyTorch move each tensor as it likes
        self.storages: dict[int, torch.Tensor] = {}
        self.tensors: dict[int, torch.Tensor] = {}
        self.originals: list[Any] = []  # keeps the ids above from being used again
        self.leaves: list[torch.Tensor] = []  # the copies that want a gradient, in the order they were met

    def __call__(self, tree: Any) -> Any:
        """The same tree with every tensor copied and every CPU device replaced."""
        return tree_map(self._leaf, tree)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call; a device given by its name is replaced as well."""
        copied = {k: self._device(v) if k == "device" else self(v) for k, v in kwargs.items()}
        return tuple(self(a) for a in args), copied

    def _device(self, value: Any) -> Any:
        return value if value is None else self.device if torch.device(value).type == "cpu" else value

    def _leaf(self, value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device(self.device) if value.type == "cpu" else value
        if not isinstance(value, torch.Tensor):
            return value
        known = self.tensors.get(id(value))
        if known is None:
            self.originals.append(value)
            known = self.tensors[id(value)] = self._tensor(value)
        return known

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        copy = self._raw(value.detach())
        if isinstance(value, torch.nn.Parameter):
            copy = torch.nn.Parameter(copy, requires_grad=value.requires_grad)
        elif value.requires_grad:
            copy.requires_grad_()
        if value.requires_grad:
            self.leaves.append(copy)
        return copy

    def _raw(self, value: torch.Tensor) -> torch.Tensor:
        if self.plain or value.layout is not torch.strided or value.is_nested or type(value) is not torch.Tensor:
            return value.clone().to(self.device)
        if value.is_conj():
            return self._raw(value.conj()).conj()
        if value.is_neg():
            return torch._neg_view(self._raw(torch._neg_view(value)))  # type: ignore[attr-defined]
        storage = value.untyped_storage()
        base = self.storages.get(storage._cdata)
        if base is None:
            whole = torch.empty(0, dtype=value.dtype).set_(storage, 0, (storage.nbytes() // value.element_size(),))  # type: ignore[call-overload]
            base = self.storages[storage._cdata] = whole.clone().to(self.device)
            self.originals.append(storage)
        elif base.dtype is not value.dtype:
            base = base.view(value.dtype)
        if value.is_contiguous() and value.numel() == base.numel():
            return base.view(value.shape).detach()
        return base.as_strided(value.shape, value.stride(), value.storage_offset())
