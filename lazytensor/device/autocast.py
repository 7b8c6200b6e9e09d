"""``torch.autocast("ltc")``: the casts that the CPU's autocast makes, for tensors of ltc.

PyTorch keeps its autocast rules in C++, one table for each device, and an out-of-tree device has none.  Here the CPU's
are taken: which ops have a rule is asked of PyTorch itself; which of three rules an op has stands below.  So a program
gets the dtypes and the values of ``torch.autocast("cpu")``.

*lower*    run in the low precision, ``torch.get_autocast_dtype("ltc")``
*promote*  run in the widest dtype among the arguments
*float32*  run in float32: every other op with a rule
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from lazytensor.trace.ir import Op
from lazytensor.trace.tensors import DEVICE

LOWER = frozenset(
    (
        "_addmm_activation",
        "_convolution.deprecated",
        "_native_multi_head_attention",
        "addbmm",
        "addmm",
        "baddbmm",
        "bmm",
        "conv1d",
        "conv1d.padding",
        "conv2d",
        "conv2d.padding",
        "conv3d",
        "conv3d.padding",
        "conv_tbc",
        "conv_transpose1d",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
        "linalg_vecdot",
        "linear",
        "matmul",
        "mkldnn_rnn_layer",
        "mm",
        "prelu",
        "scaled_dot_product_attention",
    )
)
PROMOTE = frozenset(["cat", "index_copy", "stack"])

# The low-precision copy of each float32 leaf that requires a gradient, made once in the outermost autocast scope, as on
# the CPU: so a weight that is used twice is cast once, and its gradient is summed in the low precision.
_copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def forget_copies() -> None:
    """Drop the copies of weights: the outermost autocast scope ended."""
    _copies.clear()


def ops_with_a_rule() -> list[str]:
    """The ATen overloads that the CPU's autocast has a rule for."""
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    names = torch._C._dispatch_get_all_op_names()  # type: ignore[attr-defined]
    return [n.removeprefix("aten::") for n in names if n.startswith("aten::") and has_kernel(n, "AutocastCPU")]


_libraries: list[Any] = []  # registrations last as long as these


def install() -> None:
    """Register a casting kernel for each op with a rule; every other op passes.  ``torch.autocast("ltc")`` asks for it,
    once.
    """
    if _libraries:
        return
    aten: Any
    others, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name in ops_with_a_rule():
        aten.m.impl("aten::" + name, "AutocastPrivateUse1", _kernel(name), False)
    _libraries.extend((others, aten))


def _kernel(name: str) -> Callable[..., Any]:
    called = Op("aten::" + name)
    if name in LOWER:
        choose: Callable[[Any], torch.dtype] = _low
    else:
        choose = _widest if name in PROMOTE else _full

    def cast_and_call(*args: Any, **kwargs: Any) -> Any:
        dtype = choose((args, kwargs))
        with torch._C._DisableAutocast():
            return called.overload(*_cast(args, dtype), **_cast(kwargs, dtype))

    return cast_and_call


def _low(arguments: Any) -> torch.dtype:
    return torch.get_autocast_dtype(DEVICE)


def _full(arguments: Any) -> torch.dtype:
    return torch.float32


def _widest(arguments: Any) -> torch.dtype:
    low = torch.get_autocast_dtype(DEVICE)
    for tensor in _tensors(arguments):
        if tensor.dtype is torch.float32:
            return torch.float32
        if tensor.dtype is not low and _eligible(tensor):
            raise RuntimeError("Unexpected floating ScalarType in at::autocast::prioritize")
    return low


def _tensors(argument: Any) -> list[torch.Tensor]:
    if isinstance(argument, torch.Tensor):
        return [argument]
    if isinstance(argument, dict):
        argument = argument.values()
    elif not isinstance(argument, list | tuple):
        return []
    return [t for each in argument for t in _tensors(each)]


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.device.type == DEVICE and tensor.is_floating_point() and tensor.dtype is not torch.float64


def _cast(argument: Any, dtype: torch.dtype) -> Any:
    if isinstance(argument, torch.Tensor):
        if argument.dtype is dtype or not _eligible(argument):
            return argument
        return _cast_weight(argument, dtype) if _is_weight(argument, dtype) else argument.to(dtype)
    if isinstance(argument, list | tuple):
        return [_cast(a, dtype) for a in argument]
    if isinstance(argument, dict):
        return {k: _cast(a, dtype) for k, a in argument.items()}
    return argument


def _is_weight(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return (
        dtype is not torch.float32
        and tensor.dtype is torch.float32
        and tensor.requires_grad
        and tensor.is_leaf
        and not tensor._is_view()
        and torch.is_autocast_cache_enabled()
    )


def _cast_weight(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    known = _copies.get(id(tensor))
    if known is None:
        known = _copies[id(tensor)] = (tensor, tensor.to(dtype))
    return known[1]
