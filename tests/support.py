"""Runs one program on the CPU and on ltc and compares everything that a user could see of it.

A *program* is a function of a device.  Whatever tensors, numbers and strings its local variables hold when it returns
or raises are compared: values bit for bit, geometry, dtype, autograd's flags and version counters, which of them share
a storage, the error if there was one, and its warnings.  :func:`same` is what tests call.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch

import lazytensor as lt

Program = Callable[[str], Any]


@dataclass
class Seen:
    """What one run of a program left behind."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    warnings: list[str] = field(default_factory=list)


def run(program: Program, device: str, seed: int = 0) -> Seen:
    """Run a program from a known seed and keep its local variables."""
    seen = Seen()
    code = program.__code__  # type: ignore[attr-defined]
    kept: dict[str, Any] = {}

    def watch(frame: FrameType, event: str, _arg: Any) -> None:
        if event == "return" and frame.f_code is code:
            kept.update(frame.f_locals)

    torch.manual_seed(seed)
    before = sys.getprofile()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sys.setprofile(watch)
        try:
            kept["returned"] = program(device)
        except Exception as error:
            seen.error = error.with_traceback(None)
        finally:
            sys.setprofile(before)
    seen.warnings = [str(w.message).split("(Triggered")[0].strip() for w in caught]
    for name, value in _opened("", kept):
        if isinstance(value, torch.Tensor):
            seen.tensors[name] = value
        elif isinstance(value, bool | int | float | complex | str | torch.Size | torch.dtype | type(None)):
            seen.plain[name] = value
    seen.plain = {k: v for k, v in seen.plain.items() if not (isinstance(v, str) and v == device)}
    return seen


def _opened(prefix: str, values: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(values, torch.nn.Module):
        yield from _opened(prefix, dict(values.state_dict(keep_vars=True)))
    elif isinstance(values, dict):
        for name, value in values.items():
            yield from _opened(f"{prefix}.{name}" if prefix else str(name), value)
    elif isinstance(values, list | tuple) and not isinstance(values, torch.Size):
        for i, value in enumerate(values):
            yield from _opened(f"{prefix}[{i}]", value)
    else:
        yield prefix, values
        if isinstance(values, torch.Tensor) and values.is_leaf and values.grad is not None:
            yield prefix + ".grad", values.grad


def bits(tensor: torch.Tensor) -> bytes:
    """The elements in row-major order as bytes: tells -0.0 from 0.0 and compares nan with nan."""
    with torch.no_grad():
        host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        return bytes(host.reshape(-1).view(torch.uint8).tolist()) if host.numel() else b""


def look(tensor: torch.Tensor) -> dict[str, Any]:
    """Everything about a tensor that must be as in eager, its value excepted."""
    facts: dict[str, Any] = {
        "shape": tuple(tensor.shape),
        "stride": tensor.stride(),
        "offset": tensor.storage_offset(),
        "dtype": tensor.dtype,
        "layout": tensor.layout,
        "requires_grad": tensor.requires_grad,
        "is_leaf": tensor.is_leaf,
        "is_contiguous": tensor.is_contiguous(),
        "is_view": tensor._is_view(),
        "is_conj": tensor.is_conj(),
        "is_neg": tensor.is_neg(),
        "inference": tensor.is_inference(),
    }
    if not tensor.is_inference():
        facts["version"] = tensor._version
    return facts


def sharing(tensors: dict[str, torch.Tensor]) -> list[list[str]]:
    """The names of the tensors grouped by the storage they look at."""
    groups: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        groups.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    return sorted(groups.values())


def differences(eager: Seen, lazy: Seen, close: float | None = None, versions: bool = True) -> list[str]:
    """Every way in which two runs differ, in words."""
    found = []
    if (eager.error is None) != (lazy.error is None) or type(eager.error) is not type(lazy.error):
        return [f"error: eager {eager.error!r}, lazy {lazy.error!r}"]
    if eager.error is not None and str(eager.error) != _text(lazy.error):
        found.append(f"error text: eager {str(eager.error)!r}, lazy {_text(lazy.error)!r}")
    if eager.warnings != lazy.warnings:
        found.append(f"warnings: eager {eager.warnings}, lazy {lazy.warnings}")
    if eager.tensors.keys() != lazy.tensors.keys():
        found.append(f"tensors: eager {sorted(eager.tensors)}, lazy {sorted(lazy.tensors)}")
        return found
    # Geometry first: reading a value must not be what made it right.
    looks = {name: (look(eager.tensors[name]), look(lazy.tensors[name])) for name in eager.tensors}
    for name, (expected, got) in looks.items():
        # How often autograd's engine adds to a gradient in place depends on who holds its storage.
        if not versions or name.endswith(".grad"):
            got["version"] = expected.get("version")
        found += [
            f"{name}.{fact}: eager {value}, lazy {got.get(fact)}"
            for fact, value in expected.items()
            if got.get(fact) != value
        ]
    if sharing(eager.tensors) != sharing(lazy.tensors):
        found.append(f"storages: eager {sharing(eager.tensors)}, lazy {sharing(lazy.tensors)}")
    for name, expected in eager.tensors.items():
        got = lazy.tensors[name]
        if expected.shape != got.shape or expected.dtype != got.dtype:
            continue
        if close is not None and expected.is_floating_point():
            equal = torch.allclose(expected.detach(), got.detach().cpu(), rtol=close, atol=close, equal_nan=True)
        else:
            equal = bits(expected) == bits(got)
        if not equal:
            found.append(f"{name}: eager {expected.detach()}, lazy {got.detach().cpu()}")
    for name, value in eager.plain.items():
        got = lazy.plain.get(name)
        if type(value) is not type(got) or repr(value) != repr(got):
            found.append(f"{name}: eager {value!r}, lazy {got!r}")
    return found


def _text(error: BaseException | None) -> str:
    """An error's message with the device's name taken out of it."""
    return re.sub(r"ltc(\w+)Type", r"torch.\1Tensor", str(error))


def same(
    program: Program, *, close: float | None = None, twice: bool = True, versions: bool = True
) -> tuple[Seen, Seen]:
    """Assert that a program does on ltc exactly what it does on the CPU.

    By default it runs twice on ltc: recording it for the first time and finding it in the tables are two code paths.
    ``close`` is the tolerance where the CPU's own kernel may differ from itself; ``versions=False`` leaves version
    counters out, for programs that move a module made on the CPU, where only eager has nothing to move.
    """
    eager = run(program, "cpu")
    lazy = run(program, "ltc")
    _demand(differences(eager, lazy, close, versions), "the first run")
    if twice:
        lt.sync()
        again = run(program, "ltc")
        _demand(differences(eager, again, close, versions), "the second run, when every structure was known")
    return eager, lazy


def _demand(found: list[str], which: str) -> None:
    if found:
        raise AssertionError("\n".join([f"{which} differs from eager:", *found]))


class Programs(dict[str, Callable[[str], Any]]):
    """A table of programs by name, each of which does on a device what it does on the CPU: used as a decorator."""

    def __call__(self, program: Callable[[str], Any]) -> Callable[[str], Any]:
        self[program.__name__] = program
        return program


def numbers(device: str, *size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The first numbers, of this shape."""
    return torch.arange(torch.Size(size).numel(), dtype=dtype, device=device).reshape(size)


def subprocess_run(code: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, in which nothing of this one is."""
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1", **env},
        check=False,
    )
