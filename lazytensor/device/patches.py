"""Every change that lazytensor makes to PyTorch's own Python objects, in one place, each with the symptom it mends."""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.device import serialization
from lazytensor.trace import record
from lazytensor.trace.tensors import DEVICE

_done = False


def apply() -> None:
    """Apply every patch, once."""
    global _done
    if _done:
        return
    _done = True
    forget_shortcut_on_data_assignment()
    forget_nodes_on_default_dtype()
    leave_state_out_of_pickles()
    backward_on_callers_thread()
    keep_parameters_on_conversion()
    give_storages_their_size()
    make_and_clone_storages()
    share_loaded_storages()
    write_data_for_tensors()
    print_from_the_cpu()


def forget_shortcut_on_data_assignment() -> None:
    """``x.data = y`` swaps what x looks at in C++ and tells nobody.

    Symptom: after ``p.data = p.data.half()`` operations on p still used its old value, since the ``_lt`` attribute of the
    Python object had stayed.
    """
    descriptor = torch._C.TensorBase.data  # type: ignore[attr-defined]
    assign = descriptor.__set__

    def set_data(tensor: torch.Tensor, new: torch.Tensor) -> None:
        assign(tensor, new)
        tensor.__dict__.pop("_lt", None)

    torch.Tensor.data = property(descriptor.__get__, set_data, doc=descriptor.__doc__)  # type: ignore[assignment,misc]


def forget_nodes_on_default_dtype() -> None:
    """``torch.set_default_dtype`` changes what ``int_tensor / 2`` gives.

    Symptom: after the call the interned node for the same operation still had the old dtype.
    """
    original = torch.set_default_dtype

    def set_default_dtype(d: torch.dtype, /) -> None:
        original(d)
        record.drop_nodes(set())

    set_default_dtype.__doc__ = original.__doc__
    torch.set_default_dtype = set_default_dtype


def leave_state_out_of_pickles() -> None:
    """A tensor's ``__dict__`` is pickled with it, and the ``_lt`` attribute lives there.

    Symptom: ``torch.save(parameter)`` wrote a reference to lazytensor's own classes, which ``torch.load`` refuses.
    """
    original = torch._utils._get_obj_state

    def get_obj_state(obj: Any) -> Any:
        state = original(obj)
        if isinstance(state, dict) and "_lt" in state:
            state = {k: v for k, v in state.items() if k != "_lt"}
        return state

    torch._utils._get_obj_state = get_obj_state


def backward_on_callers_thread() -> None:
    """The autograd engine runs the backward of an out-of-tree device on a thread of its own.

    Symptom: a process that had run ``backward()`` sometimes aborted at exit ("terminate called without an active
    exception"), and the user's frames were missing in backward.  The engine's switch is per thread, so it is set
    around each backward that starts on a thread where it is still on.
    """
    import torch.autograd.graph as graph

    original = graph._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_multithreading_enabled():
            with torch.autograd.set_multithreading_enabled(False):
                return original(t_outputs, *args, **kwargs)
        return original(t_outputs, *args, **kwargs)

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward  # type: ignore[attr-defined]
    torch.autograd.set_multithreading_enabled(False)


def keep_parameters_on_conversion() -> None:
    """``module.to("ltc")`` makes new Parameter objects, where ``module.to("cuda")`` keeps the old ones.

    Symptom: tied weights came apart, and an optimizer made before ``.to()`` went on updating the CPU's parameters.  PyTorch
    keeps the objects only between devices on a list in C++.  Here the old objects are given the new contents afterwards.
    """
    module_type = torch.nn.Module
    original = module_type._apply
    inside = False

    def apply(self: torch.nn.Module, fn: Any, recurse: bool = True) -> torch.nn.Module:
        nonlocal inside
        if inside:
            return original(self, fn, recurse)  # type: ignore[no-any-return]
        modules = list(self.modules()) if recurse else [self]
        before = [(m, name, p) for m in modules for name, p in m._parameters.items() if p is not None]
        inside = True
        try:
            result = original(self, fn, recurse)
        finally:
            inside = False
        _give_contents_back(before)
        return result  # type: ignore[no-any-return]

    module_type._apply = apply  # type: ignore[method-assign]


