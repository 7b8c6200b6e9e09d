"""Every change that lazytensor makes to PyTorch's own Python objects, in one place, each with the symptom it mends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch as _torch

from lazytensor.device import serialization
from lazytensor.trace import record
from lazytensor.trace.tensors import DEVICE

torch: Any = _torch  # what is patched here is more than PyTorch's type stubs know of
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
    read_storages_from_the_cpu()
    make_and_clone_storages()
    share_loaded_storages()
    write_data_for_tensors()
    print_from_the_cpu()
    answer_for_the_accelerator()
    let_generators_be_of_ltc()
    forget_casts_with_autocast()
    refuse_dlpack()
    pin_on_the_host()
    record_what_was_compiled()
    chunk_cross_entropy_as_the_cpu()


def forget_shortcut_on_data_assignment() -> None:
    """``x.data = y`` swaps what x looks at in C++ and tells nobody.

    Symptom: after ``p.data = p.data.half()`` operations on p still used its old value, since the ``_lt`` attribute of
    the Python object had stayed.
    """
    descriptor = torch._C.TensorBase.data
    assign = descriptor.__set__

    def set_data(tensor: _torch.Tensor, new: _torch.Tensor) -> None:
        assign(tensor, new)
        tensor.__dict__.pop("_lt", None)

    torch.Tensor.data = property(descriptor.__get__, set_data, doc=descriptor.__doc__)


def ask_cpp_for_states(state_in_cpp: Callable[[_torch.UntypedStorage], Any]) -> None:
    """The compiled recorder makes tensors without their ``_lt`` attributes, which Python finds when it looks for them.

    Symptom: "'UntypedStorage' object has no attribute '_lt'" from a Python kernel; a tensor's own is but a shortcut.
    """

    def find(self: _torch.UntypedStorage, name: str) -> Any:
        if name == "_lt":
            found = state_in_cpp(self)
            if found is not None:
                self._lt = found  # type: ignore[attr-defined]
                return found
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    torch.UntypedStorage.__getattr__ = find


def forget_nodes_on_default_dtype() -> None:
    """``torch.set_default_dtype`` changes what ``int_tensor / 2`` gives.

    Symptom: after the call the interned node for the same operation still had the old dtype.
    """
    original = torch.set_default_dtype

    def set_default_dtype(d: _torch.dtype, /) -> None:
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
    graph: Any = torch.autograd.graph

    original = graph._engine_run_backward

    def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if torch._C._is_multithreading_enabled():
            with torch.autograd.set_multithreading_enabled(False):
                return original(t_outputs, *args, **kwargs)
        return original(t_outputs, *args, **kwargs)

    graph._engine_run_backward = run_backward
    torch.autograd._engine_run_backward = run_backward
    torch.autograd.set_multithreading_enabled(False)


def begin_the_engine_without_threads() -> None:
    """The autograd engine starts a thread for each device that there is in its first backward, and waits for it.

    Symptom: a first step waited 1 to 4 ms for a thread that never gets work (see above), where the loops of its forward
    pass were using all cores; and a child forked after a backward pass had none, not even on the CPU: "Unable to handle
    autograd's threading in combination with fork-based multiprocessing".  So the engine begins before there is an
    ``ltc`` to count.  Where PyTorch has another accelerator it needs its threads, and to count them would start it.
    """
    if torch.accelerator.current_accelerator(check_available=False) is None:
        torch.ones((), requires_grad=True).backward()


def keep_parameters_on_conversion() -> None:
    """``module.to("ltc")`` makes new Parameter objects, where ``module.to("cuda")`` keeps the old ones.

    Symptom: tied weights came apart, and an optimizer made before ``.to()`` went on updating the CPU's parameters.
    PyTorch keeps the objects only between devices on a list in C++.  Here the old objects are given the new contents
    afterwards.
    """
    module_type = torch.nn.Module
    original = module_type._apply
    inside = False

    def apply(self: _torch.nn.Module, fn: Any, recurse: bool = True) -> _torch.nn.Module:
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

    module_type._apply = apply


def _give_contents_back(before: list[tuple[_torch.nn.Module, str, _torch.nn.Parameter]]) -> None:
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

    Symptom: ``x.untyped_storage().nbytes()`` was 0, and a copy made with that size failed: "The size of tensor a (0)
    must match the size of tensor b (24)".
    """
    known = torch._C.StorageBase.nbytes

    def nbytes(self: _torch.UntypedStorage) -> int:
        return serialization.nbytes(self) if hasattr(self, "_lt") else known(self)

    for name in ("nbytes", "size", "__len__"):
        setattr(torch.UntypedStorage, name, nbytes)


