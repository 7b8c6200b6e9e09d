"""A graph as JSON text, and back: an open form without pickle, in which reading can run no code.

The text is canonical: the same structure gives the same text in every process, whatever its values are called there.
It is what a disk cache hashes, what a compiling process is sent, and the structure part of a saved step.

::

    {"format": 1,
     "inputs":  [{"data": SPEC} | {"number": "float"}, ...],
     "nodes":   [{"op": "aten::add.Tensor", "args": [ARG, ...], "outputs": [SPEC | null, ...]}, ...],
     "outputs": [ID, ...],
     "replaces": {"output number": input number}}

``SPEC`` is ``[size, stride, dtype]``.  Inputs and then node outputs are numbered in order; ``ID`` is such a number.
``ARG`` is null, a bool, an int, a string, a list of ARG, or one of ``{"v": ID}``, ``{"n": ID}``, ``{"float":
"0x1.8p+0"}``, ``{"complex": [re, im]}``, ``{"const": ARG}``, ``{"dtype": "float32"}``, ``{"device": 0}``, ``{"torch":
"contiguous_format"}``.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from lazytensor.backend.graph import Graph
from lazytensor.trace.ir import Const, Node, Number, Op, Spec, Value, const, data_leaf, number_leaf, spec

FORMAT = 1
KINDS: dict[str, type] = {"bool": bool, "int": int, "float": float, "complex": complex}
_DTYPES = {str(d).removeprefix("torch."): d for d in vars(torch).values() if isinstance(d, torch.dtype)}
_NAMES = {repr(v): v for v in vars(torch).values() if isinstance(v, torch.memory_format | torch.layout)}


_TOUCHES_THE_WORLD = frozenset(("aten::from_file", "aten::_print"))  # ops that a graph never has, and a file must not


class BadGraphFile(ValueError):
    """Raised when a text is not a graph in this form."""


def dumps(graph: Graph) -> str:
    """The canonical text of a graph."""
    ids: dict[Any, int] = {}
    for leaf in graph.inputs:
        ids[leaf] = len(ids)
    nodes = []
    for node in graph.nodes:
        args = [plain_argument(a, ids) for a in node.args]
        for number, value in enumerate(node.outputs):
            ids[value if value is not None else (node, number)] = len(ids)
        outputs = [None if v is None else plain_spec(v.spec) for v in node.outputs]
        nodes.append({"op": node.op.name, "args": args, "outputs": outputs})
    inputs = [
        {"data": plain_spec(v.spec)} if isinstance(v, Value) else {"number": v.kind.__name__} for v in graph.inputs
    ]
    whole = {
        "format": FORMAT,
        "inputs": inputs,
        "nodes": nodes,
        "outputs": [ids[v] for v in graph.outputs],
        "replaces": {str(k): v for k, v in sorted(graph.replaces.items())},
    }
    return json.dumps(whole, separators=(",", ":"))


def plain_spec(geometry: Spec) -> list[Any]:
    """``SPEC``, of a tensor on the first device."""
    return [list(geometry.size), list(geometry.stride), str(geometry.dtype).removeprefix("torch."), geometry.offset]


def plain_argument(argument: Any, ids: dict[Any, int]) -> Any:
    """``ARG``, where values and numbers have these ids."""
    kind = argument.__class__
    if kind is Value:
        return {"v": ids[argument]}
    if kind is Number:
        return {"n": ids[argument]}
    if kind is tuple:
        return [plain_argument(a, ids) for a in argument]
    if kind is Const:
        return {"const": plain_argument(argument.value, ids)}
    if argument is None or kind in (bool, int, str):
        return argument
    if kind is float:
        return {"float": argument.hex()}
    if kind is complex:
        return {"complex": [argument.real.hex(), argument.imag.hex()]}
    if kind is torch.dtype:
        return {"dtype": str(argument).removeprefix("torch.")}
    if kind is torch.device:
        return {"device": argument.index or 0}
    if isinstance(argument, torch.memory_format | torch.layout):
        return {"torch": repr(argument).removeprefix("torch.")}
    raise TypeError(f"an argument of type {kind.__name__} has no form in a graph file: {argument!r}")


def loads(text: str) -> Graph:
    """The graph of a text.  Its nodes are new ones, not interned; its leaves are numbered from zero."""
    try:
        return _build(json.loads(text))
    except BadGraphFile:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as problem:
        raise BadGraphFile(f"not a graph file: {type(problem).__name__}: {problem}") from None


def _build(whole: Any) -> Graph:
    if not isinstance(whole, dict) or whole.get("format") != FORMAT:
        raise BadGraphFile(f"not a graph file of format {FORMAT}")
    table: list[Any] = []
    for number, leaf in enumerate(whole["inputs"]):
        if "data" in leaf:
            table.append(data_leaf(number, read_spec(leaf["data"])))
        else:
            table.append(number_leaf(number, KINDS[leaf["number"]]))
    for entry in whole["nodes"]:
        table.extend(_read_node(entry, table).outputs)
    outputs = [table[_index(i, len(table))] for i in whole["outputs"]]
    if not all(isinstance(v, Value) for v in outputs):
        raise BadGraphFile("an output is not a tensor")
    graph = Graph(outputs, {int(k): int(v) for k, v in whole["replaces"].items()})
    graph.data = [v for v in table[: len(whole["inputs"])] if isinstance(v, Value)]
    graph.numbers = [n for n in table[: len(whole["inputs"])] if isinstance(n, Number)]
    return graph


def _index(number: Any, bound: int) -> int:
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < bound:
        raise BadGraphFile(f"there is no value {number!r}")
    return number


def _read_node(entry: Any, table: list[Any]) -> Node:
    name = entry["op"]
    namespace, _, rest = name.partition("::")
    if namespace != "aten" and not hasattr(torch.ops, namespace):
        raise BadGraphFile(f"there is no op {name!r}")
    stem, _, overload = rest.partition(".")
    if torch._C._get_schema(name.partition(".")[0], overload) is None or not stem:
        raise BadGraphFile(f"there is no op {name!r}")
    known = _known_op(name)
    if known.overload._schema.is_mutable or name in _TOUCHES_THE_WORLD:
        raise BadGraphFile(f"{name} does more than compute results")
    node = Node(known, tuple(read_argument(a, table) for a in entry["args"]))
    if len(node.args) != len([a for a in known.overload._schema.arguments if not a.is_out]):
        raise BadGraphFile(f"{name} takes other arguments")
    node.outputs = tuple(None if s is None else Value(node, i, read_spec(s)) for i, s in enumerate(entry["outputs"]))
    return node


def _known_op(name: str) -> Op:
    from lazytensor.trace.record import ops

    return ops.get(name) or Op(name)


def read_spec(entry: Any) -> Spec:
    """What ``SPEC`` means."""
    size, stride, dtype, offset = entry
    numbers = [*size, *stride, offset]
    if len(size) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise BadGraphFile(f"not a tensor's geometry: {entry!r}")
    return spec(tuple(size), tuple(stride), offset, _DTYPES[dtype], 0)


def read_argument(entry: Any, table: list[Any]) -> Any:
    """What ``ARG`` means, with the values and numbers of this table."""
    if entry is None or isinstance(entry, bool | int | str):
        return entry
    if isinstance(entry, list):
        return tuple(read_argument(a, table) for a in entry)
    ((kind, value),) = entry.items()
    if kind in ("v", "n"):
        found = table[_index(value, len(table))]
        if not isinstance(found, Value if kind == "v" else Number):
            raise BadGraphFile(f"value {value} is of another kind")
        return found
    if kind == "float":
        return float.fromhex(value)
    if kind == "complex":
        return complex(float.fromhex(value[0]), float.fromhex(value[1]))
    if kind == "const":
        return const(read_argument(value, table))
    if kind == "dtype":
        return _DTYPES[value]
    if kind == "device":
        return torch.device("ltc", int(value))
    if kind == "torch":
        return _NAMES["torch." + value]
    raise BadGraphFile(f"unknown argument {entry!r}")
