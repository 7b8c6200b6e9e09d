// The line of the user's program that is running, for the nodes that C++ makes; as lazytensor/trace/source.py finds it.
//
// A line is found again by where it is: the frame's code and instruction, and the modules that are being called, or in
// backward the forward line; most are new, and made here.  The path of a module is Python's to find, once for each.  What is
// remembered lasts until the end of the trace, since code and modules may die and others take their addresses.  A backward op
// whose forward op was not new has the line of the call that was, if that is noted too, and else is left to Python.
// Part of recorder.cpp.

#pragma once

#include <array>
#include <string>
#include <typeindex>
#include <unordered_map>

#include <ATen/SequenceNumber.h>
#include <frameobject.h>
#include <torch/csrc/autograd/function.h>

#include "cells.h"
#include "objects.h"

// The interpreter's own frames in 3.11, see Frame.  (PyFrame_GetVar came with 3.12, too: what stands in for it makes a dictionary
// of all locals, for every operation.)
#if PY_VERSION_HEX < 0x030C0000
#define Py_BUILD_CORE
#include <internal/pycore_frame.h>
#undef Py_BUILD_CORE
#endif

namespace {

using Place = std::array<uint64_t, 4>;

struct PlaceHash {
  size_t operator()(const Place& place) const {
    uint64_t hash = 0;
    for (uint64_t word : place) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 29;
    }
    return hash;
  }
};

struct Found {
  PyObject* line;
  PyObject* kept[2];  // the code, and the forward line
  PyObject* weak[2];  // to the modules, which must not be held
  void release() {
    Py_DECREF(line);
    for (PyObject* each : kept) Py_XDECREF(each);
    for (PyObject* each : weak) Py_XDECREF(each);
  }
};

std::unordered_map<Place, Found, PlaceHash> lines;  // and the paths of modules
ska::flat_hash_map<PyObject*, bool> library;  // the name of a file -> whether it is PyTorch's, ours, or Python's
constexpr size_t MOST_FILES = 10000;          // before they are asked for again: code can be made under ever new names

template <class T>
uint64_t word_of(T* object) { return reinterpret_cast<uint64_t>(object); }

// A trace ends.
void forget_lines() {
  for (auto& [place, found] : lines) found.release();
  lines.clear();
}

bool is_library(PyObject* code) {
  PyObject* path = reinterpret_cast<PyCodeObject*>(code)->co_filename;
  auto found = library.find(path);
  if (found != library.end()) return found->second;
  bool ours = Ref(ok(PyObject_CallOneArg(model.is_library, path))).p == Py_True;
  if (library.size() >= MOST_FILES) {
    for (auto& [name, known] : library) Py_DECREF(name);
    library.clear();
  }
  library.emplace(Py_NewRef(path), ours);
  return ours;
}

// --- frames

#if PY_VERSION_HEX < 0x030C0000
// A frame of the interpreter itself, borrowed: what is below this code stays as it is while this code runs.  A frame object is
// made when Python has to see it.
struct Frame {
  _PyInterpreterFrame* p = nullptr;
  static Frame innermost() { return complete(PyThreadState_Get()->cframe->current_frame); }
  static Frame complete(_PyInterpreterFrame* frame) {
    while (frame != nullptr && _PyFrame_IsIncomplete(frame)) frame = frame->previous;
    return {frame};
  }
  Frame back() const { return complete(p->previous); }
  PyObject* code() const { return reinterpret_cast<PyObject*>(p->f_code); }
  uint64_t instruction() const { return reinterpret_cast<uint64_t>(p->prev_instr); }
  // The first argument of the function.
  Ref first() const { return Ref(Py_NewRef(p->localsplus[0])); }
  Ref object() const {
    Ref frame(Py_XNewRef(reinterpret_cast<PyObject*>(PyEval_GetFrame())));
    while (frame.p != nullptr && reinterpret_cast<PyFrameObject*>(frame.p)->f_frame != p)
      frame = Ref(reinterpret_cast<PyObject*>(PyFrame_GetBack(reinterpret_cast<PyFrameObject*>(frame.p))));
    return frame;
  }
  explicit operator bool() const { return p != nullptr; }
};
#else
// As above, with frame objects.
struct Frame {
  Ref held;
  PyObject* code_ = nullptr;  // the frame holds it
  Frame() = default;
  explicit Frame(PyFrameObject* owned) : held(reinterpret_cast<PyObject*>(owned)) {
    if (owned != nullptr) code_ = Ref(reinterpret_cast<PyObject*>(PyFrame_GetCode(owned))).p;
  }
  Frame(const Frame& other) : held(Py_XNewRef(other.held.p)), code_(other.code_) {}
  Frame(Frame&&) = default;
  Frame& operator=(Frame other) {
    std::swap(held.p, other.held.p);
    code_ = other.code_;
    return *this;
  }
  static Frame innermost() { return Frame(reinterpret_cast<PyFrameObject*>(Py_XNewRef(reinterpret_cast<PyObject*>(PyEval_GetFrame())))); }
  PyFrameObject* p() const { return reinterpret_cast<PyFrameObject*>(held.p); }
  Frame back() const { return Frame(PyFrame_GetBack(p())); }
  PyObject* code() const { return code_; }
  uint64_t instruction() const { return PyFrame_GetLasti(p()); }
  Ref first() const {
    static PyObject* name = PyUnicode_InternFromString("self");
    return Ref(ok(PyFrame_GetVar(p(), name)));
  }
  Ref object() const { return Ref(Py_NewRef(held.p)); }
  explicit operator bool() const { return held.p != nullptr; }
};
#endif

