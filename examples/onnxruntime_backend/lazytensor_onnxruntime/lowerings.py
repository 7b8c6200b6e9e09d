"""What each ATen op becomes in ONNX: one small function an op.

A rule is called with the model under construction and the op's arguments in the order of its schema: values, lifted
numbers, and constants.  It returns the name of the ONNX value, or a tuple of names for an op with several results.
``Unsupported`` hands the node back to lazytensor, which decomposes it or runs it in its interpreter.
"""

from __future__ import annotations

import numpy as np
import torch
from onnx import TensorProto, helper, numpy_helper

from lazytensor.trace.ir import Const, Number, Value

DTYPES = {
    torch.float32: TensorProto.FLOAT,
    torch.float64: TensorProto.DOUBLE,
    torch.int64: TensorProto.INT64,
    torch.int32: TensorProto.INT32,
    torch.bool: TensorProto.BOOL,
}
NUMBER_DTYPES = {float: TensorProto.DOUBLE, int: TensorProto.INT64, bool: TensorProto.BOOL}
NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.bool: np.bool_,
}
LOWERINGS = {}


class Unsupported(Exception):
    """This node cannot be expressed."""


class Model:
    """The ONNX nodes so far, and what each value is called."""

    def __init__(self):
        self.nodes, self.initializers, self.names, self.constants = [], [], {}, {}
        self.node = None

    @property
    def spec(self):
        """What the (first) result of the node being lowered looks like."""
        return self.node.outputs[0].spec

    def value(self, value):
        """The name of a value or lifted number; a new one is an input."""
        if isinstance(value, Number) and value.kind not in NUMBER_DTYPES:
            raise Unsupported(f"a lifted {value.kind.__name__}")
        return self.names.setdefault(value, f"in{len(self.names)}")

    def emit(self, kind, *inputs, name=None, **attributes):
        """Add an ONNX node with one output; its name."""
        name = name or f"t{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def constant(self, value, dtype):
        """The name of a constant."""
        array = np.asarray(value, NUMPY.get(dtype, dtype))
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.constants:
            name = self.constants[key] = f"c{len(self.constants)}"
            self.initializers.append(numpy_helper.from_array(array, name))
        return self.constants[key]

    def ints(self, values):
        """A list of integers as a constant."""
        return self.constant(list(values), np.int64)

    def operand(self, argument, dtype):
        """A tensor, lifted number or constant as an operand of this dtype."""
        if isinstance(argument, Const):
            argument = argument.value
        if isinstance(argument, Value) and argument.dtype is dtype:
            return self.value(argument)
        if isinstance(argument, Value | Number):
            return self.cast(self.value(argument), dtype)
        return self.constant(argument, dtype)

    def cast(self, name, dtype):
        """A conversion."""
        return self.emit("Cast", name, to=DTYPES[dtype])

    def reshape(self, name, size):
        """Other sizes."""
        return self.emit("Reshape", name, self.ints(size), allowzero=1)

    def reduce(self, kind, name, dims, keep):
        """A reduction; no dims means all."""
        if dims:
            return self.emit(kind, name, self.ints(dims), keepdims=int(keep))
        return self.emit(kind, name, keepdims=int(keep))


def lowers(*names):
    """Put a rule into the table."""

    def enter(rule):
        for name in names:
            LOWERINGS["aten::" + name] = rule
        return rule

    return enter


def plain(argument):
    """A constant's number; a lifted number is not known when a graph is compiled."""
    if isinstance(argument, Number):
        raise Unsupported("a lifted number where ONNX has an attribute")
    return argument.value if isinstance(argument, Const) else argument


def is_one(argument):
    return not isinstance(argument, Number) and plain(argument) == 1


# --- element by element ----------------------------------------


def unary(kind):
    def rule(model, x):
        return model.emit(kind, model.operand(x, model.spec.dtype))

    return rule


for aten, kind in {
    "relu": "Relu",
    "exp": "Exp",
    "log": "Log",
    "sqrt": "Sqrt",
    "neg": "Neg",
    "abs": "Abs",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
    "reciprocal": "Reciprocal",
    "erf": "Erf",
}.items():
    lowers(aten)(unary(kind))


