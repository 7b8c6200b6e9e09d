"""Settings (``torch._lazy.config``)."""

from __future__ import annotations

from collections.abc import Iterable

from lazytensor.trace import record

_reuse = True


def get_force_fallback() -> str:
    """The ops that are forced to run eagerly, separated by commas."""
    return ",".join(sorted(record.forced))


def set_force_fallback(configval: str | Iterable[str]) -> None:
    """Force ops to run eagerly: any number of names such as ``aten::sub``, in a list or separated by commas; "" for
    none.
    """
    names = configval.split(",") if isinstance(configval, str) else list(configval)
    wanted = [name.strip() for name in names if name.strip()]
    record.force_fallback([name if "::" in name else f"aten::{name}" for name in wanted])


def set_reuse_ir(val: bool) -> None:
    """Whether nodes are reused from step to step.  They always are: a node exists once.  Kept for scripts that ask."""
    global _reuse
    _reuse = bool(val)
