// The objects of the trace, made in C++: specs, nodes and values; as lazytensor/trace/ir.py.  Part of recorder.cpp.

#pragma once

#include <torch/csrc/autograd/python_variable.h>

#include "cells.h"
#include "objects.h"

namespace {

void put(PyObject* object, Py_ssize_t offset, Ref value) { slot(object, offset) = value.release(); }

// --- specs ------------------------------------------------------------------------------------------------------------

Ref tuple(c10::IntArrayRef numbers) {
  Ref made(ok(PyTuple_New(numbers.size())));
  for (size_t i = 0; i < numbers.size(); i++) PyTuple_SET_ITEM(made.p, i, ok(PyLong_FromLongLong(numbers[i])));
  return made;
}

// What a tensor looks like, as the key of its Spec.
Ref geometry(const at::Tensor& tensor, int device) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  Ref size = tuple(impl->sizes()), stride = tuple(impl->strides()), offset(ok(PyLong_FromLongLong(impl->storage_offset())));
  Ref index(ok(PyLong_FromLong(device))), bits(ok(PyLong_FromLong(tensor.is_conj() + 2 * tensor.is_neg())));
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(tensor.scalar_type()));
  return Ref(ok(PyTuple_Pack(6, size.p, stride.p, offset.p, dtype, index.p, bits.p)));
}

// A Spec that is new, for a tensor on the first device, under its key; as ir.spec.
Ref new_spec(const at::Tensor& tensor, PyObject* key) {
  Ref made(ok(model.Spec->tp_alloc(model.Spec, 0)));
  Py_ssize_t fields[] = {model.spec_size, model.spec_stride, model.spec_offset, model.spec_dtype, model.spec_device, model.spec_bits};
  for (Py_ssize_t i = 0; i < 6; i++) put(made.p, fields[i], Ref(Py_NewRef(PyTuple_GET_ITEM(key, i))));
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  bool plain = impl->numel() > 0 && impl->storage_offset() == 0 && !tensor.is_conj() && !tensor.is_neg();
  int64_t step = 1;
  for (int64_t i = impl->dim() - 1; i >= 0; i--) {
    plain = plain && impl->stride(i) == step;
    step *= impl->size(i);
  }
  put(made.p, model.spec_numel, Ref(ok(PyLong_FromLongLong(impl->numel()))));
  put(made.p, model.spec_nbytes, Ref(ok(PyLong_FromLongLong(impl->numel() * static_cast<int64_t>(impl->itemsize())))));
  put(made.p, model.spec_plain, Ref(PyBool_FromLong(plain)));
  ok(PyDict_SetItem(model.specs, key, made.p));
  return made;
}

// The Spec of a tensor on the first device; `like` is one that it may well have, which is found sooner.
PyObject* spec_of(const at::Tensor& tensor, const Geometry*& like) {
  if (like == nullptr || !looks_like(tensor.unsafeGetTensorImpl(), like) || tensor.is_conj() || tensor.is_neg() || !like->ordinary) {
    Ref key = geometry(tensor, 0);
    PyObject* found = PyDict_GetItemWithError(model.specs, key.p);  // keeps it
    like = geometry_of(found != nullptr ? found : new_spec(tensor, key.p).p);
  }
  return like->spec;
}

// --- nodes and values -------------------------------------------------------------------------------------------------

using Values = c10::SmallVector<PyObject*, 8>;

void values_in(PyObject* args, Values& found) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
    PyObject* each = PyTuple_GET_ITEM(args, i);
    if (Py_TYPE(each) == model.Value) found.push_back(each);
    else if (PyTuple_Check(each)) values_in(each, found);
  }
}

// The number of a new node; ir._made has it.
Ref next_sequence() {
  PyObject* made = ok(PyDict_GetItemWithError(model.ir_globals, model.made_name));
  Ref next(ok(PyLong_FromLongLong(PyLong_AsLongLong(made) + 1)));
  ok(PyDict_SetItem(model.ir_globals, model.made_name, next.p));
  return next;
}

// A node without outputs; as ir.Node.
Ref new_node(PyObject* op, PyObject* args, Ref line) {
  Values values;
  values_in(args, values);
  Ref inputs(ok(PyTuple_New(values.size())));
  long depth = 0;
  for (size_t i = 0; i < values.size(); i++) {
    PyTuple_SET_ITEM(inputs.p, i, Py_NewRef(values[i]));
    depth = std::max(depth, PyLong_AsLong(slot(slot(values[i], model.value_node), model.node_depth)));
  }
  Ref node(ok(model.Node->tp_alloc(model.Node, 0)));
  put(node.p, model.node_op, Ref(Py_NewRef(op)));
  put(node.p, model.node_args, Ref(Py_NewRef(args)));
  put(node.p, model.node_inputs, std::move(inputs));
  put(node.p, model.node_line, std::move(line));
  put(node.p, model.node_depth, Ref(ok(PyLong_FromLong(depth + 1))));
  put(node.p, model.node_mark, Ref(ok(PyLong_FromLong(0))));
  put(node.p, model.node_seq, next_sequence());
  return node;
}

// One output of a node, or a leaf; as ir.Value.
Ref new_value(PyObject* node, size_t index, PyObject* spec, bool leaf = false) {
  Ref value(ok(model.Value->tp_alloc(model.Value, 0)));
  put(value.p, model.value_node, Ref(Py_NewRef(node)));
  put(value.p, model.value_index, Ref(ok(PyLong_FromSize_t(index))));
  put(value.p, model.value_spec, Ref(Py_NewRef(spec)));
  put(value.p, model.value_size, Ref(Py_NewRef(slot(spec, model.spec_size))));
  put(value.p, model.value_dtype, Ref(Py_NewRef(slot(spec, model.spec_dtype))));
  put(value.p, model.value_plain, Ref(Py_NewRef(slot(spec, model.spec_plain))));
  put(value.p, model.value_leaf, Ref(PyBool_FromLong(leaf)));
  return value;
}

// The value that means: this piece of device data, which looks like this; as ir.data_leaf, for one that is new.
Ref new_leaf(PyObject* index, PyObject* spec, PyObject* key) {
  Ref args(ok(PyTuple_Pack(2, model.DATA, index)));
  Ref node = new_node(model.LEAF, args.p, Ref(Py_NewRef(Py_None)));
  Ref value = new_value(node.p, 0, spec, true);
  put(node.p, model.node_outputs, Ref(ok(PyTuple_Pack(1, value.p))));
  ok(PyDict_SetItem(model.data_leaves, key, value.p));
  return value;
}

}  // namespace
