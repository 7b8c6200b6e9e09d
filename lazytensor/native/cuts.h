// What a cut does for each state (lazytensor/execute/cut.py), and the way of `.item()` into Python.  Part of recorder.cpp.

#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>

#include "arguments.h"
#include "cells.h"
#include "jobs.h"
#include "lines.h"
#include "objects.h"
#include "states.h"

namespace {

// The object behind a weak reference, or none.
Ref held(PyObject* reference) {
  PyObject* found = nullptr;
  if (PyWeakref_Check(reference)) ok(PyWeakref_GetRef(reference, &found));
  return Ref(found);
}

void adopt_all() {
  flush_numbers();
  for (size_t i = 0; i < pending.size(); i++)
    if (!pending[i]->gone.load(std::memory_order_acquire)) state_in(pending[i]);
  look_through_pending();
  free_unused();
}

// adopt(): let Python have the states and numbers that only C++ knew of.
PyObject* adopt(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  adopt_all();
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

// What a cut works on.
struct Pending {
  std::vector<Waiting> waiting;  // in the order of the results
  Ref views{ok(PyList_New(0))};
  Ref held{ok(PyList_New(0))};  // the states that wait
};

Pending gather() {
  Pending found;
  Py_ssize_t position = 0;
  PyObject* reference;
  while (PyDict_Next(model.live, &position, &reference, nullptr)) {
    Ref state = held(reference);
    if (state.p == nullptr) continue;
    if (Py_TYPE(state.p) == model.ViewState) {
      ok(PyList_Append(found.views.p, state.p));
      continue;
    }
    PyObject* value = slot(state.p, model.state_value);
    if (absent(value) || slot(value, model.value_leaf) == Py_True) continue;
    PyObject* number = slot(state.p, model.state_number);
    if (number == nullptr) number = Py_None;
    ok(PyList_Append(found.held.p, state.p));
    found.waiting.push_back({PyLong_AsLongLong(slot(slot(value, model.value_node), model.node_seq)),
                             PyLong_AsLongLong(slot(value, model.value_index)),
                             number == Py_None ? -1 : PyLong_AsLongLong(number), state.p, value, number});
  }
  std::stable_sort(found.waiting.begin(), found.waiting.end());
  return found;
}

// collect(): the states that wait for a value, the views, these values, and the data leaf that each state was or None.
PyObject* collect(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Pending found = gather();
  Py_ssize_t count = found.waiting.size();
  Ref states(ok(PyList_New(count))), values(ok(PyList_New(count))), numbers(ok(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyList_SET_ITEM(states.p, i, Py_NewRef(found.waiting[i].state));
    PyList_SET_ITEM(values.p, i, Py_NewRef(found.waiting[i].value));
    PyList_SET_ITEM(numbers.p, i, Py_NewRef(found.waiting[i].number));
  }
  return PyTuple_Pack(4, states.p, found.views.p, values.p, numbers.p);
  END_HANDLE_TH_ERRORS
}

void install_result(PyObject* state, PyObject* result) {
  if (absent(slot(state, model.state_spec)))
    set_slot(state, model.state_spec, slot(slot(state, model.state_value), model.value_spec));
  set_slot(state, model.state_data, result);
  set_slot(state, model.state_value, Py_None);
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
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(states); i++)
    install_result(PyList_GET_ITEM(states, i), PySequence_Fast_GET_ITEM(results.p, i));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

void begin_trace(PyObject* views) {
  if (noting) note_trace();
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
}

// forget(views): begin a new trace, in which leaves are numbered anew.
PyObject* forget(PyObject*, PyObject* views) {
  HANDLE_TH_ERRORS
  begin_trace(views);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// The inputs of a route (see `again`), which are what lies behind these leaves; false if one is not there as a tensor.
bool inputs_of(PyObject* route, std::vector<at::Tensor>& inputs) {
  PyObject *data = PyTuple_GET_ITEM(route, 1), *floats = PyTuple_GET_ITEM(route, 2), *ints = PyTuple_GET_ITEM(route, 3);
  auto leaf = [](PyObject* leaves, PyObject* list, Py_ssize_t i) {
    Py_ssize_t number = PyLong_AsSsize_t(PyTuple_GET_ITEM(leaves, i));
    return number < PyList_GET_SIZE(list) ? PyList_GET_ITEM(list, number) : nullptr;
  };
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(data); i++) {
    PyObject* found = leaf(data, model.leaf_data, i);
    if (found == nullptr || !THPVariable_CheckExact(found)) return false;  // a future, or data in a backend's own memory
    inputs.push_back(THPVariable_Unpack(found));
  }
  std::vector<double> reals;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(floats); i++) {
    PyObject* found = leaf(floats, model.numbers, i);
    if (found == nullptr || !PyFloat_Check(found)) return false;
    reals.push_back(PyFloat_AS_DOUBLE(found));
  }
  std::vector<int64_t> integers;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(ints); i++) {
    PyObject* found = leaf(ints, model.numbers, i);
    int overflow = 1;
    if (found != nullptr && PyLong_Check(found)) integers.push_back(PyLong_AsLongLongAndOverflow(found, &overflow));
    if (overflow != 0) return false;
  }
  if (!reals.empty()) inputs.push_back(at::tensor(reals, at::kDouble));
  if (!integers.empty()) inputs.push_back(at::tensor(integers, at::kLong));
  return true;
}

// again(backend, computations, brief_only): a cut that was made before, on this thread by compiled code, from collecting what is pending to
// the new trace in one go.  None, and nothing done, if there is no such one, or if it failed: Python makes the cut then.
// Else the computation, the number of its results, and how many seconds it took to collect, run and install them.
//
// How to run a computation is its route, which cut.py notes after it ran: (code, data leaves, floats, integers, whether on one core since
// it is brief).
PyObject* again(PyObject*, PyObject* const* arguments, Py_ssize_t) {
  HANDLE_TH_ERRORS
  using Clock = std::chrono::steady_clock;
  auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
  auto started = Clock::now();
  PyObject *backend = arguments[0], *computations = arguments[1];
  bool brief_only = arguments[2] == Py_True;
  adopt_all();
  sweep();
  if (PyList_GET_SIZE(model.effects) > 0) Py_RETURN_NONE;
  Pending found = gather();
  Py_ssize_t count = found.waiting.size();
  Ref key(ok(PyTuple_New(1 + 2 * count)));
  PyTuple_SET_ITEM(key.p, 0, Py_NewRef(backend));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyTuple_SET_ITEM(key.p, 1 + i, Py_NewRef(found.waiting[i].value));
    PyTuple_SET_ITEM(key.p, 1 + count + i, Py_NewRef(found.waiting[i].number));
  }
  Ref computation(Py_XNewRef(PyDict_GetItemWithError(computations, key.p)));
  if (computation.p == nullptr) {
    if (PyErr_Occurred()) throw python_error();
    Py_RETURN_NONE;
  }
  Ref route(Py_XNewRef(slot(computation.p, model.computation_route)));
  if (absent(route.p)) Py_RETURN_NONE;
  bool alone = PyTuple_GET_ITEM(route.p, 4) == Py_True;
  if (brief_only && !alone) Py_RETURN_NONE;
  std::vector<at::Tensor> inputs, results;
  if (!inputs_of(route.p, inputs)) Py_RETURN_NONE;
  auto collected = Clock::now();
  if (!run_here(PyTuple_GET_ITEM(route.p, 0), inputs, results, alone)) {
    set_slot(computation.p, model.computation_route, Py_None);
    Py_RETURN_NONE;
  }
  auto ran = Clock::now();
  for (Py_ssize_t i = 0; i < count; i++) {
    Ref result(ok(THPVariable_Wrap(std::move(results[i]))));
    install_result(found.waiting[i].state, result.p);
  }
  begin_trace(found.views.p);
  return Py_BuildValue("Onddd", computation.p, count, seconds(collected - started), seconds(ran - collected),
                       seconds(Clock::now() - ran));
  END_HANDLE_TH_ERRORS
}