@lowers("rsqrt")
def rsqrt(model, x):
    return model.emit("Reciprocal", model.emit("Sqrt", model.operand(x, model.spec.dtype)))


def binary(kind):
    def rule(model, x, y):
        return model.emit(kind, model.operand(x, model.spec.dtype), model.operand(y, model.spec.dtype))

    return rule


lowers("mul.Tensor", "mul.Scalar")(binary("Mul"))
lowers("maximum")(binary("Max"))
lowers("minimum")(binary("Min"))


@lowers("div.Tensor", "div.Scalar")
def div(model, x, y):
    if not model.spec.dtype.is_floating_point:
        raise Unsupported("a whole quotient")
    return binary("Div")(model, x, y)


@lowers("pow.Tensor_Scalar", "pow.Tensor_Tensor")
def power(model, x, y):
    if not model.spec.dtype.is_floating_point:
        raise Unsupported("whole powers")
    return binary("Pow")(model, x, y)


def scaled(kind):
    def rule(model, x, y, alpha):
        dtype = model.spec.dtype
        y = model.operand(y, dtype)
        if not is_one(alpha):
            y = model.emit("Mul", y, model.operand(alpha, dtype))
        return model.emit(kind, model.operand(x, dtype), y)

    return rule


lowers("add.Tensor", "add.Scalar")(scaled("Add"))
lowers("sub.Tensor", "sub.Scalar")(scaled("Sub"))


@lowers("rsub.Scalar", "rsub.Tensor")
def rsub(model, x, y, alpha):
    if not is_one(alpha):
        raise Unsupported("a scaled difference")
    return binary("Sub")(model, y, x)


def fused(kind):
    def rule(model, x, a, b, value):
        dtype = model.spec.dtype
        term = model.emit(kind, model.operand(a, dtype), model.operand(b, dtype))
        return model.emit("Add", model.operand(x, dtype), model.emit("Mul", term, model.operand(value, dtype)))

    return rule


lowers("addcmul")(fused("Mul"))
lowers("addcdiv")(fused("Div"))


@lowers("lerp.Scalar", "lerp.Tensor")
def lerp(model, x, end, weight):
    dtype = model.spec.dtype
    x, end = model.operand(x, dtype), model.operand(end, dtype)
    return model.emit("Add", x, model.emit("Mul", model.operand(weight, dtype), model.emit("Sub", end, x)))


def comparison(kind, negated=False):
    def rule(model, x, y):
        dtype = torch.promote_types(x.dtype, y.dtype) if isinstance(y, Value) else x.dtype
        if not isinstance(y, Value) and not dtype.is_floating_point:
            dtype = torch.float64 if isinstance(plain(y), float) else torch.int64
        if dtype is torch.bool:
            dtype = torch.int64
        found = model.emit(kind, model.operand(x, dtype), model.operand(y, dtype))
        return model.emit("Not", found) if negated else found

    return rule


for aten, kind, negated in [
    ("eq", "Equal", False),
    ("ne", "Equal", True),
    ("lt", "Less", False),
    ("le", "LessOrEqual", False),
    ("gt", "Greater", False),
    ("ge", "GreaterOrEqual", False),
]:
    lowers(aten + ".Scalar", aten + ".Tensor")(comparison(kind, negated))


@lowers("logical_not")
def logical_not(model, x):
    return model.emit("Not", model.operand(x, torch.bool))


@lowers("where.self")
def where(model, condition, x, y):
    dtype = model.spec.dtype
    return model.emit("Where", model.value(condition), model.operand(x, dtype), model.operand(y, dtype))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(model, x, mask, value):
    return where(model, mask, value, x)


@lowers("threshold_backward")
def threshold_backward(model, gradient, x, threshold):
    dtype = model.spec.dtype
    passed = model.emit("Greater", model.operand(x, dtype), model.operand(threshold, dtype))
    return model.emit("Where", passed, model.operand(gradient, dtype), model.constant(0, dtype))


