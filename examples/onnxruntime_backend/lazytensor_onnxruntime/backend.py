"""The backend: a graph becomes one ONNX model, and the model an ONNX Runtime session."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import helper

import lazytensor as lt
from lazytensor_onnxruntime.lowerings import DTYPES, LOWERINGS, NUMBER_DTYPES, Model, Unsupported

OPSET, IR_VERSION = 18, 9


class OnnxRuntimeBackend(lt.Backend):
    """Options: ``threads`` is how many threads a session may use, ``provider`` which of ONNX Runtime's execution
    providers.
    """

    version = onnxruntime.__version__

    def __init__(self, threads: int = 0, provider: str = "CPUExecutionProvider"):
        super().__init__()
        if provider not in onnxruntime.get_available_providers():
            raise ValueError(
                f"ONNX Runtime has the providers {onnxruntime.get_available_providers()}, not {provider!r}"
            )
        self.provider = provider
        self.options = onnxruntime.SessionOptions()
        self.options.intra_op_num_threads = threads
        self.options.log_severity_level = 3
        self.supported = {}

    def supports(self, node):
        """Whether the table can lower this node, with these very arguments: it is tried."""
        found = self.supported.get(node)
        if found is None:
            try:
                lower(Model(), node)
                found = True
            except Unsupported:
                found = False
            if len(self.supported) > 100_000:
                self.supported.clear()
            self.supported[node] = found
        return found

    def compile(self, graph):
        """One session for the whole graph."""
        model = Model()
        inputs = [
            helper.make_tensor_value_info(model.value(value), DTYPES[value.dtype], value.size) for value in graph.data
        ] + [
            helper.make_tensor_value_info(model.value(number), NUMBER_DTYPES[number.kind], ())
            for number in graph.numbers
        ]
        for node in graph.nodes:
            lower(model, node)
        made_here = {name for each in model.nodes for name in each.output}
        outputs = []
        for value in graph.outputs:
            name = model.value(value)
            if name not in made_here:  # an input, or a value that is returned twice, is no output of a model: a copy is
                name = model.emit("Identity", name)
            made_here.discard(name)
            outputs.append(helper.make_tensor_value_info(name, DTYPES[value.dtype], value.size))
        proto = helper.make_graph(model.nodes, "step", inputs, outputs, model.initializers)
        made = helper.make_model(proto, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
        session = onnxruntime.InferenceSession(made.SerializeToString(), self.options, providers=[self.provider])
        names = [each.name for each in inputs]
        kept = {each.name for each in session.get_inputs()}  # the engine drops inputs that decide nothing
        numpy_types = {n.name: helper.tensor_dtype_to_np_dtype(n.type.tensor_type.elem_type) for n in inputs}

        def run(*arguments):
            feeds = {
                name: a.contiguous().numpy() if isinstance(a, torch.Tensor) else np.asarray(a, numpy_types[name])
                for name, a in zip(names, arguments, strict=True)
                if name in kept
            }
            return [torch.from_numpy(np.asarray(result)) for result in session.run(None, feeds)]

        run.text = onnx.printer.to_text(made)
        return run

    def text(self, computation):
        """The ONNX model as text."""
        return getattr(computation.callable, "text", None) or super().text(computation)


def lower(model, node):
    """Add the ONNX nodes for one ATen node to a model."""
    rule = LOWERINGS.get(node.op.name)
    if rule is None:
        raise Unsupported(node.op.name)
    for value in [*node.inputs, *(v for v in node.outputs if v is not None)]:
        if value.dtype not in DTYPES or value.spec.bits:
            raise Unsupported(f"{node.op.name} of {value.dtype}")
    model.node = node
    results = rule(model, *node.args)
    results = results if isinstance(results, tuple) else (results,)
    for value, name in zip(node.outputs, results, strict=True):
        if value is not None:
            model.names[value] = name
