// The hit path of the recording kernels, compiled: what a generated Python kernel does when its table knows the structure.
//
// A call that was seen before is found without the interpreter's lock: its arguments are words (`Recorder::words`), its results
// tensors whose values C++ keeps until Python asks for them (cells.h).  A call that is not found there is looked up in the
// tables of the Python kernels, on their states; whatever `Recorder` (kernel.h) does not know how to do, and every lookup that misses,
// is left to the Python kernel, as if this had not been there.  So it holds no policy: only how to bring arguments into
// canonical form, look the key up, and make the result, for the kinds of arguments and results that schemas have.
// lazytensor/device/recorder.py installs it.
//
// The one miss that it takes is that of an op in a step that is run as it is recorded (lazytensor/execute/ahead.py): it
// runs the op on the data of its arguments, and makes the node from what came out (births.h).
//
// All but that first way runs under the interpreter's lock.  Objects that live as long as the process are never released.

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <structmember.h>

#include "arguments.h"
#include "births.h"
#include "cells.h"
#include "cuts.h"
#include "entries.h"
#include "guard.h"
#include "kernel.h"
#include "lines.h"
#include "objects.h"
#include "states.h"
#include "wholes.h"

namespace {

// --- installation ----------------------------------------------------------------------------------------------------

// How an argument of this type is brought into canonical form; false if there is no rule for it here.
bool form_of(const c10::Argument& argument, Form& form) {
  auto type = argument.real_type();
  if (type->kind() == c10::TypeKind::OptionalType) type = type->expect<c10::OptionalType>()->getElementType();
  if (argument.name() == "pin_memory") {
    form = Form::Dropped;
    return true;
  }
  switch (type->kind()) {
    case c10::TypeKind::TensorType: form = Form::Tensor; return true;
    case c10::TypeKind::NumberType:
    case c10::TypeKind::FloatType: form = Form::Lifted; return true;
    case c10::TypeKind::IntType:
    case c10::TypeKind::SymIntType:
    case c10::TypeKind::BoolType:
    case c10::TypeKind::StringType: form = Form::Plain; return true;
    case c10::TypeKind::ScalarTypeType: form = Form::Dtype; return true;
    case c10::TypeKind::LayoutType: form = Form::Layout; return true;
    case c10::TypeKind::MemoryFormatType: form = Form::MemoryFormat; return true;
    case c10::TypeKind::DeviceObjType: form = Form::Device; return true;
    case c10::TypeKind::ListType: {
      auto element = type->expect<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::OptionalType) element = element->expect<c10::OptionalType>()->getElementType();
      switch (element->kind()) {
        case c10::TypeKind::TensorType: form = Form::Tensors; return true;
        case c10::TypeKind::NumberType: form = Form::LiftedAll; return true;
        case c10::TypeKind::IntType:
        case c10::TypeKind::SymIntType:
        case c10::TypeKind::FloatType:
        case c10::TypeKind::BoolType: form = Form::Tuple; return true;
        default: return false;
      }
    }
    default: return false;
  }
}

// How the nodes of an op are made that is run ahead, if it can be: it draws on nothing but its arguments, the geometry of its
// results does not depend on data, and if it writes, then to its first argument only.
std::optional<Maker> maker_of(const c10::OperatorHandle& op, Kind kind, const c10::OperatorHandle& made_by, PyObject* own, PyObject* table) {
  if (own == Py_None) return std::nullopt;
  for (at::Tag tag : made_by.getTags())
    if (tag == at::Tag::dynamic_output_shape || tag == at::Tag::data_dependent_output) return std::nullopt;
  const auto& returns = made_by.schema().returns();
  bool list = returns.size() == 1 && returns[0].type()->kind() == c10::TypeKind::ListType;
  if (kind == Kind::InPlace || kind == Kind::Mutable) {
    if (returns.size() != 1 || made_by.schema().arguments().size() != op.schema().arguments().size()) return std::nullopt;
    for (size_t i = 0; i < op.schema().arguments().size(); i++) {
      const auto* alias = op.schema().arguments()[i].alias_info();
      if ((alias != nullptr && alias->isWrite()) != (i == 0)) return std::nullopt;
    }
  }
  return Maker{made_by, Py_NewRef(own), Py_NewRef(table), returns.size(), list};
}

std::vector<Recorder*> recorders;

// The recorder of the view op that gave a value, or none.
Recorder* viewer_of(PyObject* value) {
  static std::unordered_map<PyObject*, Recorder*> of;  // by the op
  PyObject* op = slot(slot(value, model.value_node), model.node_op);
  auto [place, is_new] = of.try_emplace(op, nullptr);
  if (is_new) {
    for (Recorder* each : recorders)
      if (each->makes_views_of(op)) place->second = each;
  }
  return place->second;
}

