"""What generated kernels are typed with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

Scalar = Any  # a Python number, or the leaf that it was lifted to

if TYPE_CHECKING:

    class LazyTensor(torch.Tensor):
        """A tensor of ltc as its kernels see it."""

        _lt: Any

else:
    LazyTensor = torch.Tensor
