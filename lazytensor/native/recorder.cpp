// The hit path of the recording kernels, compiled: what a generated Python kernel does when its table knows the structure.
//
// A call that was seen before is found without the interpreter's lock: its arguments are words (`Recorder::words`), its results
// tensors whose values C++ keeps until Python asks for them (cells.h).  A call that is not found there is looked up in the
// tables of the Python kernels, on their states; whatever this file does not know how to do, and every lookup that misses,
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
#include "guard.h"
#include "lines.h"
#include "nodes.h"
#include "objects.h"
#include "states.h"
#include "wholes.h"

namespace {

// --- the kernel ------------------------------------------------------------------------------------------------------

enum class Kind { Functional, View, InPlace, Mutable };

// Come back when the owner does not record without the lock; it may need the lock for that, to free a state.
void wait_for_owner() {
  std::optional<pybind11::gil_scoped_release> release;
  if (inside && PyGILState_Check()) release.emplace();
  while (inside) sched_yield();
}

class Recorder final : public c10::OperatorKernel {
 public:
  Recorder(Kind kind, PyObject* table, std::vector<Argument> arguments, const c10::OperatorHandle& handle,
           std::optional<Maker> maker, c10::SafeKernelFunction python)
      : kind(kind), table(table), arguments(std::move(arguments)), returns(handle.schema().returns().size()),
        maker(std::move(maker)), python(std::move(python)) {
    const c10::FunctionSchema& schema = handle.schema();
    returns_list = returns == 1 && schema.returns()[0].type()->kind() == c10::TypeKind::ListType;
    counts_versions = schema.name().rfind("aten::_foreach_", 0) == 0;
    plain_name = noted_name(this->maker ? this->maker->handle.schema().name() : schema.name());
    if (this->maker) this->maker->plain_name = ok(PyUnicode_FromString(plain_name.c_str()));
    for (const Argument& each : this->arguments)
      positional_numbers = positional_numbers || (each.default_object != nullptr && !each.keyword);
    bool factory = false;
    for (size_t i = 0; i < schema.arguments().size(); i++) {
      Form form = this->arguments[i].form;
      if (this->arguments[i].keyword && form == Form::Dtype && schema.arguments()[i].name() == "dtype") factory_dtype = i;
      factory = factory || (this->arguments[i].keyword && form == Form::Device);
      const auto* alias = schema.arguments()[i].alias_info();
      if (alias != nullptr && alias->isWrite()) written.push_back(i);
    }
    if (!factory) factory_dtype = -1;
  }

  void operator()(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
    if (!enabled || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return python.callBoxed(op, keys, stack);
    if (!pthread_equal(pthread_self(), owner)) {  // two threads record: the Python kernels can take a lock
      enabled = false;
      wait_for_owner();
    } else {
      Words key;
      if (found(stack, key)) return;
      Hold lock;
      if ((key.empty() && made_leaves(stack) && found(stack, key)) || recorded(stack, key)) return;
    }
    python.callBoxed(op, keys, stack);
  }

  // The value of a view op that gave `proto`, on another value of its argument; as record.derive.
  Ref derived(PyObject* proto, PyObject* parent) {
    PyObject* old = slot(slot(proto, model.value_node), model.node_args);
    Ref key(ok(PyTuple_New(PyTuple_GET_SIZE(old))));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(old); i++)
      PyTuple_SET_ITEM(key.p, i, Py_NewRef(i == 0 ? parent : PyTuple_GET_ITEM(old, i)));
    Ref entry = known(key.p);
    if (entry.p == nullptr) {
      decide();
      if (!ahead) throw Leave();
      Stack stack{data_of(parent)};
      for (size_t i = 1; i < arguments.size(); i++) stack.push_back(again(arguments[i], i, PyTuple_GET_ITEM(key.p, i)));
      entry = born(results_of(stack), key.p);
    }
    if (Py_TYPE(entry.p) == model.Value) return entry;
    Py_ssize_t index = PyLong_AsSsize_t(slot(proto, model.value_index));
    return Ref(Py_NewRef(PyList_Check(entry.p) ? PyList_GET_ITEM(entry.p, index) : PyTuple_GET_ITEM(entry.p, index)));
  }