Ref derived(PyObject* proto, PyObject* parent) {
  Recorder* recorder = viewer_of(proto);
  if (recorder == nullptr) return Ref();
  try {
    return recorder->derived(proto, parent);
  } catch (const Leave&) {
    return Ref();
  }
}

at::Tensor seen_again(PyObject* view) {
  Recorder* recorder = viewer_of(view);
  if (recorder == nullptr) return {};
  auto seen = recorder->seen_in(slot(slot(view, model.value_node), model.node_args));
  at::Tensor found = seen[PyLong_AsSsize_t(slot(view, model.value_index))];
  be_born(view, found, true);
  return found;
}

// install(name, overload, kind, table, made_by, made_overload, op, op_table): put the compiled hit path before the Python kernel of
// this op; `made_by` is the op whose nodes it records, and `op` that as Python knows it, or None.
PyObject* install(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  const char *name, *overload, *kind_name, *made_name, *made_overload;
  PyObject *own, *own_table, *table;
  if (!PyArg_ParseTuple(args, "sssO!ssOO!", &name, &overload, &kind_name, &PyDict_Type, &table, &made_name, &made_overload, &own,
                        &PyDict_Type, &own_table))
    return nullptr;
  std::string_view text(kind_name);
  Kind kind = text == "view" ? Kind::View : text == "inplace" ? Kind::InPlace : text == "mutable" ? Kind::Mutable : Kind::Functional;
  auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
  const auto& schema = op.schema();
  std::vector<Argument> arguments;
  bool tensors = false;
  for (const auto& each : schema.arguments()) {
    Argument argument;
    if (!form_of(each, argument.form)) Py_RETURN_FALSE;
    tensors = tensors || argument.form == Form::Tensor || argument.form == Form::Tensors;
    argument.keyword = each.kwarg_only();
    if (each.default_value().has_value()) {
      argument.has_default = true;
      argument.default_value = *each.default_value();
      if (argument.form == Form::Lifted && !argument.default_value.isNone())
        argument.default_object = torch::jit::toPyObject(argument.default_value).release().ptr();
    }
    arguments.push_back(std::move(argument));
  }
  if (!tensors || (schema.returns().empty() && kind != Kind::Mutable)) Py_RETURN_FALSE;
  for (const auto& each : schema.returns()) {
    bool list = each.type()->kind() == c10::TypeKind::ListType;
    bool tensor = each.type()->kind() == c10::TypeKind::TensorType;
    if (kind == Kind::Mutable || (!tensor && !(list && schema.returns().size() == 1 && kind != Kind::InPlace))) Py_RETURN_FALSE;
  }
  auto made_by = c10::Dispatcher::singleton().findSchemaOrThrow(made_name, made_overload);
  auto maker = maker_of(op, kind, made_by, own, own_table);
  Py_INCREF(table);
  auto recorder = std::make_unique<Recorder>(
      kind, table, std::move(arguments), op, std::move(maker), op.getComputedKernelForDispatchKey(c10::DispatchKey::PrivateUse1));
  recorders.push_back(recorder.get());
  auto shape = known_shapes().find(shape_of(schema));
  c10::KernelFunction kernel = shape != known_shapes().end() && shape->second.fits(op)
                                   ? shape->second.make(std::move(recorder), op)
                                   : c10::KernelFunction::makeFromBoxedFunctor<Recorder>(std::move(recorder));
  // Never taken back: the handle is left alive on purpose.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), c10::DispatchKey::PrivateUse1, std::move(kernel), std::nullopt, nullptr, "lazytensor"));
  Py_RETURN_TRUE;
  END_HANDLE_TH_ERRORS
}

Py_ssize_t offset_of(PyTypeObject* type, const char* name) {
  Ref found(ok(PyObject_GetAttrString(reinterpret_cast<PyObject*>(type), name)));
  if (Py_TYPE(found.p) != &PyMemberDescr_Type) throw std::runtime_error(std::string(name) + " is no slot");
  return reinterpret_cast<PyMemberDescrObject*>(found.p)->d_member->offset;
}

