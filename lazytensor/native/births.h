// The nodes of a step that is run as it is recorded (lazytensor/execute/ahead.py): the op is run on the data of its arguments,
// and what came out tells what the node looks like; as record._build and Mutation._in_place.  Under the interpreter's lock.
// Part of recorder.cpp.

#pragma once

#include <chrono>
#include <unordered_set>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>

#include "arguments.h"
#include "cells.h"
#include "lines.h"
#include "nodes.h"
#include "objects.h"
#include "states.h"

namespace {

double ahead_seconds = 0;   // that the ops of this trace took
int64_t young_bytes = 0;    // made since it was last looked at who can see it
int64_t most_young = 0;     // before it is
int64_t unchecked_bytes = 0;  // made since the budget was last asked
int unchecked = 0;            // nodes, likewise
int64_t room_bytes = 0;       // how much of both there may be before it has to be
int room = 0;

// What was made by value, as ahead._young, without Python objects: most of it is dropped before anybody asks.  Holds the values.
ska::flat_hash_map<PyObject*, at::Tensor> newborn;
constexpr int64_t SMALL = 16 << 10;  // bytes; so little is kept when nobody sees it: the same op may be recorded once more

bool undecided = false;  // whether this trace had no new op yet, so that nobody knows whether it is run ahead
bool calls_too = false;  // whether calls that were seen before are run ahead as well

void forget_newborn() {
  for (auto& [value, data] : newborn) Py_DECREF(value);
  newborn.clear();
}

// A trace is run ahead from now on, or no longer.
void switch_ahead(bool on, int64_t bytes) {
  ahead = on;
  undecided = false;
  forget_newborn();
  holders.clear();
  unseen.clear();
  most_young = bytes;
  young_bytes = unchecked_bytes = 0;
  unchecked = room = 0;
  if (on) ahead_seconds = 0;
  if (on) begin_to_note();
  forget_lines();
}

// --- running ---------------------------------------------------------------------------------------------------------

int64_t bytes_of(const at::Tensor& tensor) { return tensor.numel() * static_cast<int64_t>(tensor.element_size()); }

// Drop the data that no tensor can see any more, so that what is made next has its memory, which is in the caches.
void drop_unseen() {
  for (PyObject* value : unseen) {
    if (holders.count(value) > 0) continue;  // recorded once more
    auto place = newborn.find(value);
    if (place != newborn.end()) {
      int64_t bytes = bytes_of(place->second);
      if (bytes < SMALL) continue;
      if (slot(slot(slot(value, model.value_node), model.node_op), model.op_view) != Py_True) young_bytes -= bytes;
      newborn.erase(place);
      Py_DECREF(value);
      continue;
    }
    for (PyObject* rest : {model.young, model.old}) {
      PyObject* data = PyDict_GetItem(rest, value);
      if (data != nullptr && bytes_of(THPVariable_Unpack(data)) >= SMALL) ok(PyDict_DelItem(rest, value));
    }
  }
  unseen.clear();
}

// The data of a value that is a view, made once more; none if that is for Python.
at::Tensor seen_again(PyObject* view);  // recorder.cpp

// The data of a value, if it is there, or nothing but a view of what is; as execute.ahead._data.
at::Tensor data_of(PyObject* value) {
  if (Py_TYPE(value) != model.Value || PyLong_AsLong(slot(slot(value, model.value_spec), model.spec_device)) != 0) throw Leave();
  auto place = newborn.find(value);
  if (place != newborn.end()) return place->second;
  PyObject* found;
  if (slot(value, model.value_leaf) == Py_True) {
    PyObject* number = PyTuple_GET_ITEM(slot(slot(value, model.value_node), model.node_args), 1);
    found = PyList_GET_ITEM(model.leaf_data, PyLong_AsSsize_t(number));
  } else {
    found = PyDict_GetItem(model.young, value);
    if (found == nullptr) found = PyDict_GetItem(model.old, value);
  }
  if (found != nullptr && THPVariable_Check(found)) return THPVariable_Unpack(found);
  at::Tensor seen = seen_again(value);
  if (!seen.defined()) throw Leave();
  return seen;
}

// A tensor argument as the CPU takes it; `canonical` is what it was recorded as.
at::Tensor on_cpu(const at::Tensor& tensor, PyObject* canonical) {
  return tensor.defined() && !tensor.unsafeGetTensorImpl()->is_wrapped_number() ? data_of(canonical) : tensor;
}

c10::IValue on_cpu(Form form, const c10::IValue& value, PyObject* canonical) {
  if (form == Form::Tensor && value.isTensor()) return on_cpu(value.toTensor(), canonical);
  if (form == Form::Device && !value.isNone()) return c10::Device(c10::DeviceType::CPU);
  if (form != Form::Tensors) return value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& each : value.toTensorVector()) list.push_back(on_cpu(each, PyTuple_GET_ITEM(canonical, list.size())));
    return list;
  }
  c10::List<std::optional<at::Tensor>> list;
  for (const std::optional<at::Tensor>& each : value.toOptionalTensorVector()) {
    if (each) list.push_back(on_cpu(*each, PyTuple_GET_ITEM(canonical, list.size())));
    else list.push_back(std::nullopt);
  }
  return list;
}

