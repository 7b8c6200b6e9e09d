"""Registration: the backend's kernels for its key and for its autograd key, deferred until asked (`Register<Key>.cpp`).

What comes out is a class with every kernel as a static method (`<Key>NativeFunctions.h`), and `register()`, which puts
them in force on ltc, generated and hand-written ones alike.  Importing the package registers nothing.
"""

from __future__ import annotations

import os

from .layout import WIDTH, docstring, indented, wrapped
from .module import module
from .plan import NodePlan, Plan


def registration_module(plan: Plan, yaml: str, shapes: dict[NodePlan, str]) -> str:
    """`registration.py`. `shapes` maps a node to the hand-written function that computes its shapes."""
    parsed = plan.parsed
    by_hand = [op for op in plan.ops if op.section == "supported"]
    above = [op for op in plan.ops if op.section == "autograd"]
    generated = [op for op in plan.ops if op.section == "full_codegen"]
    methods = [f"{op.kernel} = staticmethod(native_functions.{op.kernel})" for op in generated]
    methods += [f'{op.kernel} = staticmethod(handwritten.kernels("{op.kernel}"))' for op in (*by_hand, *above)]
    lines = [line for method in sorted(methods) for line in wrapped(method, 1)]
    key = parsed.backend_key.name
    head = f"Every kernel of {plan.backend_name}: generated ones, and those written by hand."
    body = [f"class {parsed.class_name}:", *indented([*docstring(head), "", *lines])]
    body += ["", "", "def tables() -> Mapping[str, Mapping[str, Callable[..., Any]]]:"]
    body += indented([*docstring("The kernels by dispatch key and op name."), "return {"])
    body += ['        "PrivateUse1": {', "            **native_functions.kernels,"]
    body += [_entry(_full(op.name), f"{parsed.class_name}.{op.kernel}") for op in by_hand]
    body += ["        },"]
    body += ['        "AutogradPrivateUse1": {'] if above else []
    body += [_entry(_full(op.name), f"{parsed.class_name}.{op.kernel}") for op in above]
    body += ["        },"] if above else []
    body += ['        "Meta": {'] if shapes else []
    for node, function in shapes.items():
        value = f'handwritten.shapes("{function}")'
        home = "nodes" if node.function is not None else "non_native"
        value = f"cached({value})" if node.schema.properties.ShapeCache else value
        body += [_line(f"{home}.{node.class_name}.op.name", value)]
    body += ["        },"] if shapes else []
    body += ["    }", "", ""]
    body += [f'registration = Registration("{plan.backend_name}", tables)', "", ""]
    body += ["def register() -> None:"]
    body += indented(docstring(f"Put the kernels in force (`Register{plan.backend_name}{key}NativeFunctions`)."))
    body += ["    registration.register()", "", "", "def unregister() -> None:"]
    body += ['    """Give the ops back to the device\'s own kernels."""', "    registration.unregister()"]
    doc = f"Registration of {plan.backend_name}, deferred until `register()` is called."
    if key != "PrivateUse1":
        doc += (
            f"\n\nThe YAML's key is {key}. Tensors live on ltc, so the kernels are registered for its key, PrivateUse1."
        )
    return module(doc, body, yaml, [(name, ".") for name in ("native_functions", "handwritten", "nodes", "non_native")])


def handwritten_module(plan: Plan, yaml: str, output: str, impl_path: str | None, shape_path: str | None) -> str:
    """`handwritten.py`: where the functions written by hand are found."""

    def relative(path: str | None) -> str:
        return os.path.relpath(path, output).replace(os.sep, "/") if path else ""

    body = wrapped(f'kernels = HandWritten("{relative(impl_path)}", __file__, "{plan.parsed.class_name}")')
    body += wrapped(f'shapes = HandWritten("{relative(shape_path)}", __file__)')
    return module(f"The functions of {plan.backend_name} that are written by hand.", body, yaml)


def _entry(name: str, value: str) -> str:
    return _line(f'"{name}"', value)


def _line(key: str, value: str) -> str:
    line = f"            {key}: {value},"
    return line if len(line) <= WIDTH else f"{line}  # noqa: E501"


def _full(name: str) -> str:
    return name if "::" in name else f"aten::{name}"