@lowers("_to_copy")
def to_copy(model, x, *rest):
    return model.operand(x, model.spec.dtype)


@lowers("clone", "alias", "detach", "lift_fresh", "_unsafe_view_copy")
def same(model, x, *rest):
    return model.value(x)


@lowers("copy")
def copy(model, target, source, non_blocking):
    source = model.operand(source, model.spec.dtype)
    return model.emit("Expand", source, model.ints(model.spec.size))


# --- making ----------------------------------------


def filled(model, value):
    name = model.operand(value, model.spec.dtype)
    return model.emit("Expand", name, model.ints(model.spec.size))


@lowers("zeros_like", "zeros", "new_zeros", "empty_like", "empty.memory_format", "empty_strided", "new_empty")
def zeros(model, *rest):
    return filled(model, 0)


@lowers("ones_like", "ones", "new_ones")
def ones(model, *rest):
    return filled(model, 1)


@lowers("full_like", "full", "fill.Scalar")
def full(model, shape, value, *rest):
    return filled(model, value)


@lowers("scalar_tensor")
def scalar_tensor(model, value, *rest):
    return filled(model, value)


# --- other shapes of the same elements ----------------------------------------


@lowers("view", "_unsafe_view", "reshape", "squeeze", "squeeze.dim", "squeeze.dims", "unsqueeze", "_reshape_alias")
def view(model, x, *rest):
    return model.reshape(model.value(x), model.spec.size)


@lowers("t")
def t(model, x):
    return model.emit("Transpose", model.value(x)) if len(x.size) == 2 else model.value(x)


@lowers("transpose.int")
def transpose(model, x, a, b):
    order = list(range(len(x.size)))
    if order:
        order[a], order[b] = order[b], order[a]
    return model.emit("Transpose", model.value(x), perm=order)


@lowers("permute")
def permute(model, x, dims):
    return model.emit("Transpose", model.value(x), perm=[d % len(dims) for d in dims])


@lowers("expand")
def expand(model, x, size, implicit):
    return model.emit("Expand", model.value(x), model.ints(model.spec.size))


@lowers("slice.Tensor")
def cut(model, x, dim, start, end, step):
    length = x.size[dim]
    start = 0 if start is None else start
    end = length if end is None else min(end, length)
    return model.emit("Slice", model.value(x), *map(model.ints, ([start], [end], [dim], [step])))


@lowers("select.int")
def select(model, x, dim, index):
    return model.emit("Gather", model.value(x), model.constant(index % x.size[dim], np.int64), axis=dim)


@lowers("cat")
def cat(model, tensors, dim):
    return model.emit("Concat", *[model.operand(x, model.spec.dtype) for x in tensors], axis=dim)


@lowers("gather")
def gather(model, x, dim, index, sparse):
    if not x.size or not index.size:
        raise Unsupported("gather without dimensions")
    return model.emit("GatherElements", model.value(x), model.value(index), axis=dim)


@lowers("embedding")
def embedding(model, table, index, *rest):
    return model.emit("Gather", model.value(table), model.value(index), axis=0)


# --- reductions ----------------------------------------


def reduction(kind):
    def rule(model, x, dims=None, keep=False, dtype=None):
        return model.reduce(kind, model.operand(x, model.spec.dtype), dims, keep)

    return rule


lowers("sum.dim_IntList")(reduction("ReduceSum"))
lowers("mean.dim")(reduction("ReduceMean"))
lowers("amax")(reduction("ReduceMax"))


@lowers("sum")
def total(model, x, dtype):
    return model.reduce("ReduceSum", model.operand(x, model.spec.dtype), None, False)


@lowers("mean")
def mean(model, x, dtype):
    return model.reduce("ReduceMean", model.operand(x, model.spec.dtype), None, False)


@lowers("_softmax")
def softmax(model, x, dim, half_to_float):
    return model.emit("Softmax", model.operand(x, model.spec.dtype), axis=dim)


@lowers("_log_softmax")
def log_softmax(model, x, dim, half_to_float):
    return model.emit("LogSoftmax", model.operand(x, model.spec.dtype), axis=dim)