def _give_contents_back(before: list[tuple[torch.nn.Module, str, torch.nn.Parameter]]) -> None:
    swapped: set[int] = set()
    for module, name, old in before:
        new = module._parameters[name]
        if new is None or new is old:
            continue
        if id(old) not in swapped:
            if new.device.type != "ltc" and old.device.type != "ltc":
                continue
            try:
                torch.utils.swap_tensors(old, new)
            except RuntimeError:  # something in C++ holds the old parameter: a graph that was not freed
                continue
            swapped.add(id(old))
        module._parameters[name] = old


def give_storages_their_size() -> None:
    """A storage of ltc has no memory, so C++ says that it has none.

    Symptom: ``x.untyped_storage().nbytes()`` was 0, and a copy made with that size failed: "The size of tensor a (0) must match
    the size of tensor b (24)".
    """
    known = torch._C.StorageBase.nbytes

    def nbytes(self: torch.UntypedStorage) -> int:
        return serialization.nbytes(self) if hasattr(self, "_lt") else known(self)  # type: ignore[arg-type]

    for name in ("nbytes", "size", "__len__"):
        setattr(torch.UntypedStorage, name, nbytes)


def make_and_clone_storages() -> None:
    """C++ makes a storage by asking the device's allocator, and ltc has none.

    Symptom: ``torch.UntypedStorage(4, device="ltc")`` ended the process with a segmentation fault, and so did
    ``copy.deepcopy(tensor)``, which clones the storage that way.
    """
    make, clone = torch.UntypedStorage.__new__, torch.UntypedStorage.clone

    def new(cls: Any, *args: Any, device: Any = None, **kwargs: Any) -> Any:
        if device is not None and torch.device(device).type == DEVICE:
            contents = args[0] if args else 0
            if isinstance(contents, int):
                return serialization.empty(contents, torch.device(device))
            return serialization.from_bytes(make(cls, *args, **kwargs), torch.device(device).index or 0)
        return make(cls, *args, **kwargs) if device is None else make(cls, *args, device=device, **kwargs)

    def clone_storage(self: torch.UntypedStorage) -> torch.UntypedStorage:
        return serialization.clone(self) if hasattr(self, "_lt") else clone(self)

    torch.UntypedStorage.__new__ = new  # type: ignore[method-assign,assignment]
    torch.UntypedStorage.clone = clone_storage  # type: ignore[method-assign]


def share_loaded_storages() -> None:
    """``torch.load`` keeps a storage for the next tensor that shares it only if the storage's address is not 0.

    Symptom: a tensor and its view came back from a file as two tensors that had nothing to do with each other.
    """
    original = torch.TypedStorage._data_ptr

    def data_ptr(self: Any) -> int:
        state = getattr(self._untyped_storage, "_lt", None)
        return original(self) if state is None else id(state)  # type: ignore[no-any-return]

    torch.TypedStorage._data_ptr = data_ptr


def write_data_for_tensors() -> None:
    """Pickling reads a tensor's bytes through its storage, and an ltc storage has none.

    Symptom: ``torch.save(x)``: "Attempted to access the data pointer on an invalid python storage".
    """
    original = torch.Tensor._reduce_ex_internal

    def reduce_ex(self: torch.Tensor, proto: Any) -> Any:
        if self.device.type == DEVICE and self.layout is torch.strided:
            return original(serialization.stand_in(self), proto)
        return original(self, proto)

    torch.Tensor._reduce_ex_internal = reduce_ex


def print_from_the_cpu() -> None:
    """Formatting a tensor selects its finite and non-zero elements, looks for the largest, and reads numbers one by one.

    Symptom: ``print(x)`` compiled five graphs and fell back for ``masked_select``.  The CPU formats a copy.
    """
    from torch import _tensor_str as module

    original = module._tensor_str

    def tensor_str(self: torch.Tensor, indent: int) -> str:
        return original(self.cpu() if self.device.type == DEVICE else self, indent)  # type: ignore[no-any-return]

    module._tensor_str = tensor_str
