"""What a function has read from outside: its arguments, globals and attributes, and how to tell that nothing changed.

Reads are written down as the lines of a small Python function, which goes the same ways again (``v3 = a0.layer``,
``v4 = v3.weight``), compares what it finds, and returns the tensors on these ways, whose values the result depends on.
An object is not compared by identity, only by its class: what matters of it is read.  Functions, classes and modules
are compared by identity; plain data by type and value.
"""

from __future__ import annotations

import builtins
import functools
import struct
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.modules import module as modules

from lazytensor.functions.allowed import is_data


class Refused(Exception):
    """The function is not known to be pure; says why."""


class Unsuitable(Refused):
    """This call cannot be remembered; another one of the same function may."""


GRADIENTS = "its tensors need gradients"


def same(one: Any, other: Any) -> bool:
    """Whether two pieces of plain data are the same in type and value, to the bit."""
    return bool(_exact(one) == _exact(other))


def _exact(value: Any) -> Any:
    kind = value.__class__
    if kind is float:
        return float, struct.pack("<d", value)
    if kind is complex:
        return complex, struct.pack("<dd", value.real, value.imag)
    if kind is tuple:
        return tuple, tuple(map(_exact, value))
    if kind is slice:
        return slice, _exact((value.start, value.stop, value.step))
    return kind, value


def geometry(tensor: Any) -> Any:
    """What a tensor looks like."""
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device


TENSORS = (torch.Tensor, torch.nn.Parameter)
_BY_IDENTITY = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
_CALL = torch.nn.Module.__call__


# That to call a module is to call its `forward`, for the module in a variable.
_UNHOOKED = (
    "{0}.__class__.__call__ is CALL and {0}._compiled_call_impl is None and not {0}._forward_hooks and not "
    "{0}._forward_pre_hooks and not {0}._backward_hooks and not {0}._backward_pre_hooks"
)


def globally_hooked() -> bool:
    """Whether there is a hook for every module's call."""
    return bool(
        modules._global_forward_hooks
        or modules._global_forward_pre_hooks
        or modules._global_backward_hooks
        or modules._global_backward_pre_hooks
    )


def _kept_in(owner: Any, name: str) -> str | None:
    """The dictionary in which a module has this attribute, if it is a parameter, a buffer or another module."""
    if not isinstance(owner, torch.nn.Module) or name in vars(owner) or hasattr(type(owner), name):
        return None
    return next((each for each in ("_parameters", "_buffers", "_modules") if name in vars(owner)[each]), None)


