// The kernel of one op: how its calls are recorded, found again, and for the first time.  Part of recorder.cpp.

#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "arguments.h"
#include "births.h"
#include "cells.h"
#include "lines.h"
#include "objects.h"
#include "states.h"

namespace {

size_t calls_found = 0;  // since the process began, without the lock

// What a call gives.
using Results = c10::SmallVector<c10::IValue, 4>;

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
    Results results;
    if (!done(stack, results)) return in_python(op, keys, stack);
    bool returns_first = kind == Kind::InPlace;
    torch::jit::drop(*stack, arguments.size() - (returns_first ? 1 : 0));
    for (c10::IValue& result : results) stack->push_back(std::move(result));
  }

  // Whether the call whose arguments are the last on this stack, where they stay, was recorded here; an op that writes to its first
  // argument and returns that leaves `results` empty.
  bool done(Stack* stack, Results& results) {
    if (!enabled || c10::impl::TorchDispatchModeTLS::stack_len() > 0) return false;
    if (!pthread_equal(pthread_self(), owner)) {  // two threads record: the Python kernels can take a lock
      enabled = false;
      wait_for_owner();
      return false;
    }
    Words key;
    if (found(stack, key, results)) return true;
    Hold lock;
    return (key.empty() && made_leaves(stack) && found(stack, key, results)) || recorded(stack, key, results);
  }

  void in_python(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) { python.callBoxed(op, keys, stack); }

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
      entry = born(seen_in(key.p), key.p);
    }
    if (Py_TYPE(entry.p) == model.Value) return entry;
    Py_ssize_t index = PyLong_AsSsize_t(slot(proto, model.value_index));
    return Ref(Py_NewRef(PyList_Check(entry.p) ? PyList_GET_ITEM(entry.p, index) : PyTuple_GET_ITEM(entry.p, index)));
  }

  // What a view op of these canonical arguments sees of the data of the first.
  c10::SmallVector<at::Tensor, 4> seen_in(PyObject* args) const {
    Stack stack{data_of(PyTuple_GET_ITEM(args, 0))};
    for (size_t i = 1; i < arguments.size(); i++) stack.push_back(again(arguments[i], i, PyTuple_GET_ITEM(args, i)));
    return results_of(stack);
  }

  // Whether it records this op, whose results are views.
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
  bool found(Stack* stack, Words& key, Results& results) {
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
      if (known != nullptr && !run_too && made(call, known, results)) {
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

  // Make the results of a known call; false, and nothing done, if Python is needed for that.
  bool made(const Call& call, Known* known, Results& results) {
    switch (kind) {
      case Kind::Functional:
        collect(results, known, [&](const Result& result) { return make(known, result); });
        return true;
      case Kind::View: {
        const at::Tensor& source = call.at(0).toTensor();
        Sight sight;
        if (!see(source.unsafeGetTensorImpl(), sight)) return false;
        for (const Result& result : known->results)
          if (!can_alias(source, result.geometry) || !add_view(sight, known, result)) return false;
        collect(results, known, [&](const Result& result) { return alias(source, result.geometry); });
        return true;
      }
      case Kind::InPlace: {
        Sight sight;
        if (!see(call.at(0).toTensor().unsafeGetTensorImpl(), sight) || sight.view != nullptr || sight.cell->state != nullptr) return false;
        set_value(sight.cell, known, known->results[0]);
        return true;
      }
      case Kind::Mutable:
        return false;
    }
    return false;
  }

  template <class Each>
  void collect(Results& results, Known* known, Each each) const {
    if (returns_list) {
      c10::List<at::Tensor> tensors;
      tensors.reserve(known->results.size());
      for (const Result& result : known->results) tensors.push_back(each(result));
      results.emplace_back(std::move(tensors));
    } else {
      for (const Result& result : known->results) results.emplace_back(each(result));
    }
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

  bool recorded(Stack* stack, Words& key_words, Results& results) {
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
    finish(call, key.p, entry.p, key_words, lasting, results);
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
  void finish(Call& call, PyObject* key, PyObject* entry, Words& key_words, bool lasting, Results& results) {
    switch (kind) {
      case Kind::Functional:
      case Kind::View: {
        struct Kept {
          Known* known;
          ~Kept() { release(known); }
        } kept{remember(call, key, entry, key_words)};
        if (noting) note_found(plain_name, kept.known);
        collect(results, kept.known, [&](const Result& result) {
          return kind == Kind::View ? make_view(call.at(0).toTensor(), kept.known, result) : make(kept.known, result);
        });
        return;
      }
      case Kind::InPlace: {
        if (lasting) {
          Known* known = remember(call, key, entry, key_words);
          bool done = made(call, known, results);
          release(known);
          if (done) return;
        }
        const at::Tensor& target = call.at(0).toTensor();
        write(target, state_of(target), PyList_GET_ITEM(PyTuple_GET_ITEM(entry, 1), 0));
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
        return;
      }
    }
  }
};

}  // namespace
