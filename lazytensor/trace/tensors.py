"""The empty shells: real ``torch.Tensor`` objects on ``ltc`` with true geometry and no memory.

PyTorch offers two ways in Python to make a tensor on PrivateUse1 without an allocator:
``torch._C._acc.create_empty_tensor`` (fast, contiguous, device 0 only) and a DLPack capsule (any device number).
Everything else is made from those by letting the C++ *Meta* kernels work on the shell: while the Meta key is included
in the thread's dispatch state, ``set_`` and ``as_strided`` change or alias geometry and touch no memory.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from lazytensor.trace.ir import Spec, Value

DEVICE = "ltc"

create = torch._C._acc.create_empty_tensor  # type: ignore[attr-defined]
# Made once and entered again and again, which is a third cheaper than a new one each time.  (Setting the key and
# clearing it by hand would be cheaper still, but clearing leaves the backend's bit behind.)
as_meta = torch._C._IncludeDispatchKeyGuard(torch._C.DispatchKey.Meta)  # type: ignore[attr-defined]
_below_autograd = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]
_set = torch.ops.aten.set_.source_Storage_storage_offset
_CPU = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)


def new(spec: Spec) -> torch.Tensor:
    """A shell over a storage of its own."""
    if spec.device == 0:
        tensor = create(spec.size, spec.dtype)
        if spec.plain:
            return tensor
    else:
        tensor = _on_device(spec.device, spec.dtype)
    return reshape(tensor, tensor.untyped_storage(), spec)


def reshape(tensor: torch.Tensor, storage: torch.UntypedStorage, spec: Spec) -> torch.Tensor:
    """Let the shell look at this storage with this geometry."""
    if spec.device > 0:
        # The Meta kernel refuses a storage that cannot grow, as those from DLPack; the CPU's asks only whether it is
        # large enough.
        return _set.redispatch(_CPU, tensor, storage, spec.offset, spec.size, spec.stride)  # type: ignore[no-any-return]
    with _below_autograd(), as_meta:
        return tensor.set_(storage, spec.offset, spec.size, spec.stride)  # type: ignore[call-overload,no-any-return]


def alias(tensor: torch.Tensor, value: Value) -> torch.Tensor:
    """A second shell over the same storage, with the geometry of a view's value."""
    spec = value.spec
    with as_meta:
        if spec.dtype is tensor.dtype:
            return tensor.as_strided(spec.size, spec.stride, spec.offset)
        extent = spec.offset + 1 + sum((n - 1) * s for n, s in zip(spec.size, spec.stride, strict=True) if n)
        elements = -(-extent * spec.dtype.itemsize // tensor.dtype.itemsize)
        flat = tensor.as_strided((elements,), (1,), 0)  # the one geometry that every change of dtype takes
        return flat.view(spec.dtype).as_strided(spec.size, spec.stride, spec.offset)


# --- a shell on another device number, by way of DLPack ---------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int), ("device_id", ctypes.c_int))


class _DataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (("dl_tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTENSION_DEVICE = 12  # kDLExtDev: PyTorch maps it to PrivateUse1
_templates: dict[int, Any] = {}  # never freed: PyTorch looks at the struct again when the storage dies
_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def _on_device(index: int, dtype: torch.dtype) -> torch.Tensor:
    template = _templates.get(index)
    if template is None:
        # A storage from DLPack cannot grow, and PyTorch checks geometry against its size: it is as large as can be.
        managed, shape, strides = _Managed(), (ctypes.c_int64 * 1)(1 << 62), (ctypes.c_int64 * 1)(1)
        managed.dl_tensor.device = _Device(_EXTENSION_DEVICE, index)
        managed.dl_tensor.ndim = 1
        managed.dl_tensor.dtype = _DataType(1, 8, 1)
        managed.dl_tensor.shape = shape
        managed.dl_tensor.strides = strides
        template = _templates[index] = (managed, shape, strides)
    capsule = _new_capsule(ctypes.addressof(template[0]), b"dltensor", None)
    tensor: torch.Tensor = torch._C._from_dlpack(capsule)  # type: ignore[attr-defined]
    if dtype is not torch.uint8:
        with _below_autograd(), as_meta:
            tensor = tensor.view(dtype)
    return tensor