// The frames that tell a line: the innermost of the user's, and those of the innermost and outermost call of a module.
struct Frames {
  Frame user, inner, outer;
};

Frames frames(bool modules) {
  Frames found;
  for (Frame frame = Frame::innermost(); frame; frame = frame.back()) {
    PyObject* code = frame.code();
    if (code == model.module_call) {
      if (!found.inner) found.inner = frame;
      found.outer = frame;
    } else if (!found.user && !is_library(code)) {
      found.user = frame;
      if (!modules) break;
    }
  }
  return found;
}

// user_frame(): the innermost frame of the user's; as source.user_frame.
PyObject* user_frame(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Frames found = frames(false);
  return found.user ? found.user.object().release() : Py_NewRef(Py_None);
  END_HANDLE_TH_ERRORS
}

// The module that is called in a frame: the first argument of Module._wrapped_call_impl.
Ref called(const Frame& frame) { return frame ? frame.first() : Ref(); }

bool is_still(PyObject* weak, PyObject* object) {
  if (weak == nullptr) return object == nullptr;
  PyObject* now = nullptr;
  ok(PyWeakref_GetRef(weak, &now));
  Py_XDECREF(now);
  return now == object;
}

// A remembered line, or none (borrowed).
PyObject* line_at(const Place& place, PyObject* inner, PyObject* outer) {
  auto found = lines.find(place);
  if (found == lines.end() || !is_still(found->second.weak[0], inner) || !is_still(found->second.weak[1], outer)) return nullptr;
  return found->second.line;
}

// Remember a line that lies in this code, belongs to this forward line or none, and was recorded in these modules.
PyObject* remember_line(const Place& place, Ref line, PyObject* code, PyObject* origin, PyObject* inner, PyObject* outer) {
  auto weak = [](PyObject* object) { return object == nullptr ? nullptr : ok(PyWeakref_NewRef(object, nullptr)); };
  Found found{line.release(), {Py_NewRef(code), Py_XNewRef(origin)}, {weak(inner), weak(outer)}};
  auto [at, is_new] = lines.try_emplace(place, found);
  if (!is_new) {  // a module at the address of one that died
    at->second.release();
    at->second = found;
  }
  return found.line;
}

// --- lines themselves

enum { FILE_NAME, NUMBER, FUNCTION, FORWARD, MODULE };  // the fields of source.Line

// The user's line of these frames; as source.Line.
Ref new_line(const Frames& at, PyObject* forward, PyObject* module) {
  auto* code = reinterpret_cast<PyCodeObject*>(at.user.code());
  Ref frame = at.user.object();
  Ref number(ok(PyLong_FromLong(PyFrame_GetLineNumber(reinterpret_cast<PyFrameObject*>(frame.p)))));
  Ref fields(ok(PyTuple_Pack(5, code->co_filename, number.p, code->co_name, forward, module)));
  Ref args(ok(PyTuple_Pack(1, fields.p)));  // as NamedTuple does it, in Python
  return Ref(ok(PyTuple_Type.tp_new(reinterpret_cast<PyTypeObject*>(model.Line), args.p, nullptr)));
}