def read_storages_from_the_cpu() -> None:
    """C++ reads and fills a storage through its memory.

    Symptom: ``x.untyped_storage().cpu()``: "size does not match, self was 12 bytes but src was 0 bytes";
    ``pickle.loads``, which fills a storage from a file: "storage has wrong byte size: expected 24 got 0"; printing a
    storage: "index 0 out of range for storage of size 0".
    """
    kind = torch.UntypedStorage
    cpu, fill, item, copy = kind.cpu, kind._set_from_file, kind.__getitem__, kind.copy_

    def to_cpu(self: _torch.UntypedStorage) -> _torch.UntypedStorage:
        return serialization.to_cpu(self) if hasattr(self, "_lt") else cpu(self)

    def set_from_file(self: _torch.UntypedStorage, *args: Any) -> Any:
        if not hasattr(self, "_lt"):
            return fill(self, *args)
        memory = torch.UntypedStorage(self.nbytes())
        fill(memory, *args)
        serialization.fill(self, memory)
        return self

    def getitem(self: _torch.UntypedStorage, index: Any) -> Any:
        return item(to_cpu(self) if hasattr(self, "_lt") else self, index)

    def copy_storage(self: _torch.UntypedStorage, source: Any, non_blocking: bool = False) -> _torch.UntypedStorage:
        if not hasattr(self, "_lt"):
            return copy(self, to_cpu(source) if hasattr(source, "_lt") else source, non_blocking)  # type: ignore[no-any-return]
        serialization.fill(self, copy(torch.UntypedStorage(self.nbytes()), source.cpu(), non_blocking))
        return self

    kind.cpu = to_cpu
    kind.copy_ = copy_storage
    kind._set_from_file = set_from_file
    kind.__getitem__ = getitem


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

    def clone_storage(self: _torch.UntypedStorage) -> _torch.UntypedStorage:
        return serialization.clone(self) if hasattr(self, "_lt") else clone(self)

    torch.UntypedStorage.__new__ = new
    torch.UntypedStorage.clone = clone_storage


def share_loaded_storages() -> None:
    """``torch.load`` keeps a storage for the next tensor that shares it only if the storage's address is not 0.

    Symptom: a tensor and its view came back from a file as two tensors that had nothing to do with each other.
    """
    original = torch.TypedStorage._data_ptr

    def data_ptr(self: Any) -> int:
        state = getattr(self._untyped_storage, "_lt", None)
        return original(self) if state is None else id(state)

    torch.TypedStorage._data_ptr = data_ptr


def write_data_for_tensors() -> None:
    """Pickling reads a tensor's bytes through its storage, and an ltc storage has none.

    Symptom: ``torch.save(x)``: "Attempted to access the data pointer on an invalid python storage".
    """
    original = torch.Tensor._reduce_ex_internal

    def reduce_ex(self: _torch.Tensor, proto: Any) -> Any:
        if self.device.type == DEVICE and self.layout is torch.strided:
            return original(serialization.stand_in(self), proto)
        return original(self, proto)

    torch.Tensor._reduce_ex_internal = reduce_ex


def print_from_the_cpu() -> None:
    """Formatting a tensor selects its finite and non-zero elements, looks for the largest, and reads numbers one by
    one.

    Symptom: ``print(x)`` compiled five graphs and fell back for ``masked_select``.  The CPU formats a copy.
    """
    module: Any = torch._tensor_str

    original = module._tensor_str

    def tensor_str(self: _torch.Tensor, indent: int) -> str:
        return original(self.cpu() if self.device.type == DEVICE else self, indent)  # type: ignore[no-any-return]

    module._tensor_str = tensor_str


def answer_for_the_accelerator() -> None:
    """``torch.accelerator`` asks the device's C++ guard and allocator, and a Python device can give it neither.

    Symptoms: ``torch.accelerator.synchronize()``: "Backend doesn't support synchronizing all streams on device";
    ``torch.accelerator.memory_allocated()``: "Allocator for ltc is not a DeviceAllocator" (an internal assertion);
    ``set_device_index(1)`` did nothing; ``get_device_capability()``: "Backend doesn't support getting device
    capabilities".
    """
    from lazytensor.device.module import DeviceModule as module

    def stats(index: int) -> dict[str, Any]:
        figures = {k.removesuffix(".all.current"): v for k, v in module.memory_stats(index).items() if "current" in k}
        most = module.max_memory_allocated(index)
        return {kind: {"all": {"current": now, "peak": most}} for kind, now in figures.items()}

    def exchange(index: int) -> int:
        before = module.current_device()
        module.set_device(index)
        return before

    answers = {
        "synchronizeDevice": module.synchronize,
        "getDeviceIndex": module.current_device,
        "setDeviceIndex": module.set_device,
        "exchangeDevice": exchange,
        "maybeExchangeDevice": exchange,
        "isAllocatorInitialized": module.is_initialized,
        "getDeviceStats": stats,
        "resetPeakStats": module.reset_peak_memory_stats,
        "resetAccumulatedStats": lambda index: None,
        "getMemoryInfo": module.mem_get_info,
        "emptyCache": module.empty_cache,
        "emptyHostCache": module.empty_cache,
        "getDeviceCapability": module.get_device_capability,
    }
    for name, answer in answers.items():
        setattr(torch._C, "_accelerator_" + name, answer)