@lowers("_softmax_backward_data")
def softmax_backward(model, gradient, output, dim, dtype):
    gradient, output = model.value(gradient), model.value(output)
    inner = model.reduce("ReduceSum", model.emit("Mul", gradient, output), [dim], True)
    return model.emit("Mul", output, model.emit("Sub", gradient, inner))


@lowers("_log_softmax_backward_data")
def log_softmax_backward(model, gradient, output, dim, dtype):
    gradient, output = model.value(gradient), model.value(output)
    inner = model.reduce("ReduceSum", gradient, [dim], True)
    return model.emit("Sub", gradient, model.emit("Mul", model.emit("Exp", output), inner))


# --- linear algebra ----------------------------------------


@lowers("mm", "bmm")
def matmul(model, a, b):
    if not model.spec.dtype.is_floating_point or not a.spec.numel or not b.spec.numel:
        raise Unsupported("this product of matrices")
    return model.emit("MatMul", model.value(a), model.value(b))


@lowers("addmm")
def addmm(model, bias, a, b, beta, alpha):
    dtype = model.spec.dtype
    product = matmul(model, a, b)
    if not is_one(alpha):
        product = model.emit("Mul", product, model.operand(alpha, dtype))
    bias = model.operand(bias, dtype)
    if not is_one(beta):
        bias = model.emit("Mul", bias, model.operand(beta, dtype))
    return model.emit("Add", product, bias)


# --- convolution and batch norm ----------------------------------------


def simple_convolution(x, weight, transposed, groups):
    if transposed or groups != 1 or len(x.size) != 4 or not x.spec.numel:
        raise Unsupported("this kind of convolution")


@lowers("convolution")
def convolution(model, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups):
    simple_convolution(x, weight, transposed, groups)
    inputs = [model.value(each) for each in (x, weight, bias) if each is not None]
    return model.emit("Conv", *inputs, strides=stride, pads=[*padding, *padding], dilations=dilation)


@lowers("convolution_backward")
def convolution_backward(
    model, gradient, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, wanted
):
    simple_convolution(x, weight, transposed, groups)
    kernel, spatial = weight.size[2:], range(2)
    given = model.value(gradient)
    results = ["", "", ""]
    if wanted[0]:
        reached = [
            (gradient.size[2 + i] - 1) * stride[i] - 2 * padding[i] + dilation[i] * (kernel[i] - 1) + 1 for i in spatial
        ]
        rest = [x.size[2 + i] - reached[i] for i in spatial]
        results[0] = model.emit(
            "ConvTranspose",
            given,
            model.value(weight),
            strides=stride,
            pads=[*padding, *padding],
            dilations=dilation,
            output_padding=rest,
        )
    if wanted[1]:
        swapped = [model.emit("Transpose", name, perm=[1, 0, 2, 3]) for name in (model.value(x), given)]
        # The gradient slides over the input as a kernel whose taps lie a stride apart.
        full = model.emit("Conv", *swapped, strides=dilation, pads=[*padding, *padding], dilations=stride)
        part = model.emit("Slice", full, *map(model.ints, ([0, 0], kernel, [2, 3], [1, 1])))
        results[1] = model.emit("Transpose", part, perm=[1, 0, 2, 3])
    if wanted[2]:
        results[2] = model.reduce("ReduceSum", given, [0, 2, 3], False)
    return tuple(results)


def per_channel(model, name, x):
    return model.reshape(name, [1, x.size[1], *[1] * (len(x.size) - 2)])