// The state of a tensor that sees all of its storage; none if it sees a part, or if it takes Python to know.
PyObject* whole_state(const at::Tensor& tensor) {
  Cell* cell = cell_of(tensor.unsafeGetTensorImpl());
  if (cell == nullptr || cell->whole == nullptr || !looks_like(tensor.unsafeGetTensorImpl(), cell->whole)) return nullptr;
  PyObject* state = state_in(cell);
  if (Py_TYPE(state) == model.ViewState) return nullptr;  // the storage was given another base
  PyObject *spec = slot(state, model.state_spec), *value = slot(state, model.state_value);
  if (absent(spec)) spec = absent(value) ? nullptr : slot(value, model.value_spec);
  return spec == cell->whole->spec ? state : nullptr;
}

// `.item()`, `bool()`, `float()`: Python finds the data, after a cut if need be, and C++ reads it.
class Reader final : public c10::OperatorKernel {
 public:
  explicit Reader(c10::SafeKernelFunction python) : python(std::move(python)) {}

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return python.callBoxed(op, keys, stack);
    Hold lock;
    static PyObject* const cause = PyUnicode_InternFromString("item");
    const at::Tensor& tensor = stack->back().toTensor();
    PyObject* state = pthread_equal(pthread_self(), owner) ? whole_state(tensor) : nullptr;
    Ref seen(state != nullptr ? Py_NewRef(state) : ok(THPVariable_Wrap(tensor)));
    PyObject* read = state != nullptr ? model.data_in : model.data_of;
    Ref data(ok(PyObject_CallFunctionObjArgs(read, seen.p, cause, nullptr)));
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