  // Whether it records an op of which `derived` can be asked.
  bool makes_views_of(PyObject* op) const { return kind == Kind::View && maker && maker->op == op; }

  // Forget every call that was found.
  void forget() {
    for (auto& [hash, first] : calls)
      for (Known *known = first, *next; known != nullptr; known = next) {
        next = known->next;
        known->next = nullptr;
        release(known);
      }
    calls.clear();
  }

 private:
  Kind kind;
  PyObject* table;
  std::vector<Argument> arguments;
  size_t returns;
  bool returns_list;
  bool counts_versions;
  std::string plain_name;  // as lines are noted under it
  bool positional_numbers = false;  // whether a number that may be left at its default stands among the positional ones
  std::vector<size_t> written;
  Py_ssize_t factory_dtype = -1;  // where the dtype of a factory stands
  std::optional<Maker> maker;     // none: its misses are Python's
  c10::SafeKernelFunction python;
  ska::flat_hash_map<uint64_t, Known*> calls;

  // --- without the lock

  // The arguments of a call in a form that can be compared: what they point to, or what they are.  An odd word never is an
  // address, so a number, a default and a missing argument cannot be taken for an object.  Numbers are lifted on the way, as the
  // ones from `number` on; false if an argument is not known without the lock.
  enum : uint64_t { NONE = 1, DEFAULT = 3, INTEGER = 5, REAL = 7, BOOLEAN = 9, TEXT = 11, LIST = 13, CHOICE = 15 };
  using Words = c10::SmallVector<uint64_t, 16>;

  // One of PyTorch's enumerations, or the number of a device: no other word, whichever it is.  (int8 is 1 among the dtypes.)
  static uint64_t choice(int64_t number) { return static_cast<uint64_t>(number) << 8 | CHOICE; }

  bool words(const Call& call, Words& out, Py_ssize_t number) const {
    size_t defaults = first_default(call);
    for (size_t i = 0; i < arguments.size(); i++) {
      const Argument& argument = arguments[i];
      const c10::IValue& value = call.at(i);
      if (argument.form == Form::Dropped) continue;
      if (value.isNone()) {
        out.push_back(NONE);
        continue;
      }
      switch (argument.form) {
        case Form::Tensor:
          if (!word(value.toTensor(), out, number)) return false;
          break;
        case Form::Tensors:
        case Form::LiftedAll:
        case Form::Tuple: {
          if (!value.isList()) return false;
          auto items = value.toListRef();
          out.push_back(LIST);
          out.push_back(items.size());
          for (const c10::IValue& item : items) {
            if (item.isNone()) {
              out.push_back(NONE);
            } else if (argument.form == Form::Tensors ? !word(item.toTensor(), out, number)
                       : argument.form == Form::Tuple ? !plain_word(item, out)
                                                      : !number_word(item, out, number)) {
              return false;
            }
          }
          break;
        }
        case Form::Lifted:
          if (as_default(call, i, defaults)) {
            out.push_back(DEFAULT);
          } else if (!number_word(value, out, number)) {
            return false;
          }
          break;
        case Form::Plain:
          if (!plain_word(value, out)) return false;
          break;
        case Form::Dtype: case Form::Layout: case Form::MemoryFormat:
          out.push_back(choice(value.toInt()));
          break;
        case Form::Device: {
          auto device = value.toDevice();
          if (device.type() != c10::DeviceType::PrivateUse1 || !device.has_index()) return false;
          out.push_back(choice(device.index()));
          break;
        }
        case Form::Dropped:
          break;
      }
    }
    return true;
  }

  static bool word(const at::Tensor& tensor, Words& out, Py_ssize_t& number) {
    if (!tensor.defined()) {
      out.push_back(NONE);
      return true;
    }
    c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
    if (impl->is_wrapped_number()) {
      switch (tensor.scalar_type()) {
        case at::kDouble: return number_word(*tensor.const_data_ptr<double>(), out, number);
        case at::kLong: return number_word(*tensor.const_data_ptr<int64_t>(), out, number);
        case at::kBool: return number_word(*tensor.const_data_ptr<bool>(), out, number);
        default: return false;
      }
    }
    Sight sight;
    if (!see(impl, sight)) return false;
    out.push_back(reinterpret_cast<uint64_t>(sight.value));
    return true;
  }