// Whether an op takes so little data that it is done before the interpreter's lock could be handed over and back.
bool is_brief(const Stack& stack) {
  int64_t bytes = 0;
  for (const c10::IValue& each : stack) {
    if (each.isList()) return false;
    if (each.isTensor() && each.toTensor().defined()) bytes += bytes_of(each.toTensor());
  }
  return bytes < SMALL;
}

// Run an op on the CPU, where neither autograd nor autocast of the program reach it.
void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  std::optional<pybind11::gil_scoped_release> release;
  if (!is_brief(*stack)) release.emplace();
  at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
  auto start = std::chrono::steady_clock::now();
  try {
    op.callBoxed(stack);
  } catch (const std::exception&) {  // Python will find out what it is
    throw Leave();
  }
  ahead_seconds += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

// What makes the nodes of an op that is run ahead: itself, or for one that writes its functional form.
struct Maker {
  c10::OperatorHandle handle;
  PyObject *op, *table;  // as Python has them
  size_t returns;
  bool returns_list;
  PyObject* plain_name = nullptr;           // under which lines are noted
  std::vector<const Geometry*> looks = {};  // what its last results looked like
};

// --- results ---------------------------------------------------------------------------------------------------------

// Keep the data of a value.
void be_born(PyObject* value, const at::Tensor& data, bool view) {
  auto [place, is_new] = newborn.insert_or_assign(value, data);
  if (is_new) Py_INCREF(value);
  int64_t bytes = bytes_of(data);
  if (!view) young_bytes += bytes;
  unchecked_bytes += bytes;
}

// Give a node its outputs, whose data is this, and keep that.
PyObject* set_outputs(PyObject* node, c10::ArrayRef<at::Tensor> made, bool view, std::vector<const Geometry*>& looks) {
  looks.resize(std::max(looks.size(), made.size()));
  Ref outputs(ok(PyTuple_New(made.size())));
  for (size_t i = 0; i < made.size(); i++) {
    if (!made[i].defined()) {
      PyTuple_SET_ITEM(outputs.p, i, Py_NewRef(Py_None));
      continue;
    }
    Ref value = new_value(node, i, spec_of(made[i], looks[i]));
    be_born(value.p, made[i], view);
    PyTuple_SET_ITEM(outputs.p, i, value.release());
  }
  unchecked++;
  ok(PyList_Append(model.unasked, node));
  put(node, model.node_outputs, Ref(Py_NewRef(outputs.p)));
  return outputs.p;  // the node holds it
}

// --- ops that write --------------------------------------------------------------------------------------------------

// The value whose memory this one sees; as shapes.root.
PyObject* root(PyObject* value) {
  while (true) {
    PyObject* node = slot(value, model.value_node);
    if (slot(slot(node, model.node_op), model.op_view) != Py_True) return value;
    value = PyTuple_GET_ITEM(slot(node, model.node_args), 0);
  }
}

// The values that are written, one or a list.
Values written_values(PyObject* target) {
  Values targets;
  if (PyTuple_Check(target)) values_in(target, targets);
  else if (Py_TYPE(target) == model.Value) targets.push_back(target);
  return targets;
}

// Whether what is written lies in its memory as usual, where no two elements have one place.
bool are_plain(PyObject* target) {
  Values targets = written_values(target);
  return !targets.empty() && std::all_of(targets.begin(), targets.end(), [](PyObject* each) {
    return slot(slot(each, model.value_spec), model.spec_plain) == Py_True;
  });
}

