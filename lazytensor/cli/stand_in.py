"""Lets ltc stand in for another device in this process: a program written for CUDA or the CPU runs on ltc unchanged.

PyTorch's device objects stay what they are: ``torch.device("cuda")`` is a value that the program may compare and print.
What changes is what is done with it.  A function mode sees every call of a torch function and puts ``ltc`` where the
call names the replaced device; a handful of functions that are not torch functions are replaced for the time of the
program.

A program without ``lt.sync()`` would be one long graph from one read to the next, so there is a cut after every step of
an optimizer.

What a program can see: a tensor's ``device`` is ``ltc:0``, and so ``x.device == torch.device("cuda")`` is false;
``x.is_cuda`` is true.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from types import SimpleNamespace, TracebackType
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.overrides import TorchFunctionMode

import lazytensor as lt

DEVICE = "ltc"
_active: list[Device] = []


def _sees_as(replaced: str, device: Any) -> Any:
    """The device that a request is answered with."""
    if isinstance(device, str) and device.partition(":")[0] == replaced:
        return DEVICE
    if isinstance(device, torch.device) and device.type == replaced:
        return torch.device(DEVICE)
    return device


# Functions that make a tensor out of nothing or of Python data, on the default device.
_FACTORIES = frozenset(
    {
        torch.arange,
        torch.bartlett_window,
        torch.blackman_window,
        torch.empty,
        torch.empty_permuted,
        torch.empty_strided,
        torch.eye,
        torch.full,
        torch.hamming_window,
        torch.hann_window,
        torch.kaiser_window,
        torch.linspace,
        torch.logspace,
        torch.ones,
        torch.rand,
        torch.randint,
        torch.randn,
        torch.randperm,
        torch.range,
        torch.scalar_tensor,
        torch.tensor,
        torch.tril_indices,
        torch.triu_indices,
        torch.zeros,
        torch.as_tensor,
        torch.asarray,
        torch.normal,
    }
)
_STAYS = frozenset((torch.Tensor.cpu, torch.Tensor.__repr__, torch.Tensor.__format__))


class Device(TorchFunctionMode):
    """The function mode: puts ltc where a call names the replaced device."""

    def __init__(self, replaced: str) -> None:
        super().__init__()
        self.replaced = replaced
        self.on = True

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Answer one call."""
        kwargs = kwargs or {}
        if not self.on or func in _STAYS:
            return func(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0].to(DEVICE)
        args = tuple([_sees_as(self.replaced, a) if type(a) in (str, torch.device) else a for a in args])
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _sees_as(self.replaced, kwargs["device"])}
        if self.replaced == "cpu":
            return self._on_cpu(func, args, kwargs)
        return func(*args, **kwargs)

    def _on_cpu(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The program knows one device only: what it makes is made on ltc, and data from elsewhere follows."""
        if func in _FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": DEVICE}
        if func is torch.Tensor.numpy or func is torch.Tensor.__array__:
            return func(args[0].cpu(), *args[1:], **kwargs)
        found = {t.device.type for t in _tensors(args) if t.dim()} | {t.device.type for t in _tensors(kwargs.values())}
        if found == {"cpu", DEVICE}:
            writes = func.__name__.endswith("_") or func is torch.Tensor.__setitem__
            target = args[0].device if writes and isinstance(args[0], torch.Tensor) else torch.device(DEVICE)
            args = _moved(args, target)
            kwargs = {k: _moved(v, target) for k, v in kwargs.items()}
        return func(*args, **kwargs)


def _tensors(args: Any) -> list[torch.Tensor]:
    found = []
    for argument in args:
        if isinstance(argument, torch.Tensor):
            found.append(argument)
        elif isinstance(argument, list | tuple):
            found += _tensors(argument)
    return found


def _moved(argument: Any, target: torch.device) -> Any:
    if isinstance(argument, torch.Tensor):
        return argument.to(target) if argument.dim() and argument.device.type != target.type else argument
    if type(argument) in (list, tuple):
        return type(argument)(_moved(a, target) for a in argument)
    return argument


class Event:
    """A CUDA event: a moment, at which everything recorded before has run."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.at = 0.0

    def record(self, stream: Any = None) -> None:
        """Take the time."""
        lt.sync(wait=True)
        self.at = time.perf_counter()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from here to there."""
        return (end.at - self.at) * 1e3

    def synchronize(self) -> None:
        """It has happened already."""

    def wait(self, stream: Any = None) -> None:
        """It has happened already."""

    def query(self) -> bool:
        """It has happened already."""
        return True


def _cuda_functions() -> dict[str, Any]:
    """What ``torch.cuda`` answers while ltc stands in for it: one device, no streams, memory not counted."""

    properties = SimpleNamespace(
        name="ltc", major=8, minor=0, total_memory=_memory(), multi_processor_count=os.cpu_count() or 1
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_name": "ltc",
        "get_device_properties": properties,
        "get_device_capability": (8, 0),
        "is_bf16_supported": True,
        "memory_allocated": 0,
        "max_memory_allocated": 0,
        "memory_reserved": 0,
        "max_memory_reserved": 0,
        "mem_get_info": (_memory(), _memory()),
        "memory_summary": "",
    }
    functions: dict[str, Any] = {name: _answer(value) for name, value in answers.items()}
    for name in ("init", "_lazy_init", "set_device", "empty_cache", "reset_peak_memory_stats"):
        functions[name] = _answer(None)
    for name in ("manual_seed", "manual_seed_all"):
        functions[name] = _seed()
    for name in ("device", "stream"):
        functions[name] = _context()
    return functions | {
        "synchronize": lambda device=None: lt.sync(wait=True),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "Event": Event,
    }


# Each of these makes a new function: torch._dynamo, which every optimizer imports, keeps a table of PyTorch's functions
# by identity and fails with "Duplicate torch object" if one function has two names.


def _answer(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _context() -> Callable[..., Any]:
    return lambda *args, **kwargs: contextlib.nullcontext()


def _seed() -> Callable[[int], Any]:
    return lambda seed: torch.default_generator.manual_seed(seed)


def _memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class StandIn:
    """``with StandIn("cuda"):`` — in the block, what is asked of the device ``cuda`` (or ``cpu``) is done on ltc."""

    def __init__(self, replaced: str) -> None:
        self.replaced = replaced
        self.mode = Device(replaced)
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> StandIn:
        replaced = self.replaced

        def seen(function: Any, position: int, keyword: str, default: Any = None) -> Any:
            """The function, with ltc where its device argument names the replaced device."""

            def call(*args: Any, **kwargs: Any) -> Any:
                args_ = list(args)
                if len(args_) > position:
                    args_[position] = _sees_as(replaced, args_[position])
                elif keyword in kwargs or default is not None:
                    kwargs[keyword] = _sees_as(replaced, kwargs.get(keyword, default))
                return function(*args_, **kwargs)

            return call

        if replaced == "cuda":
            for name, function in _cuda_functions().items():
                self._set(torch.cuda, name, function)
            self._set(torch.Tensor, "is_cuda", property(lambda tensor: tensor.device.type == DEVICE))
            self._set(torch, "compile", _compile)
            self._set(torch, "Generator", type("Generator", (torch.Generator,), {"__new__": _generator}))
            self._set(torch.backends.cuda, "is_built", _answer(True))
        self._set(torch, "set_default_device", seen(torch.set_default_device, 0, "device"))
        self._set(torch, "load", seen(torch.load, 1, "map_location", _restore if replaced == "cuda" else None))
        self._set(torch.autocast, "__init__", seen(torch.autocast.__init__, 1, "device_type"))
        self._set(torch.amp.GradScaler, "__init__", seen(torch.amp.GradScaler.__init__, 1, "device", replaced))
        hook = register_optimizer_step_post_hook(_cut_after_step)
        self._undo.callback(hook.remove)
        _active.append(self.mode)
        self._undo.callback(_active.remove, self.mode)
        self._undo.enter_context(self.mode)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.close()

    def _set(self, holder: Any, name: str, value: Any) -> None:
        if name in vars(holder):
            self._undo.callback(setattr, holder, name, vars(holder)[name])
        else:  # inherited
            self._undo.callback(delattr, holder, name)
        setattr(holder, name, value)


def _generator(cls: Any, device: Any = "cpu") -> torch.Generator:
    """Random ops draw on the CPU, whatever the device."""
    return torch._C.Generator.__new__(torch._C.Generator, "cpu")  # type: ignore[call-arg]


def _restore(storage: Any, location: str) -> Any:
    """For ``torch.load``: what was saved from CUDA is loaded as CPU data, which ``.to(device)`` brings to ltc."""
    return storage


def _compile(model: Any = None, **options: Any) -> Any:
    """``torch.compile``: ltc compiles whole steps already, so the program keeps what it had."""
    return model if model is not None else lambda given: given


def _cut_after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The program has no ``lt.sync()``: an optimizer's step ends a graph, so that each turn of its loop is the same."""
    if all(mode.on for mode in _active):
        lt.sync()


def _leave_child() -> None:
    """A forked child, a worker of a DataLoader, prepares data on the CPU."""
    for mode in _active:
        mode.on = False


os.register_at_fork(after_in_child=_leave_child)