  // The leaf that stands for the next number of this type.
  static bool number_word(const c10::IValue& value, Words& out, Py_ssize_t& number) {
    PyObject* row = value.isDouble() ? model.reals : value.isInt() ? model.integers : value.isBool() ? model.booleans : nullptr;
    if (row == nullptr || number >= PyList_GET_SIZE(row)) return false;
    out.push_back(reinterpret_cast<uint64_t>(PyList_GET_ITEM(row, number++)));
    lifted.push_back(value);
    return true;
  }

  static bool plain_word(const c10::IValue& value, Words& out) {
    if (value.isInt()) {
      out.push_back(INTEGER);
      out.push_back(value.toInt());
    } else if (value.isBool()) {
      out.push_back(BOOLEAN);
      out.push_back(value.toBool());
    } else if (value.isDouble()) {
      double real = value.toDouble();
      uint64_t bits;
      std::memcpy(&bits, &real, sizeof bits);
      out.push_back(REAL);
      out.push_back(bits);
    } else if (value.isString()) {
      const std::string& text = value.toStringRef();
      out.push_back(TEXT);
      out.push_back(text.size());
      for (char letter : text) out.push_back(letter);
    } else {
      return false;
    }
    return true;
  }

  static uint64_t hash_of(const Words& words) {
    uint64_t hash = words.size();
    for (uint64_t word : words) {
      hash = (hash ^ word) * 0x9E3779B97F4A7C15;
      hash ^= hash >> 29;
    }
    return hash;
  }

  Known* find(const Words& words, uint64_t hash) const {
    auto place = calls.find(hash);
    if (place == calls.end()) return nullptr;
    for (Known* known = place->second; known != nullptr; known = known->next)
      if (c10::ArrayRef<uint64_t>(known->words) == c10::ArrayRef<uint64_t>(words)) return known;
    return nullptr;
  }

  // Whether this call has been seen and done what it did then.  `key` becomes its words, or stays empty if they are not known.
  bool found(Stack* stack, Words& key) {
    if (kind == Kind::Mutable) return false;
    struct Inside {
      Inside() { inside = true; }
      ~Inside() { inside.store(false, std::memory_order_release); }
    } here;
    if (!enabled) return false;
    Call call{stack, stack->size() - arguments.size(), 0};
    size_t before = lifted.size();
    key.clear();
    if (words(call, key, PyList_GET_SIZE(model.numbers) + before)) {
      Known* known = find(key, hash_of(key));
      bool run_too = calls_too && maker && (ahead || undecided);  // which takes the lock
      if (known != nullptr && !run_too && made(call, known)) {
        calls_found++;
        if (noting) note_found(plain_name, known);
        return true;
      }
    } else {
      key.clear();
    }
    lifted.resize(before);
    return false;
  }

  // Put the results of a known call on the stack; false, and nothing done, if Python is needed for that.
  bool made(const Call& call, Known* known) {
    switch (kind) {
      case Kind::Functional:
        push(call, known, [&](const Result& result) { return make(known, result); });
        return true;
      case Kind::View: {
        at::Tensor source = call.at(0).toTensor();
        Sight sight;
        if (!see(source.unsafeGetTensorImpl(), sight)) return false;
        for (const Result& result : known->results)
          if (!can_alias(source, result.geometry) || !add_view(sight, known, result)) return false;
        push(call, known, [&](const Result& result) { return alias(source, result.geometry); });
        return true;
      }
      case Kind::InPlace: {
        at::Tensor target = call.at(0).toTensor();
        Sight sight;
        if (!see(target.unsafeGetTensorImpl(), sight) || sight.view != nullptr || sight.cell->state != nullptr) return false;
        set_value(sight.cell, known, known->results[0]);
        torch::jit::drop(*call.stack, arguments.size());
        call.stack->emplace_back(std::move(target));
        return true;
      }
      case Kind::Mutable:
        return false;
    }
    return false;
  }