class Reads:
    """The reads of one evaluation, in order."""

    def __init__(self, parameters: list[str]) -> None:
        self.parameters = parameters
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self.tensors: list[tuple[Any, str]] = []  # with the variable each is in
        self._variables: dict[int, str] = {}  # by the id of an object that was read
        self._held: list[Any] = []  # so that no id is used twice
        self._known: dict[tuple[str, ...], Any] = {}

    def constant(self, value: Any) -> str:
        """The name of this object in the lines."""
        name = f"C{len(self.constants)}"
        self.constants[name] = value
        return name

    def is_outside(self, value: Any) -> bool:
        """Whether this object was read from outside."""
        return id(value) in self._variables

    def argument(self, number: int, value: Any) -> None:
        """An argument of the function."""
        self._note(self.parameters[number], value)

    def attribute(self, owner: Any, name: str) -> Any:
        """``owner.name``, where reading it runs no code of the program's."""
        variable = self._variable(owner)
        kept = _kept_in(owner, name)
        if kept is not None:  # not by way of Module.__getattr__, which takes five times as long
            known = (variable, "attribute", name)
            if known not in self._known:
                self.lines.append(f"if {name!r} in {variable}.__dict__: return None")
            return self._read(known, f"{variable}.{kept}[{name!r}]", lambda: getattr(owner, name))
        return self._read((variable, "attribute", name), f"{variable}.{name}", lambda: getattr(owner, name))

    def item(self, owner: Any, key: Any) -> Any:
        """An item of a list, tuple or dictionary."""
        variable = self._variable(owner)
        return self._read(
            (variable, "item", repr(_exact(key))), f"{variable}[{self.constant(key)}]", lambda: owner[key]
        )

    def items(self, owner: Any) -> list[Any]:
        """All items of a list, tuple, or container of modules."""
        variable = self._variable(owner)
        if isinstance(owner, torch.nn.Module):
            expression, found = f"tuple({variable}._modules.values())", tuple(owner._modules.values())
        else:
            expression, found = f"tuple({variable})", tuple(owner)
        known = self._known.get((variable, "items"))
        if known is None:
            name = self._new(expression)
            self.lines.append(f"if len({name}) != {len(found)}: return None")
            known = self._known[variable, "items"] = [
                self._read((name, str(i)), f"{name}[{i}]", functools.partial(found.__getitem__, i))
                for i in range(len(found))
            ]
        return list(known)

    def global_variable(self, namespace: dict[str, Any], name: str) -> Any:
        """A global variable, or a builtin of that name."""
        known = ("global", str(id(namespace)), name)
        if known in self._known:
            return self._known[known]
        home = self.constant(namespace)
        if name in namespace:
            return self._read(known, f"{home}[{name!r}]", lambda: namespace[name])
        if not hasattr(builtins, name):
            raise Refused(f"there is no {name}")
        self.lines.append(f"if {name!r} in {home}: return None")
        return self._read(known, f"{self.constant(vars(builtins))}[{name!r}]", lambda: getattr(builtins, name))

    def code(self, function: types.FunctionType) -> None:
        """A function is run that is not a library's: its code and defaults are as they are."""
        name = self.constant(function)
        parts = ((f"{name}.{part}", getattr(function, part)) for part in ("__code__", "__defaults__", "__kwdefaults__"))
        for expression, value in parts:
            self.lines.append(f"if {expression} is not {self.constant(value)}: return None")

    def module_call(self, module: Any) -> None:
        """A module is called, which has no hooks."""
        variable = self._variable(module)
        unhooked = _UNHOOKED.format(variable)
        if globally_hooked() or not eval(unhooked, {"CALL": _CALL, variable: module}):
            raise Refused(f"a call of {type(module).__name__} has hooks")
        for line in ("if globally_hooked(): return None", f"if not ({unhooked}): return None"):
            if line not in self.lines:
                self.lines.append(line)

    def _variable(self, owner: Any) -> str:
        found = self._variables.get(id(owner))
        if found is None:
            raise Refused(f"it looks into a {type(owner).__name__} that it made")
        return found

    def _read(self, key: tuple[str, ...], expression: str, read: Callable[[], Any]) -> Any:
        if key not in self._known:
            value = self._known[key] = read()
            self._note(self._new(expression), value)
        return self._known[key]

    def _new(self, expression: str) -> str:
        name = f"v{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        return name

    def _note(self, variable: str, value: Any) -> None:
        """What must hold of the value in this variable."""
        kind = value.__class__
        if is_data(value):
            name = self.constant(value)
            self.lines.append(f"if {variable} is not {name} and not same({variable}, {name}): return None")
            return
        self._held.append(value)
        self._variables[id(value)] = variable
        if isinstance(value, torch.Tensor):
            if kind not in TENSORS:
                raise Refused(f"it works on a {kind.__name__}")
            self.tensors.append((value, variable))
        if isinstance(value, _BY_IDENTITY):
            self.lines.append(f"if {variable} is not {self.constant(value)}: return None")
        elif kind is types.MethodType:
            self.lines.append(f"if {variable}.__class__ is not {self.constant(kind)}: return None")
            self.lines.append(f"if {variable}.__func__ is not {self.constant(value.__func__)}: return None")
        else:
            self.lines.append(f"if {variable}.__class__ is not {self.constant(kind)}: return None")

    def source(self, values: list[str], shapes: list[tuple[str, Any]]) -> str:
        """The function that goes these ways again: None, or the tensors in these variables.

        Of the tensors in ``shapes`` only the geometry matters.
        """
        lines = [
            *self.lines,
            *(f"if geometry({variable}) != {self.constant(look)}: return None" for variable, look in shapes),
            f"return ({''.join(each + ', ' for each in values)})",
        ]
        body = "\n".join(f"        {line}" for line in lines)
        return (
            f"def look({', '.join(self.parameters)}):\n    try:\n{body}\n"
            "    except (AttributeError, LookupError, TypeError):\n        return None\n"
        )

    def compiled(self, values: list[str], shapes: list[tuple[str, Any]], name: str) -> Callable[..., Any]:
        """That function."""
        source = self.source(values, shapes)
        namespace = dict(self.constants, same=same, geometry=geometry, CALL=_CALL)
        namespace["globally_hooked"] = globally_hooked
        exec(compile(source, f"<what {name} reads>", "exec"), namespace)
        return namespace["look"]  # type: ignore[no-any-return]