def let_generators_be_of_ltc() -> None:
    """A generator for an out-of-tree device is made in C++ only.

    Symptom: ``torch.Generator(device="ltc")``: "You should register `PrivateUse1HooksInterface` … and implement
    `getNewGenerator` at the same time for PrivateUse1."
    """
    from lazytensor.device.generator import Generator

    torch.Generator = Generator


def forget_casts_with_autocast() -> None:
    """The end of the outermost ``torch.autocast`` clears a cache in C++ and tells nobody.

    Symptom: the next step used the low-precision copies of the weights from the step before.
    """
    original = torch.clear_autocast_cache

    def clear_autocast_cache() -> None:
        from lazytensor.device import autocast

        original()
        autocast.forget_copies()

    torch.clear_autocast_cache = clear_autocast_cache


def refuse_dlpack() -> None:
    """PyTorch packs an ltc tensor as one of an unknown device whose memory is at address 0.

    Symptom: ``x.__dlpack__()`` gave a capsule that ended the process of whoever read it.
    """
    module: Any = torch.utils.dlpack

    method, function = torch.Tensor.__dlpack__, module.to_dlpack

    def refuse(tensor: _torch.Tensor) -> None:
        if tensor.device.type == DEVICE:
            raise BufferError(
                f"can't export {tensor.device} device type tensor through DLPack. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )

    def dlpack(self: _torch.Tensor, **kwargs: Any) -> Any:
        refuse(self)
        return method(self, **kwargs)

    def to_dlpack(tensor: _torch.Tensor) -> Any:
        refuse(tensor)
        return function(tensor)

    torch.Tensor.__dlpack__ = dlpack
    module.to_dlpack = torch.to_dlpack = to_dlpack


def pin_on_the_host() -> None:
    """Pinning asks the accelerator's C++ hooks for an allocator of pinned memory.

    Symptom: ``DataLoader(pin_memory=True)``: "You should register `PrivateUse1HooksInterface` … and implement
    `getPinnedMemoryAllocator`".  The device's memory is the host's, so that every page of it is as good as pinned.
    """
    pin, pinned = torch.Tensor.pin_memory, torch.Tensor.is_pinned
    mark = "_ltc_pinned"

    def is_ours(tensor: _torch.Tensor) -> bool:
        return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_nested

    def pin_memory(self: _torch.Tensor, device: Any = None) -> _torch.Tensor:
        if not is_ours(self):
            return pin(self)  # type: ignore[no-any-return]
        if is_pinned(self):
            return self
        copy = self.detach().clone()
        setattr(copy.untyped_storage(), mark, True)
        return copy

    def is_pinned(self: _torch.Tensor, device: Any = None) -> bool:
        return hasattr(self.untyped_storage(), mark) if is_ours(self) else pinned(self)

    torch.Tensor.pin_memory = pin_memory
    torch.Tensor.is_pinned = is_pinned


def record_what_was_compiled() -> None:
    """Inductor has no code generator for ltc.

    Symptom: ``torch.compile(f)(x)``: "InductorError: KeyError: 'ltc'".  What Dynamo captured runs op by op on ltc
    instead, which records it: the cut compiles it together with everything around it.
    """
    wrapper = torch._TorchCompileInductorWrapper
    original = wrapper.__call__

    def call(self: Any, model_: Any, inputs_: Any) -> Any:
        if any(isinstance(i, torch.Tensor) and i.device.type == DEVICE for i in inputs_):
            return model_
        return original(self, model_, inputs_)

    wrapper.__call__ = call


def chunk_cross_entropy_as_the_cpu() -> None:
    """``F.linear_cross_entropy`` looks up by the name of the device in which dtype it adds up, and does not know ltc.

    Symptom: in bfloat16 the chunked loss differed from CPU eager's.
    """
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions

    original: Any = LinearCrossEntropyOptions._adjust

    def adjust(self: Any, num_batches: Any, in_features: Any, num_classes: Any, dtype: Any, device: Any = None) -> Any:
        if device is not None and device.type == DEVICE:
            device = _torch.device("cpu")
        return original(self, num_batches, in_features, num_classes, dtype, device)

    LinearCrossEntropyOptions._adjust = adjust