  template <class Each>
  void push(const Call& call, Known* known, Each each) {
    c10::SmallVector<c10::IValue, 4> results;
    if (returns_list) {
      c10::List<at::Tensor> tensors;
      tensors.reserve(known->results.size());
      for (const Result& result : known->results) tensors.push_back(each(result));
      results.emplace_back(std::move(tensors));
    } else {
      for (const Result& result : known->results) results.emplace_back(each(result));
    }
    torch::jit::drop(*call.stack, arguments.size());
    for (auto& result : results) call.stack->emplace_back(std::move(result));
  }

  // --- with it

  // Make leaves of the arguments that are data and were not used since the last cut: what most calls lack after one.  Whether
  // that was all that a call lacked.  (Without the lock, states and cells are safe to look at only `inside`.)
  bool made_leaves(Stack* stack) const {
    if (kind == Kind::Mutable) return false;
    Call call{stack, stack->size() - arguments.size(), 0};
    c10::SmallVector<PyObject*, 4> states;
    auto add = [&](const c10::IValue& value) {
      if (value.isNone()) return true;
      const at::Tensor& tensor = value.toTensor();
      Sight sight;
      if (!tensor.defined() || tensor.unsafeGetTensorImpl()->is_wrapped_number() || see(tensor.unsafeGetTensorImpl(), sight))
        return true;
      PyObject* state = unused_data(tensor.unsafeGetTensorImpl());
      if (state == nullptr) return false;
      if (std::find(states.begin(), states.end(), state) == states.end()) states.push_back(state);
      return true;
    };
    for (size_t i = 0; i < arguments.size(); i++) {
      const c10::IValue& value = call.at(i);
      if (arguments[i].form == Form::Tensor) {
        if (!add(value)) return false;
      } else if (arguments[i].form == Form::Tensors && !value.isNone()) {
        if (!value.isList()) return false;
        for (const c10::IValue& item : value.toListRef())
          if (!add(item)) return false;
      }
    }
    for (PyObject* state : states) leaf(state);
    return !states.empty();
  }

  bool recorded(Stack* stack, Words& key_words) {
    flush_numbers();
    Call call{stack, stack->size() - arguments.size(), PyList_GET_SIZE(model.numbers)};
    Ref entry, key;
    bool is_new = false, lasting = true;
    try {
      key = canonical_call(call);
      entry = known(key.p);
      if (entry.p == nullptr && maker) decide();
      if (entry.p != nullptr && calls_too && maker) run_again(call, key.p, entry.p);
      if (entry.p == nullptr && ahead && maker) {
        entry = is_mutation() ? mutated(call, key.p, lasting) : born(run(call, key.p), key.p);
        is_new = true;
      }
    } catch (const Leave&) {
    }
    if (entry.p == nullptr) {  // the Python kernel will lift them again
      ok(PyList_SetSlice(model.numbers, call.lifted, PyList_GET_SIZE(model.numbers), nullptr));
      return false;
    }
    finish(call, key.p, entry.p, key_words, lasting);
    if (is_new && kind != Kind::View) check_budget(entry.p);
    return true;
  }

