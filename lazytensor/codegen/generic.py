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
        self.arguments = [(a.name, a.default_value, _form(a)) for a in self.schema.arguments]
        self.written = [a.name for a in self.schema.arguments if _written(a)]
        self.places = any(name == "device" for name, _, _ in self.arguments)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The kernel."""
        passed = self._arguments(args, kwargs)
        if self.places:
            device = passed["device"]
            tensors = [a for a in args if isinstance(a, torch.Tensor)]
            if tensors and device is not None and device.type != "ltc":
                return elsewhere(self.op, *args, **kwargs)
            passed["device"] = tensors[0].device if tensors and device is None else this_device(device)
        key = tuple([_canonical(form, passed[name]) for name, _, form in self.arguments])
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
        passed = {name: default for name, default, _ in self.arguments}
        passed.update(zip(passed, args, strict=False))
        passed.update(kwargs)
        return passed

    def _mutate(self, key: tuple[Any, ...], passed: dict[str, Any]) -> Any:
        assert self.mutation is not None
        written = tuple([passed[name] for name in self.written])
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


_NOTHING, _TENSOR, _NUMBER, _CONSTANT = range(4)


def _form(argument: Any) -> int:
    """What an argument, or each item of a list, is to a node."""
    kind = str(argument.type)
    if argument.name == "pin_memory":
        return _NOTHING
    if "Tensor" in kind:
        return _TENSOR
    return _NUMBER if any(name in kind for name in _LIFTED) else _CONSTANT


def _canonical(form: int, value: Any) -> Any:
    if value is None or form == _NOTHING:
        return None
    if isinstance(value, list | tuple):
        return values_of(value) if form == _TENSOR else lift_all(value) if form == _NUMBER else tuple(value)
    if form == _TENSOR:
        return value_of(value)
    return lift(value) if form == _NUMBER else value


def _written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write