// As Line.place.
Ref forward_place(PyObject* line) {
  PyObject* forward = PyTuple_GET_ITEM(line, FORWARD);
  return forward != Py_None ? Ref(Py_NewRef(forward)) : Ref(ok(PyTuple_GetSlice(line, FILE_NAME, FORWARD)));
}

// The path of the innermost module that is being called; as source.module_path.
Ref module_path(const Frames& at, PyObject* inner, PyObject* outer) {
  Place place{word_of(inner), word_of(outer), 0, 2};
  if (PyObject* known = line_at(place, inner, outer)) return Ref(Py_NewRef(known));
  Ref path(ok(PyObject_CallFunctionObjArgs(model.module_path, at.inner.object().p, at.outer.object().p, nullptr)));
  return Ref(Py_NewRef(remember_line(place, std::move(path), at.user.code(), nullptr, inner, outer)));
}

// The name of an op as lines are noted under it; as source.plain, for a name without overload.
std::string noted_name(const std::string& name) {
  std::string found;
  for (char letter : name.substr(name.rfind(':') + 1))
    if (letter != '_') found += static_cast<char>(std::tolower(letter));
  return found;
}

// --- in forward

int64_t noted_under = -1;  // the sequence number that the last forward op was noted under, and how many were
int noted = 0;

// Let backward find this line by the autograd node that was made just before; as source.here does.
void note_forward(PyObject* plain_name, PyObject* line) {
  int64_t sequence = static_cast<int64_t>(at::sequence_number::peek()) - 1;
  if (sequence == noted_under && noted >= 4) return;
  noted = sequence == noted_under ? noted + 1 : 1;
  noted_under = sequence;
  Ref number(ok(PyLong_FromLongLong(sequence)));
  Ref entry(ok(PyTuple_Pack(2, plain_name, line)));
  if (PyDict_GET_SIZE(model.forward_lines) > 100000) PyDict_Clear(model.forward_lines);
  PyObject* list = PyDict_GetItemWithError(model.forward_lines, number.p);
  if (list == nullptr) {
    Ref made(ok(PyList_New(0)));
    ok(PyDict_SetItem(model.forward_lines, number.p, made.p));
    list = made.p;  // the dictionary holds it
    ok(PyList_Append(list, entry.p));
  } else if (PyList_GET_SIZE(list) < 4) {
    ok(PyList_Append(list, entry.p));
  }
}

Ref forward_line(PyObject* plain_name) {
  Frames at = frames(true);
  if (!at.user) return Ref(Py_NewRef(model.unknown_line));
  Ref inner = called(at.inner), outer = called(at.outer);
  Place place{word_of(at.user.code()), at.user.instruction(), word_of(inner.p), word_of(outer.p)};
  PyObject* line = line_at(place, inner.p, outer.p);
  if (line == nullptr) {
    Ref module = inner.p == nullptr ? Ref(Py_NewRef(Py_None)) : module_path(at, inner.p, outer.p);
    line = remember_line(place, new_line(at, Py_None, module.p), at.user.code(), nullptr, inner.p, outer.p);
  }
  note_forward(plain_name, line);
  return Ref(Py_NewRef(line));
}

// --- calls that were found

// While a program is new it records much that it has recorded before in the same step, such as the turns of a loop.  The ops of
// their backward are new the first time, and ask for lines.
struct FoundCall {
  uint64_t sequence;
  const std::string* name;
  Known* known;
};

bool noting = false;  // from the first trace that is run as it is recorded until so many came that were not
int traces = 0;
constexpr int MOST_TRACES = 16;
std::vector<FoundCall> found_calls;  // in the order of their numbers
constexpr size_t MOST_FOUND = 20000;

void forget_found() {
  for (const FoundCall& each : found_calls) release(each.known);
  found_calls.clear();
}

// A trace is run as it is recorded: what it records is new.
void begin_to_note() {
  noting = true;
  traces = 0;
}

// A trace ends.
void note_trace() {
  if (++traces < MOST_TRACES) return;
  noting = false;
  forget_found();
}

