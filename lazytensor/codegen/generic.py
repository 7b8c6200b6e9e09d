"""One recording kernel for any op: it reads the op's schema at run time, where a generated one had it read beforehand.

Ops of a user's `torch.library` are recorded by it (:mod:`lazytensor.codegen.custom`), since their schemas are not known
when kernels are generated; `lazytensor bench codegen` measures it against generated kernels.
"""

from __future__ import annotations

from typing import Any

import torch

from lazytensor.device.runtime import elsewhere, mutate, this_device, write_all
from lazytensor.trace.record import Mutation, op, record, record_view, wrap
from lazytensor.trace.storage import lift, lift_all, make_view, value_of, values_of, write

_LIFTED = ("number", "Scalar", "float")


class GenericKernel:
    """Records calls of one op."""

    def __init__(self, overload: Any, functional: str | None = None) -> None:
        """``functional`` names the functional form of an op that writes into its arguments."""
        self.schema = overload._schema
        name = overload.name()
        written = tuple(i for i, a in enumerate(self.schema.arguments) if _written(a))
        aliases = any(r.alias_info is not None for r in self.schema.returns)
        self.view = aliases and functional is None
        self.mutation = None if functional is None else Mutation(name, functional, written)
        self.op = op(name, view=self.view)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel."""
        passed = self._arguments(args, kwargs)
        device = passed.get("device")
        if "device" in passed:
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if tensors and device is not None and device.type != "ltc":
                return elsewhere(self.op, *args, **kwargs)
            passed["device"] = tensors[0].device if tensors and device is None else this_device(device)
        key = tuple([self._canonical(a, passed[a.name]) for a in self.schema.arguments])
        if self.mutation is not None:
            return self._mutate(key, passed)
        entry = self.op.table.get(key)
        if entry is None:
            return record_view(self.op, args[0], key) if self.view else record(self.op, key)
        if not self.view:
            return wrap(entry)
        return [make_view(args[0], v) for v in entry] if isinstance(entry, list) else make_view(args[0], entry)

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Every argument by name, defaults filled in."""
        passed = {}
        for i, argument in enumerate(self.schema.arguments):
            if i < len(args):
                passed[argument.name] = args[i]
            else:
                passed[argument.name] = kwargs.get(argument.name, argument.default_value)
        return passed

    def _canonical(self, argument: Any, value: Any) -> Any:
        if value is None or argument.name == "pin_memory":
            return None
        if isinstance(value, torch.Tensor):
            return value_of(value)
        kind = str(argument.type)
        if isinstance(value, list | tuple):
            if "Tensor" in kind:
                return values_of(value)
            return lift_all(value) if any(k in kind for k in _LIFTED) else tuple(value)
        if "Tensor" in kind or any(k in kind for k in _LIFTED):
            return lift(value)
        return value

    def _mutate(self, key: tuple[Any, ...], passed: dict[str, Any]) -> Any:
        assert self.mutation is not None
        written = tuple([passed[a.name] for a in self.schema.arguments if _written(a)])
        returned = written[0] if len(self.schema.returns) == 1 else None
        entry = self.mutation.table.get(key)
        if entry is None:
            tensors = tuple([v if isinstance(v, torch.Tensor) else None for v in passed.values()])
            return mutate(self.mutation, key, written, returned, tensors)
        for tensor, value in zip(written, entry[1], strict=True):
            if isinstance(tensor, list | tuple):
                write_all(list(tensor), value)
            else:
                write(tensor, value)
        return returned


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
