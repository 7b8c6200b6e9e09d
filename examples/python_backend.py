"""A whole backend in one method: the graph becomes the source of a Python function, which Python compiles."""

import torch

import lazytensor as lt
from lazytensor.backend.graph import output_paths


class PythonBackend(lt.Backend):
    def compile(self, graph):
        names = {leaf: f"x{number}" for number, leaf in enumerate(graph.inputs)}
        scope, lines = {"torch": torch}, [f"def step({', '.join(names.values())}):"]
        for number, node in enumerate(graph.nodes):
            names |= {value: f"v{number}_{value.index}" for value in node.outputs if value is not None}
            scope[f"op{number}"] = node.op.overload
            positional, keyword = graph.call(node, lambda leaf, names=names: Name(names[leaf]))
            scope |= {f"k{number}_{key}": value for key, value in keyword.items() if not isinstance(value, Name)}
            arguments = [f"c{number}_{i}" if opaque(a) else repr(a) for i, a in enumerate(positional)]
            scope |= {f"c{number}_{i}": a for i, a in enumerate(positional) if opaque(a)}
            arguments += [f"{k}={a if isinstance(a, Name) else f'k{number}_{k}'}" for k, a in keyword.items()]
            lines.append(f"    r = op{number}({', '.join(arguments)})  # {node.line}")
            for value, path in zip(node.outputs, output_paths(node), strict=True):
                if value is not None:
                    lines.append(f"    {names[value]} = r" + "".join(f"[{i}]" for i in path))
            lines += [f"    {names[value]} = None" for value in graph.last_uses.get(node, ())]  # free memory early
        lines.append(f"    return [{', '.join(names[value] for value in graph.outputs)}]")
        exec(compile("\n".join(lines), "<graph>", "exec"), scope)
        return scope["step"]


class Name(str):
    __repr__ = str.__str__


def opaque(argument):
    return not isinstance(argument, Name | list | int | str | type(None))


lt.register_backend("python", PythonBackend)