  // A call with its table entry, kept so that it is found without the lock next time, if that can be.  The caller releases it.
  Known* remember(const Call& call, PyObject* key, PyObject* entry, Words& key_words) {
    bool complete = !key_words.empty();
    if (!complete) {  // to look the call up has made more of it known
      size_t before = lifted.size();
      complete = words(call, key_words, call.lifted);
      lifted.resize(before);
    }
    uint64_t hash = hash_of(key_words);
    Known* known = complete ? find(key_words, hash) : nullptr;
    if (known != nullptr) {
      known->users++;
      return known;
    }
    known = new Known;
    known->users = 1;
    known->key = Py_NewRef(key);
    known->entry = Py_NewRef(entry);
    auto add = [&](PyObject* value) {
      Result result;
      if (value != Py_None) {
        result.value = value;
        result.geometry = geometry_of(slot(value, model.value_spec));
        complete = complete && result.geometry->ordinary;
      }
      known->results.push_back(result);
    };
    if (kind == Kind::InPlace) {
      add(PyList_GET_ITEM(PyTuple_GET_ITEM(entry, 1), 0));
    } else if (PyList_Check(entry)) {
      for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entry); i++) add(PyList_GET_ITEM(entry, i));
    } else if (PyTuple_Check(entry)) {
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(entry); i++) add(PyTuple_GET_ITEM(entry, i));
    } else {
      add(entry);
    }
    if (complete) {
      known->words.assign(key_words.begin(), key_words.end());
      Known*& first = calls[hash];
      known->next = first;
      first = known;
      known->users++;
    }
    return known;
  }

  Ref canonical_call(Call& call) {
    size_t defaults = first_default(call);
    Ref key(ok(PyTuple_New(arguments.size())));
    for (size_t i = 0; i < arguments.size(); i++)
      PyTuple_SET_ITEM(key.p, i, canonical(call, arguments[i], call.at(i), as_default(call, i, defaults)).release());
    return key;
  }

  // From which argument on every positional one has its default value.
  size_t first_default(const Call& call) const {
    size_t defaults = arguments.size();
    while (positional_numbers && defaults > 0 && (arguments[defaults - 1].keyword || is_default(call, defaults - 1))) defaults--;
    return defaults;
  }

  // Whether a number counts as its default, which is part of the structure.
  bool as_default(const Call& call, size_t i, size_t defaults) const {
    const Argument& argument = arguments[i];
    return argument.default_object != nullptr && is_default(call, i) &&
           (argument.keyword || i >= defaults || !call.at(i).isDouble());
  }

  Ref known(PyObject* key) {
    PyObject* entry = PyDict_GetItemWithError(table, key);
    if (entry == nullptr && PyErr_Occurred()) throw python_error();
    if (returns_list && entry != nullptr && !PyList_Check(entry)) throw Leave();
    return Ref(Py_XNewRef(entry));
  }

  bool is_mutation() const { return kind == Kind::InPlace || kind == Kind::Mutable; }

  // Ask whether this trace is run ahead, if nobody has.
  static void decide() {
    if (!undecided) return;
    undecided = false;
    Ref(ok(PyObject_CallNoArgs(model.decide)));
  }

  // Run a call that was seen before, if the trace is run ahead and nothing has its data: else the trace could only be recorded
  // from here on, and its graph would be made for it.
  void run_again(const Call& call, PyObject* key, PyObject* entry) {
    decide();
    if (!ahead) return;
    c10::SmallVector<PyObject*, 4> values;
    auto add = [&](PyObject* part) {
      if (part != Py_None) values.push_back(part);
      return part != Py_None && newborn.count(part) == 0;
    };
    PyObject* parts = is_mutation() ? PyList_GET_ITEM(PyTuple_GET_ITEM(entry, 1), 0) : entry;
    bool missing = false;
    if (Py_TYPE(parts) == model.Value) {
      missing = add(parts);
    } else {
      Ref list(ok(PySequence_Fast(parts, "an entry")));
      for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(list.p); i++) missing = add(PySequence_Fast_GET_ITEM(list.p, i)) || missing;
    }
    if (!missing) return;
    try {
      c10::SmallVector<at::Tensor, 4> made;
      try {
        made = run(call, key);
      } catch (const Leave&) {  // Python has recorded an argument, such as the whole of which a view was written to
        if (Ref(ok(PyObject_CallOneArg(model.is_there, key))).p != Py_True) throw;
        made = run(call, key);
      }
      made.erase(std::remove_if(made.begin(), made.end(), [](const at::Tensor& each) { return !each.defined(); }), made.end());
      if (made.size() != values.size()) throw Leave();
      for (size_t i = 0; i < made.size(); i++) {
        const Geometry* look = geometry_of(slot(values[i], model.value_spec));
        if (!looks_like(made[i].unsafeGetTensorImpl(), look)) return;  // it is laid out anew where it is written: Python's to make
        be_born(values[i], made[i], kind == Kind::View);
      }
    } catch (const Leave&) {
      Ref(ok(PyObject_CallNoArgs(model.stop)));
    }
  }

  // What an op gives for the data of its arguments.
  c10::SmallVector<at::Tensor, 4> run(const Call& call, PyObject* key) {
    drop_unseen();
    Stack stack;
    stack.reserve(arguments.size());
    for (size_t i = 0; i < arguments.size(); i++) {
      if (arguments[i].form == Form::Device && !call.at(i).isNone() && call.at(i).toDevice().index() != 0) throw Leave();
      stack.push_back(on_cpu(arguments[i].form, call.at(i), PyTuple_GET_ITEM(key, i)));
    }
    return results_of(stack);
  }

  // An argument that was brought into canonical form once, as the op takes it: of the kinds that views have.
  c10::IValue again(const Argument& argument, size_t i, PyObject* canonical) const {
    if (argument.form == Form::Dropped) return argument.default_value;
    if (canonical == Py_None) return {};
    if (argument.form != Form::Plain && argument.form != Form::Tuple && argument.form != Form::Dtype) throw Leave();
    return torch::jit::toIValue(canonical, maker->handle.schema().arguments()[i].real_type());
  }

  // What an op gives for these arguments.
  c10::SmallVector<at::Tensor, 4> results_of(Stack& stack) const {
    run_on_cpu(maker->handle, &stack);
    c10::SmallVector<at::Tensor, 4> made;
    if (maker->returns_list) {
      for (const at::Tensor& each : stack[0].toTensorList()) made.push_back(each);
    } else {
      for (const c10::IValue& each : stack) made.push_back(each.toTensor());
    }
    for (const at::Tensor& each : made) {
      if (!each.defined() && maker->returns == 1) throw Leave();
      if (each.defined() && (each.layout() != at::kStrided || (kind != Kind::View && !in_own_memory(each)))) throw Leave();
    }
    return made;
  }

  // The entry of an op that is new, which gave this for the data of its arguments.
  Ref born(const c10::SmallVector<at::Tensor, 4>& made, PyObject* key) {
    Ref args = made.empty() ? Ref(Py_NewRef(key)) : settled(key, made[0]);
    Ref node = new_node(maker->op, args.p, line_here(maker->op, maker->plain_name, args.p));
    PyObject* outputs = set_outputs(node.p, made, kind == Kind::View, maker->looks);
    Ref entry = maker->returns_list ? Ref(ok(PySequence_List(outputs)))
                                    : Ref(Py_NewRef(maker->returns == 1 ? PyTuple_GET_ITEM(outputs, 0) : outputs));
    ok(PyDict_SetItem(maker->table, key, entry.p));
    look_at_young();
    return entry;
  }

  // Whether what is written shares no memory with another argument, by its storage: two storages may have the same value.
  bool in_storages_apart(const Call& call) const {
    std::unordered_set<const c10::StorageImpl*> targets;
    size_t count = 0;
    auto each = [&](const c10::IValue& value, auto&& action) {
      auto one = [&](const at::Tensor& tensor) {
        if (tensor.defined() && tensor.has_storage()) action(tensor.storage().unsafeGetStorageImpl());
      };
      if (value.isTensor()) one(value.toTensor());
      if (value.isList())
        for (const c10::IValue& item : value.toListRef())
          if (item.isTensor()) one(item.toTensor());
    };
    each(call.at(written[0]), [&](const c10::StorageImpl* storage) { count += targets.insert(storage).second ? 1 : 2; });
    bool apart = count == targets.size();
    for (size_t i = 0; i < arguments.size(); i++)
      if (i != written[0]) each(call.at(i), [&](const c10::StorageImpl* storage) { apart = apart && targets.count(storage) == 0; });
    return apart;
  }

  // The entry of a mutating op that is new, if what it writes shares no memory and its functional form's results look like it;
  // as record.Mutation._in_place.  `lasting`: whether the values tell that, so that it is true whenever they come again.
  Ref mutated(Call& call, PyObject* key, bool& lasting) {
    PyObject* target = PyTuple_GET_ITEM(key, written[0]);
    lasting = apart(key, target);
    if (!lasting && !(are_plain(target) && in_storages_apart(call))) throw Leave();
    PyObject* found = PyDict_GetItemWithError(maker->table, key);
    Ref result = found != nullptr ? Ref(Py_NewRef(found)) : born(run(call, key), key);
    if (PyTuple_Check(target)) {
      if (!PyList_Check(result.p) || PyList_GET_SIZE(result.p) != PyTuple_GET_SIZE(target)) throw Leave();
      for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(target); i++)
        if (!fits(PyList_GET_ITEM(result.p, i), PyTuple_GET_ITEM(target, i))) throw Leave();
    } else if (!fits(result.p, target)) {
      throw Leave();
    }
    Ref returned(ok(PyList_New(0))), replaced(ok(PyList_New(0)));
    ok(PyList_Append(replaced.p, result.p));
    Ref entry(ok(PyTuple_Pack(2, returned.p, replaced.p)));
    if (lasting) ok(PyDict_SetItem(table, key, entry.p));
    return entry;
  }

  // The arguments a node keeps; as shapes.settle.
  Ref settled(PyObject* key, const at::Tensor& made) const {
    if (factory_dtype < 0 || PyTuple_GET_ITEM(key, factory_dtype) != Py_None || !made.defined()) return Ref(Py_NewRef(key));
    Ref args(ok(PyTuple_New(PyTuple_GET_SIZE(key))));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(key); i++) {
      PyObject* each = i == factory_dtype ? reinterpret_cast<PyObject*>(torch::getTHPDtype(made.scalar_type())) : PyTuple_GET_ITEM(key, i);
      PyTuple_SET_ITEM(args.p, i, Py_NewRef(each));
    }
    return args;
  }

  static bool in_own_memory(const at::Tensor& tensor) {
    return tensor.storage_offset() == 0 && !tensor.is_conj() && !tensor.is_neg();
  }

  bool is_default(const Call& call, size_t i) const {
    return arguments[i].has_default && arguments[i].default_value == call.at(i);
  }

  // Give the call its results; `lasting`: whether it may be found without Python next time.
  void finish(Call& call, PyObject* key, PyObject* entry, Words& key_words, bool lasting) {
    Stack* stack = call.stack;
    switch (kind) {
      case Kind::Functional:
      case Kind::View: {
        struct Kept {
          Known* known;
          ~Kept() { release(known); }
        } kept{remember(call, key, entry, key_words)};
        if (noting) note_found(plain_name, kept.known);
        at::Tensor source = kind == Kind::View ? call.at(0).toTensor() : at::Tensor();
        push(call, kept.known, [&](const Result& result) {
          return kind == Kind::View ? make_view(source, kept.known, result) : make(kept.known, result);
        });
        return;
      }
      case Kind::InPlace: {
        if (lasting) {
          Known* known = remember(call, key, entry, key_words);
          bool done = made(call, known);
          release(known);
          if (done) return;
        }
        at::Tensor target = call.at(0).toTensor();
        write(target, state_of(target), PyList_GET_ITEM(PyTuple_GET_ITEM(entry, 1), 0));
        torch::jit::drop(*stack, arguments.size());
        stack->emplace_back(std::move(target));
        return;
      }
      case Kind::Mutable: {
        PyObject* values = PyTuple_GET_ITEM(entry, 1);
        if (counts_versions) {
          for (const c10::IValue& item : call.at(written[0]).toListRef())
            item.toTensor().unsafeGetTensorImpl()->bump_version();
        }
        for (size_t i = 0; i < written.size(); i++) {
          PyObject* value = PyList_GET_ITEM(values, i);
          const c10::IValue& target = call.at(written[i]);
          if (!target.isList()) {
            write(target.toTensor(), state_of(target.toTensor()), value);
            continue;
          }
          auto items = target.toListRef();
          for (size_t k = 0; k < items.size(); k++)
            write(items[k].toTensor(), state_of(items[k].toTensor()), PyList_GET_ITEM(value, k));
        }
        torch::jit::drop(*stack, arguments.size());
        return;
      }
    }
  }
};

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

Ref derived(PyObject* proto, PyObject* parent) {
  static std::unordered_map<PyObject*, Recorder*> of;  // by the op
  PyObject* op = slot(slot(proto, model.value_node), model.node_op);
  auto [place, is_new] = of.try_emplace(op, nullptr);
  if (is_new) {
    for (Recorder* each : recorders)
      if (each->makes_views_of(op)) place->second = each;
  }
  if (place->second == nullptr) return Ref();
  try {
    return place->second->derived(proto, parent);
  } catch (const Leave&) {
    return Ref();
  }
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
  // Never taken back: the handle is left alive on purpose.
  new c10::RegistrationHandleRAII(c10::Dispatcher::singleton().registerImpl(
      op.operator_name(), c10::DispatchKey::PrivateUse1,
      c10::KernelFunction::makeFromBoxedFunctor<Recorder>(std::move(recorder)), std::nullopt, nullptr, "lazytensor"));
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