// begin(parts): the objects of lazytensor.trace that the kernels work on, by name.
PyObject* begin(PyObject*, PyObject* parts) {
  HANDLE_TH_ERRORS
  auto get = [&](const char* name) {
    PyObject* found = PyDict_GetItemString(parts, name);
    if (found == nullptr) throw std::runtime_error(std::string("no ") + name);
    return Py_NewRef(found);
  };
  auto type = [&](const char* name) { return reinterpret_cast<PyTypeObject*>(get(name)); };
  model.State = type("State");
  model.ViewedState = type("ViewedState");
  model.ViewState = type("ViewState");
  model.Value = type("Value");
  model.fresh = get("fresh");
  model.numbers = get("numbers");
  model.rows = get("rows");
  model.leaf_data = get("leaf_data");
  model.leaf_states = get("leaf_states");
  model.data_leaves = get("data_leaves");
  model.specs = get("specs");
  model.aliased = get("aliased");
  model.number_leaf = get("number_leaf");
  model.dead = get("dead");
  model.make = get("make");
  model.make_view = get("make_view");
  model.write = get("write");
  model.value_of_state = get("value_of_state");
  model.young = get("young");
  model.old = get("old");
  model.look = get("look");
  model.decide = get("decide");
  model.stop = get("stop");
  model.is_there = get("is_there");
  model.Spec = type("Spec");
  model.DATA = get("DATA");
  model.LEAF = get("LEAF");
  model.unasked = get("unasked");
  model.budget_room = get("budget_room");
  model.ir_globals = get("ir_globals");
  model.made_name = PyUnicode_InternFromString("_made");
  model.here = get("here");
  model.Line = get("Line");
  model.module_path = get("module_path");
  model.is_library = get("is_library");
  model.module_call = get("module_call");
  model.forward_lines = get("forward_lines");
  model.unknown_line = get("unknown_line");
  model.live = get("live");
  model.effects = get("effects");
  model.data_of = get("data_of");
  model.data_in = get("data_in");
  model.Failure = get("Failure");
  model.most_fresh = PyLong_AsSsize_t(get("FRESH"));
  model.state_value = offset_of(model.State, "value");
  model.state_base = offset_of(model.State, "base");
  model.state_parent = offset_of(model.State, "parent");
  model.state_proto = offset_of(model.State, "proto");
  model.state_spec = offset_of(model.State, "spec_");
  model.state_views = offset_of(model.State, "views_");
  model.state_data = offset_of(model.State, "data");
  model.state_number = offset_of(model.State, "number");
  model.state_error = offset_of(model.State, "error");
  auto row = [&](PyTypeObject& kind) { return ok(PyDict_GetItem(model.rows, reinterpret_cast<PyObject*>(&kind))); };
  model.reals = row(PyFloat_Type);
  model.integers = row(PyLong_Type);
  model.booleans = row(PyBool_Type);
  model.computation_route = offset_of(type("Computation"), "route");
  model.value_leaf = offset_of(model.Value, "leaf");
  model.value_index = offset_of(model.Value, "index");
  model.value_spec = offset_of(model.Value, "spec");
  model.value_node = offset_of(model.Value, "node");
  model.value_size = offset_of(model.Value, "size");
  model.value_dtype = offset_of(model.Value, "dtype");
  model.value_plain = offset_of(model.Value, "plain");
  model.Node = type("Node");
  model.node_args = offset_of(model.Node, "args");
  model.node_seq = offset_of(model.Node, "seq");
  model.node_op = offset_of(model.Node, "op");
  model.node_inputs = offset_of(model.Node, "inputs");
  model.node_outputs = offset_of(model.Node, "outputs");
  model.node_depth = offset_of(model.Node, "depth");
  model.node_line = offset_of(model.Node, "line");
  model.node_mark = offset_of(model.Node, "mark");
  model.op_view = offset_of(type("Op"), "view");
  PyTypeObject* spec = model.Spec;
  model.spec_numel = offset_of(spec, "numel");
  model.spec_nbytes = offset_of(spec, "nbytes");
  model.spec_device = offset_of(spec, "device");
  model.spec_stride = offset_of(spec, "stride");
  model.spec_offset = offset_of(spec, "offset");
  model.spec_bits = offset_of(spec, "bits");
  model.spec_size = offset_of(spec, "size");
  model.spec_dtype = offset_of(spec, "dtype");
  model.spec_plain = offset_of(spec, "plain");
  allocator = c10::GetAllocator(c10::DeviceType::Meta);
  lt_name = PyUnicode_InternFromString("_lt");
  class_name = PyUnicode_InternFromString("__class__");
  answer_in_cpp();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// --- switches ---------------------------------------------------------------------------------------------------------

// forget_calls(): look every call up in the Python tables again.
PyObject* forget_calls(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  for (Recorder* recorder : recorders) recorder->forget();
  forget_found();
  holders.clear();  // the tables that keep these values are emptied
  unseen.clear();
  free_unused();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

// enable(flag): whether the compiled path is taken; the Python kernels do everything otherwise.
PyObject* enable(PyObject*, PyObject* flag) {
  HANDLE_TH_ERRORS
  bool before = enabled;
  enabled = PyObject_IsTrue(flag) == 1;
  owner = pthread_self();
  flush_numbers();
  return PyBool_FromLong(before);
  END_HANDLE_TH_ERRORS
}

PyObject* is_enabled(PyObject*, PyObject*) { return PyBool_FromLong(enabled); }

// run_ahead(bytes): run new ops as they are recorded, and look after so many bytes who can see them; None: leave them to Python.
PyObject* run_ahead(PyObject*, PyObject* bytes) {
  HANDLE_TH_ERRORS
  switch_ahead(bytes != Py_None, bytes != Py_None ? PyLong_AsLongLong(bytes) : 0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyMethodDef methods[] = {
    {"begin", begin, METH_O, "Hand over what the kernels work on."},
    {"install", install, METH_VARARGS, "Put the compiled hit path before the Python kernel of an op; False if it cannot be."},
    {"enable", enable, METH_O, "Take the compiled path or not; returns what was."},
    {"run_ahead", run_ahead, METH_O, "Run new ops as they are recorded, or leave them to Python."},
    {"await_first", [](PyObject*, PyObject* calls) -> PyObject* {
       undecided = true;
       calls_too = calls == Py_True;
       Py_RETURN_NONE;
     }, METH_O, "Ask whether to run ahead when the next new op comes, or with True the next call."},
    {"line_of_found", line_of_found, METH_VARARGS, "The line of a call that was found before this autograd node was made, or None."},
    {"results", results, METH_O, "The data of values, if it can be handed out as it is; else None."},
    {"hand_over", hand_over, METH_NOARGS, "Let Python have what was made by ops that were run as they were recorded."},
    {"newborn", newborn_data, METH_O, "What an op gave that was run as it was recorded, if Python does not have it; else None."},
    {"ahead_seconds", [](PyObject*, PyObject*) -> PyObject* { return PyFloat_FromDouble(ahead_seconds); }, METH_NOARGS,
     "How long the ops took that were run as they were recorded."},
    {"install_reader", [](PyObject*, PyObject*) -> PyObject* {
       HANDLE_TH_ERRORS
       install_reader();
       Py_RETURN_NONE;
       END_HANDLE_TH_ERRORS
     }, METH_NOARGS, "Put the compiled read before the Python kernel of `.item()`."},
    {"adopt", adopt, METH_NOARGS, "Let Python have the states and numbers that only C++ knew of."},
    {"flush_numbers", [](PyObject*, PyObject*) -> PyObject* {
       HANDLE_TH_ERRORS
       flush_numbers();
       Py_RETURN_NONE;
       END_HANDLE_TH_ERRORS
     }, METH_NOARGS, "Let Python have the numbers that only C++ knew of."},
    {"sweep", [](PyObject*, PyObject*) -> PyObject* {
       HANDLE_TH_ERRORS
       sweep();
       Py_RETURN_NONE;
       END_HANDLE_TH_ERRORS
     }, METH_NOARGS, "Let go of the states that no tensor holds."},
    {"states_in", states_in, METH_O, "The states of the storages of those that are tensors of ours, None for the others."},
    {"user_frame", user_frame, METH_NOARGS, "The innermost frame of the user's, or None."},
    {"forget_calls", forget_calls, METH_NOARGS, "Look every call up in the Python tables again."},
    {"state", state, METH_O, "The state of a storage that C++ knows, or None."},
    {"view", view, METH_O, "The state of a tensor's view that C++ made, or None."},
    {"collect", collect, METH_NOARGS, "What waits for a value: states, views, values, data leaves."},
    {"again", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(again)), METH_FASTCALL,
     "Run everything pending by a known way; None, and nothing done, if there is none."},
    {"install_results", install_results, METH_VARARGS, "Let states have their results; False if one is a failure."},
    {"forget", forget, METH_O, "Begin a new trace."},
    {"calls_found", [](PyObject*, PyObject*) -> PyObject* { return PyLong_FromSize_t(calls_found); }, METH_NOARGS,
     "How many calls were found without Python."},
    {"key_of", key_of, METH_O, "How many numbers were lifted, and the values of a tuple of tensors; None if they are unusual."},
    {"keep", keep, METH_O, "Values that are to be given out as new tensors."},
    {"give", give, METH_O, "New tensors with values that were kept."},
    {"enabled", is_enabled, METH_NOARGS, "Whether the compiled path is taken."},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef definition = {PyModuleDef_HEAD_INIT, "native", "The hit path of the recording kernels, and the thread that runs compiled steps.", -1, methods};

}  // namespace

void add_runner(PyObject* module);       // runner.cpp
void add_interpreter(PyObject* module);  // interpreter.cpp

PyMODINIT_FUNC PyInit_native() {
  HANDLE_TH_ERRORS
  PyObject* module = PyModule_Create(&definition);
  if (module != nullptr) {
    add_runner(module);
    add_interpreter(module);
  }
  return module;
  END_HANDLE_TH_ERRORS
}
