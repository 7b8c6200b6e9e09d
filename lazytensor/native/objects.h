// The objects of lazytensor.trace as C++ sees them, and how they are held and read.  Part of recorder.cpp.

#pragma once

#include <optional>

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/utils/pythoncapi_compat.h>

namespace {

// --- references and errors -------------------------------------------------------------------------------------------

// A reference that is given back at the end of its scope.
struct Ref {
  PyObject* p = nullptr;
  Ref() = default;
  explicit Ref(PyObject* owned) : p(owned) {}
  Ref(Ref&& other) noexcept : p(other.p) { other.p = nullptr; }
  Ref& operator=(Ref&& other) noexcept { std::swap(p, other.p); return *this; }
  Ref(const Ref&) = delete;
  ~Ref() { Py_XDECREF(p); }
  PyObject* release() { PyObject* out = p; p = nullptr; return out; }
};

// A Python call that raised: the error is on its way to the program.
PyObject* ok(PyObject* result) {
  if (result == nullptr) throw python_error();
  return result;
}
void ok(int status) {
  if (status < 0) throw python_error();
}

// The call is for the Python kernel.
struct Leave {};

// Holds the interpreter's lock, which this thread may have already; pybind11's takes three times the instructions, for every call
// that is new.
class Hold {
 public:
  Hold() : thread(PyGILState_GetThisThreadState()) {
    if (thread == nullptr) other.emplace();
    else if (!PyGILState_Check()) PyEval_RestoreThread(thread), took = true;
  }
  ~Hold() {
    if (took) PyEval_SaveThread();
  }
  Hold(const Hold&) = delete;

 private:
  PyThreadState* thread;
  bool took = false;
  std::optional<pybind11::gil_scoped_acquire> other;  // of a thread that Python does not know
};

// --- what the Python side hands over (names as in lazytensor.trace) ---------------------------------------------------

struct {
  PyTypeObject *State, *ViewedState, *ViewState, *Value, *Node, *Spec;
  PyObject *DATA, *LEAF;
  PyObject *fresh, *numbers, *rows, *leaf_data, *leaf_states, *data_leaves, *specs;  // containers that are emptied, never replaced
  PyObject *dead, *make, *make_view, *write, *value_of_state, *aliased, *number_leaf;  // functions for the rarer cases
  PyObject *young, *old, *look, *unasked, *budget_room, *ir_globals, *made_name, *decide, *stop, *is_there;  // of what is run ahead
  PyObject *here, *Line, *module_path, *is_library, *module_call, *forward_lines, *unknown_line;  // of lines
  PyObject *live, *effects, *data_of, *data_in, *Failure;  // of cuts and reads
  PyObject *reals, *integers, *booleans;  // rows of number leaves
  Py_ssize_t most_fresh;
  // where the slots are
  Py_ssize_t state_value, state_base, state_parent, state_proto, state_spec, state_views, state_data, state_number, state_error;
  Py_ssize_t computation_route;
  Py_ssize_t value_leaf, value_index, value_spec, value_node, value_size, value_dtype, value_plain;
  Py_ssize_t node_args, node_seq, node_op, node_inputs, node_outputs, node_depth, node_line, node_mark, op_view;
  Py_ssize_t spec_size, spec_stride, spec_offset, spec_dtype, spec_bits, spec_device, spec_plain, spec_numel, spec_nbytes;
} model;

PyObject *lt_name, *class_name;
c10::Allocator* allocator;

PyObject*& slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

void set_slot(PyObject* object, Py_ssize_t offset, PyObject* value) {
  PyObject*& place = slot(object, offset);
  PyObject* old = place;
  Py_INCREF(value);
  place = value;
  Py_XDECREF(old);
}

bool absent(PyObject* object) { return object == nullptr || object == Py_None; }

}  // namespace