void note_found(const std::string& name, Known* known) {
  if (torch::autograd::get_current_node() != nullptr) return;
  if (found_calls.size() >= MOST_FOUND) forget_found();
  uint64_t sequence = at::sequence_number::peek() - 1;
  if (!found_calls.empty() && sequence < found_calls.back().sequence) return;
  known->users++;
  found_calls.push_back({sequence, &name, known});
}

// The line of a call that was found and noted under this number, or none (borrowed).
PyObject* line_of_found(uint64_t sequence, const std::string& wanted) {
  auto at = std::lower_bound(found_calls.begin(), found_calls.end(), sequence,
                             [](const FoundCall& call, uint64_t number) { return call.sequence < number; });
  for (; at != found_calls.end() && at->sequence == sequence; ++at) {
    PyObject* value = at->known->results.empty() ? nullptr : at->known->results[0].value;
    if (value == nullptr || at->name->rfind(wanted, 0) != 0) continue;
    PyObject* line = slot(slot(value, model.value_node), model.node_line);
    if (!absent(line) && PyTuple_GET_ITEM(line, FORWARD) == Py_None) return line;
  }
  return nullptr;
}

// line_of_found(number, name): the same for Python; None if there is none.
PyObject* line_of_found(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  unsigned long long sequence;
  const char* wanted;
  if (!PyArg_ParseTuple(args, "Ks", &sequence, &wanted)) return nullptr;
  PyObject* line = line_of_found(sequence, std::string(wanted));
  return Py_NewRef(line == nullptr ? Py_None : line);
  END_HANDLE_TH_ERRORS
}

// --- in backward

// The op behind an autograd node, as source._plain has it: `addmm` for AddmmBackward0; empty for what PyTorch did not derive.
const std::string& derived_from(const torch::autograd::Node& node) {
  static std::unordered_map<std::type_index, std::string> names;
  auto [at, is_new] = names.try_emplace(std::type_index(typeid(node)));
  if (is_new) {
    std::string name = node.name();
    size_t end = name.rfind("Backward");
    if (end != std::string::npos && end > 0 && end + 8 < name.size() &&
        name.find_first_not_of("0123456789", end + 8) == std::string::npos) {
      for (char letter : name.substr(0, end)) at->second += static_cast<char>(std::tolower(letter));
    }
  }
  return at->second;
}

// The line of a forward op that was noted under this autograd node, or none (borrowed).
PyObject* origin_of(const torch::autograd::Node& node) {
  const std::string& wanted = derived_from(node);
  if (wanted.empty()) return nullptr;
  Ref number(ok(PyLong_FromUnsignedLongLong(node.sequence_nr())));
  PyObject* list = PyDict_GetItemWithError(model.forward_lines, number.p);
  for (Py_ssize_t i = 0; list != nullptr && i < PyList_GET_SIZE(list); i++) {
    PyObject* entry = PyList_GET_ITEM(list, i);
    const char* name = PyUnicode_AsUTF8(PyTuple_GET_ITEM(entry, 0));
    if (name != nullptr && std::strncmp(name, wanted.c_str(), wanted.size()) == 0) return PyTuple_GET_ITEM(entry, 1);
  }
  return line_of_found(node.sequence_nr(), wanted);
}

Ref backward_line(const torch::autograd::Node& node, PyObject* op, PyObject* args) {
  PyObject* origin = origin_of(node);
  if (origin == nullptr) return Ref(ok(PyObject_CallFunctionObjArgs(model.here, op, args, nullptr)));
  Frames at = frames(false);
  if (!at.user) return Ref(Py_NewRef(model.unknown_line));
  Place place{word_of(at.user.code()), at.user.instruction(), word_of(origin), 1};
  PyObject* line = line_at(place, nullptr, nullptr);
  if (line == nullptr) {
    Ref made = new_line(at, forward_place(origin).p, PyTuple_GET_ITEM(origin, MODULE));
    line = remember_line(place, std::move(made), at.user.code(), origin, nullptr, nullptr);
  }
  return Ref(Py_NewRef(line));
}

// The user's line that records this op with these canonical arguments; as source.here.
Ref line_here(PyObject* op, PyObject* plain_name, PyObject* args) {
  auto node = torch::autograd::get_current_node();
  return node == nullptr ? forward_line(plain_name) : backward_line(*node, op, args);
}

}  // namespace
