// What a function needs that is recorded as a whole (lazytensor/functions): the values of its tensors, and tensors for its
// results.  Part of recorder.cpp.

#pragma once

#include <c10/core/GradMode.h>

#include "arguments.h"
#include "cells.h"
#include "objects.h"
#include "states.h"

namespace {

// key_of(tensors): how many numbers have been lifted, and what each tensor is worth; None if one is none of ours or needs gradients.
PyObject* key_of(PyObject*, PyObject* tensors) {
  HANDLE_TH_ERRORS
  bool gradients = c10::GradMode::is_enabled();
  Py_ssize_t count = PyTuple_GET_SIZE(tensors);
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* each = PyTuple_GET_ITEM(tensors, i);
    if (!THPVariable_Check(each)) Py_RETURN_NONE;
    const at::Tensor& tensor = THPVariable_Unpack(each);
    if (tensor.device().type() != c10::DeviceType::PrivateUse1 || tensor.key_set().has(c10::DispatchKey::Python) ||
        (gradients && tensor.requires_grad()))
      Py_RETURN_NONE;
  }
  flush_numbers();
  Ref key(ok(PyTuple_New(count + 1)));
  PyTuple_SET_ITEM(key.p, 0, ok(PyLong_FromSsize_t(PyList_GET_SIZE(model.numbers))));
  try {
    for (Py_ssize_t i = 0; i < count; i++)
      PyTuple_SET_ITEM(key.p, i + 1, tensor(THPVariable_Unpack(PyTuple_GET_ITEM(tensors, i))).release());
  } catch (const Leave&) {
    Py_RETURN_NONE;
  }
  return key.release();
  END_HANDLE_TH_ERRORS
}

// keep(values): results that are given out again and again.
PyObject* keep(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  Known* known = new Known;
  known->key = Py_NewRef(values);
  known->entry = Py_NewRef(values);
  known->users = 1;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(values); i++) {
    PyObject* value = PyTuple_GET_ITEM(values, i);
    known->results.push_back({geometry_of(slot(value, model.value_spec)), value});
  }
  return PyCapsule_New(known, nullptr, [](PyObject* capsule) { release(static_cast<Known*>(PyCapsule_GetPointer(capsule, nullptr))); });
  END_HANDLE_TH_ERRORS
}

// give(kept): a list of new tensors with these values.
PyObject* give(PyObject*, PyObject* kept) {
  HANDLE_TH_ERRORS
  Known* known = static_cast<Known*>(PyCapsule_GetPointer(kept, nullptr));
  if (known == nullptr) return nullptr;
  Ref tensors(ok(PyList_New(known->results.size())));
  for (size_t i = 0; i < known->results.size(); i++)
    PyList_SET_ITEM(tensors.p, i, ok(THPVariable_Wrap(make(known, known->results[i]))));
  return tensors.release();
  END_HANDLE_TH_ERRORS
}

}  // namespace
