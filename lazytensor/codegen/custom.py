"""Custom ops: an op of a user's `torch.library` becomes lazy.

With a fake (meta) kernel, which is its shape rule, the op is recorded like any other, and backends call the user's CPU
kernel when the graph runs.  Without one it falls back, and the log says why.  Autograd is untouched: what
`torch.library.register_autograd` registered runs above, and its backward is recorded too.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from typing import Any

import torch

from lazytensor.codegen.generic import GenericKernel
from lazytensor.execute import fallback
from lazytensor.trace.ir import Op
from lazytensor.trace.storage import lock

_libraries: dict[str, Any] = {}  # PyTorch drops a library's registrations with the object
_registered: set[str] = set()


def register_op(op: Any) -> None:
    """Let ltc record an op of a `torch.library`: `lt.register_op("mylib::op")`; a second call does nothing.

    ``op`` is a name, with or without an overload, or what `torch.library.custom_op` made, or `torch.ops.mylib.op`.
    """
    for overload in _overloads(op):
        name = overload.name()
        if name in _registered:
            continue
        if torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd"):
            continue  # taken apart above, into ops that are recorded
        kernel = _kernel(overload)
        library = _libraries.setdefault(overload.namespace, _library(overload.namespace))
        library.m.impl(name, "PrivateUse1", kernel, False)
        _registered.add(name)


def _library(namespace: str) -> Any:
    return torch.library.Library(namespace, "IMPL")  # type: ignore[no-untyped-call]


def has_shape_rule(name: str) -> bool:
    """Whether an op has a fake or meta kernel, or one that works on meta tensors."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    if definition is not None:  # its meta kernel is there in any case, and only raises if no fake one was given
        return definition._abstract_fn is not None
    return torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "Meta")


def why_not(overload: Any) -> str | None:
    """Why an op cannot be recorded, if that is so."""
    schema = overload._schema
    if any(a.alias_info is not None and a.alias_info.is_write for a in schema.arguments):
        return "it writes into its arguments and has no functional form"
    if not schema.returns:
        return "it returns nothing"
    for returned in schema.returns:
        if "Tensor" not in str(returned.type):
            return f"it returns a {returned.type}"
    if not has_shape_rule(overload.name()):
        name = overload.name()
        return f'it has no fake kernel; torch.library.register_fake("{name}", ...) would let it be recorded'
    return None


def _kernel(overload: Any) -> Callable[..., Any]:
    """Records the call if that can be; asked at each call, since a fake kernel may be registered later."""
    recorded: GenericKernel | None = None
    op = Op(overload.name())

    def kernel(*args: Any, **kwargs: Any) -> Any:
        nonlocal recorded
        if recorded is None:
            reason = why_not(overload)
            if reason is not None:
                return fallback.run_call(op, args, kwargs, reason)
            recorded = GenericKernel(overload)
        with lock:
            return recorded(*args, **kwargs)

    return kernel


def _overloads(op: Any) -> list[Any]:
    op = getattr(op, "_opoverload", op)
    if isinstance(op, torch._ops.OpOverload):
        return [_checked(op)]
    if isinstance(op, torch._ops.OpOverloadPacket):
        return [_checked(getattr(op, overload)) for overload in op.overloads()]  # type: ignore[no-untyped-call]
    if not isinstance(op, str):
        raise TypeError(f"register_op takes the name of an op, such as mylib::op, or the op itself, not {op!r}")
    known = [name for name in torch._C._dispatch_get_all_op_names() if not name.startswith("aten::")]
    found = [name for name in known if name == op or name.partition(".")[0] == op]
    if not found:
        close = difflib.get_close_matches(op, known, n=1)
        hint = f" Did you mean {close[0]}?" if close and not op.startswith("aten::") else ""
        where = "torch's own ops are recorded already." if op.startswith("aten::") else "Import its library first."
        raise ValueError(f"there is no custom op {op}. {where}{hint}")
    return [Op(name).overload for name in found]


def _checked(overload: Any) -> Any:
    if overload.namespace == "aten":
        raise ValueError(f"{overload.name()} is torch's own and recorded already; register_op is for custom ops")
    return overload