@lowers("_native_batch_norm_legit_functional")
def batch_norm(model, x, weight, bias, running_mean, running_var, training, momentum, eps):
    if not training or weight is None or bias is None or x.dtype is not torch.float32:
        raise Unsupported("this kind of batch norm")
    dims = [d for d in range(len(x.size)) if d != 1]
    count = x.spec.numel // x.size[1]
    given = model.value(x)
    mean = model.reduce("ReduceMean", given, dims, False)
    centred = model.emit("Sub", given, per_channel(model, mean, x))
    variance = model.reduce("ReduceMean", model.emit("Mul", centred, centred), dims, False)
    eps = model.operand(eps, x.dtype)
    scale = model.emit("Reciprocal", model.emit("Sqrt", model.emit("Add", variance, eps)))
    normal = model.emit("Mul", centred, per_channel(model, scale, x))
    result = model.emit("Mul", normal, per_channel(model, model.value(weight), x))
    result = model.emit("Add", result, per_channel(model, model.value(bias), x))
    unbiased = model.emit("Mul", variance, model.constant(count / max(count - 1, 1), x.dtype))
    momentum = model.operand(momentum, x.dtype)

    def moved(old, new):
        return model.emit("Add", old, model.emit("Mul", momentum, model.emit("Sub", new, old)))

    return result, mean, scale, moved(model.value(running_mean), mean), moved(model.value(running_var), unbiased)


@lowers("native_batch_norm_backward")
def batch_norm_backward(
    model, gradient, x, weight, running_mean, running_var, save_mean, save_invstd, train, eps, wanted
):
    if not train or weight is None or x.dtype is not torch.float32:
        raise Unsupported("this kind of batch norm")
    dims = [d for d in range(len(x.size)) if d != 1]
    gradient = model.value(gradient)
    scale = per_channel(model, model.value(save_invstd), x)
    normal = model.emit("Mul", model.emit("Sub", model.value(x), per_channel(model, model.value(save_mean), x)), scale)
    bias_gradient = model.reduce("ReduceSum", gradient, dims, False)
    weight_gradient = model.reduce("ReduceSum", model.emit("Mul", gradient, normal), dims, False)
    count = model.constant(x.spec.numel // x.size[1], x.dtype)
    means = [per_channel(model, model.emit("Div", each, count), x) for each in (bias_gradient, weight_gradient)]
    inner = model.emit("Sub", model.emit("Sub", gradient, means[0]), model.emit("Mul", normal, means[1]))
    factor = model.emit("Mul", per_channel(model, model.value(weight), x), scale)
    results = (model.emit("Mul", inner, factor), weight_gradient, bias_gradient)
    return tuple(name if asked else "" for name, asked in zip(results, wanted, strict=True))


# --- classification loss ----------------------------------------


def counted(model, target, ignored):
    """Which rows have a class to be scored."""
    return model.emit("Not", model.emit("Equal", model.value(target), model.constant(ignored, np.int64)))


def usual_loss(x, weight, reduction):
    if weight is not None or reduction == 0 or len(x.size) != 2 or x.dtype is not torch.float32:
        raise Unsupported("this kind of loss")


@lowers("nll_loss_forward")
def nll_loss(model, x, target, weight, reduction, ignored):
    usual_loss(x, weight, reduction)
    some = counted(model, target, ignored)
    index = model.emit("Where", some, model.value(target), model.constant(0, np.int64))
    picked = model.emit("GatherElements", model.value(x), model.reshape(index, [x.size[0], 1]), axis=1)
    lost = model.emit("Where", some, model.emit("Neg", model.reshape(picked, [x.size[0]])), model.constant(0, x.dtype))
    weight = model.reduce("ReduceSum", model.cast(some, x.dtype), None, False)
    loss = model.reduce("ReduceSum", lost, None, False)
    return (model.emit("Div", loss, weight) if reduction == 1 else loss), weight


@lowers("nll_loss_backward")
def nll_loss_backward(model, gradient, x, target, weight, reduction, ignored, total_weight):
    usual_loss(x, weight, reduction)
    rows, classes = x.size
    column = model.reshape(model.value(target), [rows, 1])
    chosen = model.emit("Equal", column, model.constant(np.arange(classes), np.int64))
    chosen = model.emit("And", chosen, model.reshape(counted(model, target, ignored), [rows, 1]))
    share = model.value(gradient)
    if reduction == 1:
        share = model.emit("Div", share, model.value(total_weight))
    return model.emit("Where", chosen, model.emit("Neg", share), model.constant(0, x.dtype))


@lowers("bitwise_not")
def bitwise_not(model, x):
    if x.dtype is not torch.bool:
        raise Unsupported("bits")
    return model.emit("Not", model.value(x))
