// The arguments of a call in the canonical form in which the Python tables have them.  Part of recorder.cpp.

#pragma once

#include <torch/csrc/Device.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/tensor_layouts.h>
#include <torch/csrc/utils/tensor_memoryformats.h>

#include "cells.h"
#include "objects.h"
#include "states.h"

namespace {

using Stack = torch::jit::Stack;

enum class Form { Tensor, Tensors, Lifted, LiftedAll, Plain, Tuple, Dtype, Layout, MemoryFormat, Device, Dropped };

struct Argument {
  Form form;
  bool keyword = false;
  bool has_default = false;
  c10::IValue default_value;
  PyObject* default_object = nullptr;  // its canonical form: kernels compare it by equality
};

// The arguments of one call in canonical form, and what was found on the way to it.
struct Call {
  Stack* stack;
  size_t first;         // where the arguments begin on the stack
  Py_ssize_t lifted;    // how many numbers there were before
  c10::IValue& at(size_t i) const { return (*stack)[first + i]; }
};

Ref lift(Ref number) {
  PyObject* row = PyDict_GetItem(model.rows, reinterpret_cast<PyObject*>(Py_TYPE(number.p)));
  Py_ssize_t index = PyList_GET_SIZE(model.numbers);
  if (row == nullptr) throw Leave();
  ok(PyList_Append(model.numbers, number.p));
  if (index < PyList_GET_SIZE(row)) return Ref(Py_NewRef(PyList_GET_ITEM(row, index)));
  return Ref(ok(PyObject_CallFunction(model.number_leaf, "nO", index, Py_TYPE(number.p))));
}

Ref number(const c10::IValue& value) {
  if (value.isDouble()) return Ref(ok(PyFloat_FromDouble(value.toDouble())));
  if (value.isInt()) return Ref(ok(PyLong_FromLongLong(value.toInt())));
  if (value.isBool()) return Ref(PyBool_FromLong(value.toBool()));
  if (value.isComplexDouble()) {
    auto z = value.toComplexDouble();
    return Ref(ok(PyComplex_FromDoubles(z.real(), z.imag())));
  }
  throw Leave();
}

// A Python number that stood beside a tensor: PyTorch made it a tensor without dimensions.
Ref wrapped(const at::Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble: return Ref(ok(PyFloat_FromDouble(*tensor.const_data_ptr<double>())));
    case at::kLong: return Ref(ok(PyLong_FromLongLong(*tensor.const_data_ptr<int64_t>())));
    case at::kBool: return Ref(PyBool_FromLong(*tensor.const_data_ptr<bool>()));
    default: throw Leave();
  }
}

Ref tensor(const at::Tensor& tensor) {
  if (!tensor.defined()) return Ref(Py_NewRef(Py_None));
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) return lift(wrapped(tensor));
  Sight sight;
  if (see(tensor.unsafeGetTensorImpl(), sight)) return Ref(Py_NewRef(sight.value));
  PyObject* state = state_of(tensor);
  Ref value = value_of(state);
  Cell* cell = cell_of(tensor.unsafeGetTensorImpl());
  if (cell != nullptr && cell->state == state && Py_TYPE(state) != model.ViewState) cell->whole = geometry_of(whole(state));
  return value;
}

template <class List, class Each>
Ref tuple(const List& list, Each each) {
  Ref made(ok(PyTuple_New(list.size())));
  for (size_t i = 0; i < list.size(); i++) PyTuple_SET_ITEM(made.p, i, each(list[i]).release());
  return made;
}

Ref plain(const c10::IValue& value) {
  if (value.isNone()) return Ref(Py_NewRef(Py_None));
  if (value.isString()) return Ref(ok(PyUnicode_FromString(value.toStringRef().c_str())));
  return number(value);
}

Ref tuple_of(const c10::IValue& value) {
  if (value.isNone()) return Ref(Py_NewRef(Py_None));
  if (!value.isList()) throw Leave();
  auto items = value.toListRef();
  return tuple(items, [](const c10::IValue& item) { return plain(item); });
}

Ref canonical(Call& call, const Argument& argument, const c10::IValue& value, bool as_default) {
  switch (argument.form) {
    case Form::Tensor:
      if (value.isNone()) return Ref(Py_NewRef(Py_None));
      return tensor(value.toTensor());
    case Form::Tensors: {
      if (!value.isList()) throw Leave();
      auto items = value.toListRef();
      return tuple(items, [](const c10::IValue& item) {
        if (item.isNone()) return Ref(Py_NewRef(Py_None));
        return tensor(item.toTensor());
      });
    }
    case Form::Lifted:
      if (as_default) return Ref(Py_NewRef(argument.default_object));
      if (value.isNone()) return Ref(Py_NewRef(Py_None));
      return lift(number(value));
    case Form::LiftedAll: {
      if (!value.isList()) throw Leave();
      auto items = value.toListRef();
      return tuple(items, [](const c10::IValue& item) { return lift(number(item)); });
    }
    case Form::Plain:
      return plain(value);
    case Form::Tuple:
      return tuple_of(value);
    case Form::Dtype:
      if (value.isNone()) return Ref(Py_NewRef(Py_None));
      return Ref(Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPDtype(value.toScalarType()))));
    case Form::Layout:
      if (value.isNone()) return Ref(Py_NewRef(Py_None));
      return Ref(Py_NewRef(reinterpret_cast<PyObject*>(torch::getTHPLayout(value.toLayout()))));
    case Form::MemoryFormat:
      if (value.isNone()) return Ref(Py_NewRef(Py_None));
      return Ref(Py_NewRef(torch::utils::getTHPMemoryFormat(value.toMemoryFormat())));
    case Form::Device: {
      if (value.isNone()) {  // as the first tensor's
        if (!call.at(0).isTensor()) throw Leave();
        return Ref(ok(THPDevice_New(call.at(0).toTensor().device())));
      }
      auto device = value.toDevice();
      if (device.type() != c10::DeviceType::PrivateUse1 || !device.has_index()) throw Leave();
      return Ref(ok(THPDevice_New(device)));
    }
    case Form::Dropped:
      return Ref(Py_NewRef(Py_None));
  }
  throw Leave();
}

// Let Python see the numbers that were lifted without it.
void flush_numbers() {
  for (const c10::IValue& value : lifted) ok(PyList_Append(model.numbers, number(value).p));
  lifted.clear();
}

}  // namespace