// Whether nothing that is written shares memory, with itself or with another argument, as far as values tell; as
// shapes.suspicions, but for geometries that are not plain, of which nothing is said here.
bool apart(PyObject* args, PyObject* target) {
  if (!are_plain(target)) return false;
  Values targets = written_values(target), all;
  std::unordered_set<PyObject*> roots;
  for (PyObject* each : targets)
    if (!roots.insert(root(each)).second) return false;
  values_in(args, all);
  size_t seen = 0;
  for (PyObject* each : all) seen += roots.count(root(each));
  return seen == targets.size();
}

// Whether a value can be written as it is; as record._fits.
bool fits(PyObject* value, PyObject* written) {
  return Py_TYPE(value) == model.Value && Py_TYPE(written) == model.Value &&
         slot(value, model.value_spec) == slot(written, model.value_spec) && slot(value, model.value_leaf) != Py_True &&
         slot(slot(slot(value, model.value_node), model.node_op), model.op_view) != Py_True;
}

// --- bounds ----------------------------------------------------------------------------------------------------------

// Drop what no tensor can see any more, if much was made; as ahead.keep.
void look_at_young() {
  if (young_bytes <= most_young) return;
  young_bytes = 0;
  Ref(ok(PyObject_CallNoArgs(model.look)));
}

// hand_over(): let Python have what was made, in ahead._young.
PyObject* hand_over(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (auto& [value, data] : newborn) ok(PyDict_SetItem(model.young, value, Ref(ok(THPVariable_Wrap(data))).p));
  forget_newborn();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// newborn(value): its data, if it was made and not handed over yet; else None.
PyObject* newborn_data(PyObject*, PyObject* value) {
  HANDLE_TH_ERRORS
  auto place = newborn.find(value);
  return place == newborn.end() ? Py_NewRef(Py_None) : THPVariable_Wrap(place->second);
  END_HANDLE_TH_ERRORS
}

// results(values): the data of each of these values, if it was made here, is laid out as declared, and has memory of its own, apart
// from that of the trace's data; else None.  As execute.ahead.results.
PyObject* results(PyObject*, PyObject* values) {
  HANDLE_TH_ERRORS
  std::unordered_set<const void*> taken;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(model.leaf_data); i++) {
    PyObject* data = PyList_GET_ITEM(model.leaf_data, i);
    if (!THPVariable_CheckExact(data)) continue;
    const at::Tensor& tensor = THPVariable_Unpack(data);
    if (tensor.has_storage()) taken.insert(tensor.storage().data());
  }
  Py_ssize_t count = PyList_GET_SIZE(values);
  Ref found(ok(PyList_New(count)));
  for (Py_ssize_t i = 0; i < count; i++) {
    PyObject* value = PyList_GET_ITEM(values, i);
    auto place = newborn.find(value);
    if (place == newborn.end()) Py_RETURN_NONE;
    const at::Tensor& tensor = place->second;
    const Geometry* wanted = geometry_of(slot(value, model.value_spec));
    const void* memory = tensor.storage().data();
    bool own = wanted->plain && tensor.sizes() == c10::IntArrayRef(wanted->size) && tensor.is_contiguous() && tensor.storage_offset() == 0 &&
               !tensor.is_conj() && !tensor.is_neg() && tensor.storage().nbytes() == tensor.nbytes();
    if (!own || !taken.insert(memory).second) Py_RETURN_NONE;
    PyList_SET_ITEM(found.p, i, ok(THPVariable_Wrap(tensor)));
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// Ask whether what is pending, with this new table entry, is over the budget; may cut.
void check_budget(PyObject* entry) {
  if (unchecked <= room && unchecked_bytes <= room_bytes) return;
  Ref answer(ok(PyObject_CallFunction(model.budget_room, "OL", entry, static_cast<long long>(unchecked_bytes))));
  unchecked = 0;
  unchecked_bytes = 0;
  room = static_cast<int>(PyLong_AsLong(PyTuple_GET_ITEM(answer.p, 0)));
  room_bytes = PyLong_AsLongLong(PyTuple_GET_ITEM(answer.p, 1));
}

}  // namespace
