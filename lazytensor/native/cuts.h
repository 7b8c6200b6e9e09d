// What a cut does for each state (lazytensor/execute/cut.py), and the way of `.item()` into Python.  Part of recorder.cpp.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "arguments.h"
#include "cells.h"
#include "objects.h"
#include "states.h"

namespace {

// The object behind a weak reference, or none.
Ref held(PyObject* reference) {
  PyObject* found = nullptr;
  if (PyWeakref_Check(reference)) ok(PyWeakref_GetRef(reference, &found));
  return Ref(found);
}

// adopt(): let Python have the states and numbers that only C++ knew of.
PyObject* adopt(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  flush_numbers();
  for (size_t i = 0; i < pending.size(); i++)
    if (!pending[i]->gone.load(std::memory_order_acquire)) state_in(pending[i]);
  look_through_pending();
  free_unused();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// state(storage): the state of a whole storage, which may be known to C++ alone; None if it has none.
PyObject* state(PyObject*, PyObject* storage) {
  HANDLE_TH_ERRORS
  const c10::Storage& memory = THPStorage_Unpack(storage);
  bool ours = memory && memory.device_type() == c10::DeviceType::PrivateUse1;
  Cell* cell = ours ? cell_of(memory.unsafeGetStorageImpl()) : nullptr;
  return cell == nullptr ? Py_NewRef(Py_None) : Py_NewRef(state_in(cell));
  END_HANDLE_TH_ERRORS
}

// view(tensor): the state of the part of a storage that a tensor sees, if C++ made that view; None if it did not.
PyObject* view(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  const at::Tensor& seen = THPVariable_Unpack(tensor);
  Cell* cell = cell_of(seen.unsafeGetTensorImpl());
  Ref found = cell == nullptr ? Ref() : known_view(seen, state_in(cell));
  return found.p == nullptr ? Py_NewRef(Py_None) : found.release();
  END_HANDLE_TH_ERRORS
}

// A state that waits for a value, and what decides its place among the results of a cut: what it is worth and which leaf it
// was, not who made it when.
struct Waiting {
  long long seq, index, leaf;
  PyObject *state, *value, *number;
  bool operator<(const Waiting& other) const {
    return std::tie(seq, index, leaf) < std::tie(other.seq, other.index, other.leaf);
  }
};

// collect(): the states that wait for a value, the views, these values, and the data leaf that each state was or None.
PyObject* collect(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Ref views(ok(PyList_New(0))), held_states(ok(PyList_New(0)));
  std::vector<Waiting> waiting;
  Py_ssize_t position = 0;
  PyObject* reference;
  while (PyDict_Next(model.live, &position, &reference, nullptr)) {
    Ref state = held(reference);
    if (state.p == nullptr) continue;
    if (Py_TYPE(state.p) == model.ViewState) {
      ok(PyList_Append(views.p, state.p));
      continue;
    }
    PyObject* value = slot(state.p, model.state_value);
    if (absent(value) || slot(value, model.value_leaf) == Py_True) continue;
    PyObject* number = slot(state.p, model.state_number);
    if (number == nullptr) number = Py_None;
    ok(PyList_Append(held_states.p, state.p));
    waiting.push_back({PyLong_AsLongLong(slot(slot(value, model.value_node), model.node_seq)),
                       PyLong_AsLongLong(slot(value, model.value_index)),
                       number == Py_None ? -1 : PyLong_AsLongLong(number), state.p, value, number});
  }
  std::stable_sort(waiting.begin(), waiting.end());
  Py_ssize_t count = waiting.size();
  Ref states(ok(PyList_New(count))), values(ok(PyList_New(count))), numbers(ok(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyList_SET_ITEM(states.p, i, Py_NewRef(waiting[i].state));
    PyList_SET_ITEM(values.p, i, Py_NewRef(waiting[i].value));
    PyList_SET_ITEM(numbers.p, i, Py_NewRef(waiting[i].number));
  }
  return PyTuple_Pack(4, states.p, views.p, values.p, numbers.p);
  END_HANDLE_TH_ERRORS
}

// install_results(states, results): let each state have its result; False, and nothing done, if one is a failure.
PyObject* install_results(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *states, *given;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &states, &given)) return nullptr;
  Ref results(ok(PySequence_Fast(given, "results are a list or a tuple")));
  Py_ssize_t count = PySequence_Fast_GET_SIZE(results.p);
  for (Py_ssize_t i = 0; i < count; i++)
    if (reinterpret_cast<PyObject*>(Py_TYPE(PySequence_Fast_GET_ITEM(results.p, i))) == model.Failure) Py_RETURN_FALSE;
  if (count < PyList_GET_SIZE(states)) Py_RETURN_FALSE;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(states); i++) {
    PyObject* state = PyList_GET_ITEM(states, i);
    if (absent(slot(state, model.state_spec)))
      set_slot(state, model.state_spec, slot(slot(state, model.state_value), model.value_spec));
    set_slot(state, model.state_data, PySequence_Fast_GET_ITEM(results.p, i));
    set_slot(state, model.state_value, Py_None);
  }
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

// forget(views): begin a new trace, in which leaves are numbered anew.
PyObject* forget(PyObject*, PyObject* views) {
  HANDLE_TH_ERRORS
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(model.leaf_states); i++) {
    Ref state = held(PyList_GET_ITEM(model.leaf_states, i));
    if (state.p == nullptr) continue;
    set_slot(state.p, model.state_number, Py_None);
    PyObject* value = slot(state.p, model.state_value);
    if (!absent(value) && slot(value, model.value_leaf) == Py_True) set_slot(state.p, model.state_value, Py_None);
  }
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(views); i++) set_slot(PyList_GET_ITEM(views, i), model.state_value, Py_None);
  PyDict_Clear(model.live);
  for (PyObject* list : {model.numbers, model.leaf_data, model.leaf_states, model.effects})
    ok(PyList_SetSlice(list, 0, PyList_GET_SIZE(list), nullptr));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// `.item()`, `bool()`, `float()`: Python finds the data, after a cut if need be, and C++ reads it.
class Reader final : public c10::OperatorKernel {
 public:
  explicit Reader(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return python.callBoxed(op, keys, stack);
    pybind11::gil_scoped_acquire gil;
    static PyObject* const cause = PyUnicode_InternFromString("item");
    Ref shell(ok(THPVariable_Wrap(stack->back().toTensor())));
    Ref data(ok(PyObject_CallFunctionObjArgs(model.data_of, shell.p, cause, nullptr)));
    at::Tensor found = THPVariable_Unpack(data.p);
    stack->pop_back();
    stack->emplace_back(found.item());
  }

 private:
  c10::SafeKernelFunction python;
};

void install_reader() {
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow("aten::_local_scalar_dense", "");
  auto reader = std::make_unique<Reader>(op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1));
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(  // never taken back
      op.operator_name(), c10::DispatchKey::PrivateUse1,
      c10::KernelFunction::makeFromBoxedFunctor<Reader>(std::move(reader)), std::nullopt, nullptr, "lazytensor"));
}

}  // namespace
