"""Sparse tensors on ltc: their parts are ltc tensors, their ops fall back to the CPU.

A sparse tensor is indices and values, which are strided, and a little bookkeeping, which PyTorch's C++ does the same
way for every device.  So ops that only look at the structure are given to the CPU's kernel as they are; every other op
runs on a CPU copy, counted as a fallback, and its results come back.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from lazytensor.execute import fallback
from lazytensor.trace.ir import Op
from lazytensor.trace.shapes import clean

# Dispatch key of ltc -> the CPU's.
KEYS = {"SparsePrivateUse1": "SparseCPU", "SparseCsrPrivateUse1": "SparseCsrCPU"}

# Ops that look at the parts of a sparse tensor, or put one together, and never into the parts.
_STRUCTURE = frozenset(
    (
        "_values",
        "_indices",
        "values",
        "indices",
        "_nnz",
        "is_coalesced",
        "_coalesced_",
        "sparse_dim",
        "dense_dim",
        "_dimI",
        "_dimV",
        "crow_indices",
        "col_indices",
        "ccol_indices",
        "row_indices",
        "_sparse_coo_tensor_with_dims",
        "_sparse_coo_tensor_with_dims_and_tensors",
        "sparse_resize_",
        "sparse_resize_and_clear_",
        "copy_sparse_to_sparse_",
    )
)

# PyTorch has a composite kernel for these, which stands before a fallback of the dispatch key and cannot take sparse
# tensors.
_COMPOSITE = (
    *("_conj_physical", "_to_copy", "_to_dense", "abs", "abs_", "add.Tensor", "add_.Tensor", "addmm", "addmm_"),
    *("any", "asin", "asin_", "asinh", "asinh_", "atan", "atan_", "atanh", "atanh_", "bmm", "cat", "ccol_indices"),
    *("ceil", "ceil_", "clone", "col_indices", "conj_physical_", "copy_", "crow_indices", "deg2rad", "deg2rad_"),
    *("dense_dim", "div.Tensor", "div.Tensor_mode", "div_.Tensor", "div_.Tensor_mode", "empty_like", "erf", "erf_"),
    *("erfinv", "erfinv_", "expm1", "expm1_", "floor", "floor_", "frac", "frac_", "indices", "is_coalesced", "isinf"),
    *("isneginf", "isposinf", "log1p", "log1p_", "mm", "mul.Scalar", "mul.Tensor", "mul_.Scalar", "mul_.Tensor"),
    *("mv", "nan_to_num", "nan_to_num_", "narrow_copy", "neg", "neg_", "norm.ScalarOpt_dim"),
    *("norm.ScalarOpt_dim_dtype", "permute", "pow.Tensor_Scalar", "rad2deg", "rad2deg_", "round", "round_"),
    *("row_indices", "select.int", "select_copy.int", "sgn", "sgn_", "sign", "sign_", "signbit", "sin", "sin_"),
    *("sinh", "sinh_", "sparse_dim", "sqrt", "sqrt_", "sub.Tensor", "sub_.Tensor", "sum", "sum.dim_IntList", "tan"),
    *("tan_", "tanh", "tanh_", "threshold_backward", "trunc", "trunc_", "unsqueeze", "values"),
)


def register(library: Any) -> None:
    """Register the fallbacks with PyTorch."""
    everything = torch.library.Library("_", "IMPL")
    for key, cpu in KEYS.items():
        everything.fallback(functools.partial(_run, cpu), key)
        for name in _COMPOSITE:
            library.m.impl("aten::" + name, key, functools.partial(_run_named, cpu, name), False)
    _kept.append(everything)


_kept: list[Any] = []  # a library that dies takes its kernels with it


def _run_named(cpu: str, name: str, *args: Any, **kwargs: Any) -> Any:
    return _run(cpu, Op("aten::" + name).overload, *args, **kwargs)


def _run(cpu: str, overload: Any, *args: Any, **kwargs: Any) -> Any:
    """One op with a sparse ltc tensor among its arguments or as its result."""
    if overload._schema.name.partition("::")[2] in _STRUCTURE:
        keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, cpu))
        return overload.redispatch(keys, *args, **kwargs)
    noted = fallback.announce(overload.name(), "sparse tensors have no lazy form", [*args, *kwargs.values()])
    device = _device(args, kwargs)
    written: list[tuple[torch.Tensor, torch.Tensor]] = []
    names = [a.name for a in overload._schema.arguments]
    writes = {a.name for a in overload._schema.arguments if a.alias_info is not None and a.alias_info.is_write}

    def convert(argument: Any, write: bool) -> Any:
        if isinstance(argument, list | tuple):
            return [convert(a, write) for a in argument]
        if isinstance(argument, torch.device):
            return torch.device("cpu") if argument.type == "ltc" and not leaves else argument
        if not isinstance(argument, torch.Tensor) or argument.device.type != "ltc":
            return argument
        copy = to_cpu(argument)
        if argument.requires_grad and not write:  # some kernels keep what backward needs only if someone wants it
            copy = copy.detach().requires_grad_()
        if write:
            copy = copy.clone()
            written.append((argument, copy))
        return copy

    # A copy to a device says where its result belongs.
    leaves = kwargs.get("device") is not None and kwargs["device"].type != "ltc"
    with clean():
        positional = [convert(a, names[i] in writes) for i, a in enumerate(args)]
        keyword = {k: convert(a, k in writes) for k, a in kwargs.items()}
        result = overload(*positional, **keyword)
    noted.done(result)
    for original, copy in written:
        _write_back(original, copy)
    for original, copy in written:
        if result is copy:
            return original
    return result if leaves else _adopt(result, device)


def _device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    for argument in [*args, *kwargs.values()]:
        for each in argument if isinstance(argument, list | tuple) else [argument]:
            place = each.device if isinstance(each, torch.Tensor) else each
            if isinstance(place, torch.device) and place.type == "ltc":
                return place.index or 0
    return 0


def _adopt(result: Any, device: int) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_adopt(r, device) for r in result)
    if isinstance(result, torch.Tensor) and result.layout is not torch.strided:
        return to_ltc(result, device)
    return fallback.adopt(result, device)


def _write_back(original: torch.Tensor, copy: torch.Tensor) -> None:
    if original.layout is torch.strided:
        fallback.write_back(original, copy)
        return
    if original.layout is not torch.sparse_coo:
        if original._nnz() != copy._nnz():
            moved = to_ltc(copy, original.device.index)
            keys = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCsrCPU)
            torch.ops.aten.resize_as_sparse_.default.redispatch(keys, original, moved)
        parts = zip([*_indices(original), original.values()], [*_indices(copy), copy.values()], strict=True)
        for part, new in parts:
            fallback.write_back(part, new)
        return
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
    moved = to_ltc(copy, original.device.index)
    torch.ops.aten.copy_sparse_to_sparse_.default.redispatch(keys, original, moved, False)


def to_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """An ltc tensor of any layout as a CPU tensor."""
    if tensor.layout is torch.strided:
        return fallback.data_of(tensor, "a sparse op")
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                to_cpu(tensor._indices()),
                to_cpu(tensor._values()),
                tensor.shape,
                is_coalesced=tensor.is_coalesced(),
                check_invariants=False,
            )
        compressed, plain = _indices(tensor)
        return torch.sparse_compressed_tensor(
            to_cpu(compressed),
            to_cpu(plain),
            to_cpu(tensor.values()),
            tensor.shape,
            layout=tensor.layout,
            check_invariants=False,
        )


def to_ltc(tensor: torch.Tensor, device: int) -> torch.Tensor:
    """A sparse CPU tensor on ltc."""
    place = torch.device("ltc", device)
    with torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return torch.sparse_coo_tensor(
                fallback.adopt(tensor._indices(), device),
                fallback.adopt(tensor._values(), device),
                tensor.shape,
                is_coalesced=tensor.is_coalesced(),
                check_invariants=False,
                device=place,
            )
        compressed, plain = _indices(tensor)
        return torch.sparse_compressed_tensor(
            fallback.adopt(compressed, device),
            fallback.adopt(plain, device),
            fallback.adopt(tensor.values(), device),
            tensor.shape,
            layout=tensor.layout,
            check_invariants=False,
            device=place,
        )


def _indices(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return tensor.crow_indices(), tensor.col_indices()
    return tensor.ccol_indices(), tensor.row_indices()
