// Runs a graph op by op through PyTorch's dispatcher, without Python's lock: the first tier (lazytensor/backend/instructions.py).
//
// An instruction is an operator, where its arguments come from, where its results go, and which slots nobody needs
// afterwards.  All of them lie in four rows, since a graph may have 100,000.  A run that fails hands over what it has so
// far: Python goes on from the operation that failed, and names it.
//
// PyTorch's own conversions make values of Python's arguments, once for each graph, so a number stands for a tensor where
// it does so in Python's calls, and promotes as a number.

#include <optional>

#include <ATen/ScalarOps.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/python/pybind_utils.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_arg_parser.h>

#include "arena.h"

namespace {

using c10::IValue;
using c10::TypeKind;
using Values = std::vector<IValue>;

// What is in a slot when an instruction runs, as Python says it.
struct Slot {
  uint32_t number;
};

// An argument: what a slot holds, a constant, or a list with slots in it.
struct Source {
  enum From : uint32_t { SLOT, CONSTANT, LIST } from : 2;
  uint32_t index : 30;
};

struct List {
  c10::TypePtr element;
  std::vector<Source> items;
};

// A number as an argument needs it, when that is not how the graph is given it.
struct Conversion {
  uint32_t from, to;
  TypeKind type;
};

// An operator; its arguments, results and the slots to empty end there in their rows.
struct Instruction {
  c10::OperatorHandle op;
  uint32_t arguments, results, dying;
};

constexpr uint32_t UNUSED = UINT32_MAX;  // a result

// The value of a Python number.  One of more than 64 bits is for Python to complain about.
IValue number(PyObject* given) {
  if (PyBool_Check(given)) return given == Py_True;
  if (PyFloat_Check(given)) return PyFloat_AS_DOUBLE(given);
  if (PyComplex_Check(given)) return c10::complex<double>(PyComplex_RealAsDouble(given), PyComplex_ImagAsDouble(given));
  return THPUtils_unpackLong(given);
}

IValue converted(const IValue& value, TypeKind type) {
  at::Scalar scalar = value.toScalar();
  if (type == TypeKind::FloatType) return scalar.toDouble();
  if (type == TypeKind::IntType) return scalar.toLong();
  at::Tensor tensor = c10::scalar_to_tensor(scalar);
  tensor.unsafeGetTensorImpl()->set_wrapped_number(true);
  return tensor;
}

bool takes_numbers_as_tensors(const std::string& name) {
  return name.starts_with("aten::") && torch::should_allow_numbers_as_tensors(name.substr(6));
}

class Instructions {
  size_t data;                  // inputs that are tensors, the first slots
  std::vector<TypeKind> kinds;  // of the numbers, the next ones
  uint32_t slots;
  std::vector<Conversion> conversions;
  Values constants{IValue()};
  std::vector<List> lists;
  std::vector<Instruction> instructions;
  std::vector<Source> arguments;
  std::vector<uint32_t> made, dying, returned;
  std::optional<arena::Plan> plan;

  // --- translation ---------------------------------------------------------------------------------------------------

  static PyTypeObject* slot_class() {
    static PyTypeObject* const found = reinterpret_cast<PyTypeObject*>(py::type::of<Slot>().ptr());
    return found;
  }

  Source constant(IValue value) {
    if (value.isNone()) return {Source::CONSTANT, 0};
    constants.push_back(std::move(value));
    return {Source::CONSTANT, static_cast<uint32_t>(constants.size() - 1)};
  }

  static c10::TypePtr required(const c10::TypePtr& type) {
    return type->kind() == TypeKind::OptionalType ? type->expectRef<c10::OptionalType>().getElementType() : type;
  }

  // The slot in which a number is as this type wants it.
  uint32_t number_for(uint32_t slot, TypeKind type, bool as_tensors) {
    TypeKind kind = kinds.at(slot - data);
    if (type == TypeKind::SymIntType) type = TypeKind::IntType;
    if (type == TypeKind::NumberType || type == kind) return slot;
    bool works = type == TypeKind::TensorType  ? as_tensors
                 : type == TypeKind::FloatType ? kind != TypeKind::ComplexType
                                               : type == TypeKind::IntType && kind == TypeKind::BoolType;
    if (!works) throw py::type_error("a number that the operator does not take");
    for (const Conversion& each : conversions) {
      if (each.from == slot && each.type == type) return each.to;
    }
    conversions.push_back({slot, slots, type});
    return slots++;
  }

  Source source(py::handle given, const c10::Argument& argument, const c10::TypePtr& declared, bool as_tensors) {
    c10::TypePtr type = required(declared);
    if (Py_TYPE(given.ptr()) == slot_class()) {
      uint32_t slot = py::cast<Slot&>(given).number;
      bool is_number = slot >= data && slot < data + kinds.size();
      if (is_number) slot = number_for(slot, type->kind(), as_tensors);
      else if (type->kind() != TypeKind::TensorType) throw py::type_error("a tensor that the operator does not take");
      return {Source::SLOT, slot};
    }
    if (PyList_Check(given.ptr()) && type->kind() == TypeKind::ListType) {
      auto list = py::reinterpret_borrow<py::list>(given);
      if (std::any_of(list.begin(), list.end(), [](py::handle each) { return Py_TYPE(each.ptr()) == slot_class(); })) {
        List added{type->expectRef<c10::ListType>().getElementType(), {}};
        for (py::handle each : list) added.items.push_back(source(each, argument, added.element, as_tensors));
        if (added.element->kind() == TypeKind::SymIntType) added.element = c10::IntType::get();
        lists.push_back(std::move(added));
        return {Source::LIST, static_cast<uint32_t>(lists.size() - 1)};
      }
    }
    return constant(torch::jit::toIValue(given, declared, argument.N()));
  }

  // --- runs ------------------------------------------------------------------------------------------------------------

  IValue filled(const List& list, const Values& values) const {
    c10::impl::GenericList given(list.element);
    given.reserve(list.items.size());
    for (Source item : list.items) given.push_back((item.from == Source::SLOT ? values : constants)[item.index]);
    return given;
  }

  // The parts of a result, lists opened, go to the next slots.
  void spread(IValue&& value, Values& values, uint32_t& next, uint32_t end) const {
    if (value.isList()) {
      for (IValue each : value.toListRef()) spread(std::move(each), values, next, end);
      return;
    }
    TORCH_CHECK(next < end, "another number of results than recorded");
    uint32_t slot = made[next++];
    if (slot != UNUSED) values[slot] = std::move(value);
  }

  // Run the instructions; the position counts those that have run.
  void run(Values& values, size_t& position) const {
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    for (const Conversion& each : conversions) values[each.to] = converted(values[each.from], each.type);
    torch::jit::Stack stack;
    stack.reserve(16);
    uint32_t argument = 0, result = 0, dead = 0;
    for (const Instruction& each : instructions) {
      for (; argument < each.arguments; argument++) {
        Source source = arguments[argument];
        if (source.from == Source::LIST) stack.push_back(filled(lists[source.index], values));
        else stack.push_back((source.from == Source::SLOT ? values : constants)[source.index]);
      }
      each.op.callBoxed(stack);
      for (IValue& value : stack) spread(std::move(value), values, result, each.results);
      TORCH_CHECK(result == each.results, "another number of results than recorded");
      stack.clear();
      for (; dead < each.dying; dead++) values[dying[dead]] = {};
      position++;
    }
  }

  bool run_planned(Values& values, size_t& position) {
    if (plan) plan->begin();
    bool completed = true;
    try {
      run(values, position);
    } catch (const std::exception&) {
      completed = false;
    }
    if (!plan) return completed;
    plan->end(completed);
    if (!completed) return false;
    // What was to be dropped became a result: so where a run makes other memory than the one that was watched.
    for (uint32_t slot : returned) {
      const at::Tensor& result = values[slot].toTensor();
      if (result.has_storage() && arena::holds(result.storage().data())) values[slot] = result.clone();
    }
    return true;
  }

  static py::object wrapped(const IValue& value) {
    if (!value.isTensor()) return py::none();
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  }

 public:
  // The first slots hold the inputs: so many tensors, then numbers of these types.
  Instructions(size_t data, const py::list& numbers, uint32_t slots, bool planned) : data(data), slots(slots) {
    for (py::handle each : numbers) {
      auto* type = reinterpret_cast<PyTypeObject*>(each.ptr());
      kinds.push_back(type == &PyBool_Type      ? TypeKind::BoolType
                      : type == &PyLong_Type    ? TypeKind::IntType
                      : type == &PyFloat_Type ? TypeKind::FloatType
                                              : TypeKind::ComplexType);
    }
    if (planned) plan.emplace();
  }

  uint32_t new_slot() { return slots++; }

  void add(const char* name, const char* overload, const py::list& given, const py::list& results, const py::list& dies) {
    auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    const auto& declared = op.schema().arguments();
    if (given.size() != declared.size()) throw py::type_error("another number of arguments than the operator has");
    bool as_tensors = takes_numbers_as_tensors(name);
    torch::jit::ToIValueAllowNumbersAsTensors allow(as_tensors);
    for (size_t i = 0; i < declared.size(); i++) {
      arguments.push_back(source(given[i], declared[i], declared[i].real_type(), as_tensors));
    }
    for (py::handle each : results) made.push_back(each.is_none() ? UNUSED : each.cast<uint32_t>());
    for (py::handle each : dies) dying.push_back(each.cast<uint32_t>());
    auto end = [](const auto& row) { return static_cast<uint32_t>(row.size()); };
    instructions.push_back({std::move(op), end(arguments), end(made), end(dying)});
  }

  // That was all; the results are in these slots.
  void finish(std::vector<uint32_t> slots_of_results) {
    returned = std::move(slots_of_results);
    for (auto* row : {&made, &dying}) row->shrink_to_fit();
    constants.shrink_to_fit();
    lists.shrink_to_fit();
    instructions.shrink_to_fit();
    arguments.shrink_to_fit();
  }

  size_t size() const { return instructions.size(); }

  // The list of results for these inputs; or, where an instruction failed, how many had run and what is in the slots.
  py::object operator()(const py::tuple& inputs) {
    Values values;
    values.reserve(slots);
    for (py::handle each : inputs) {
      PyObject* given = each.ptr();
      values.push_back(THPVariable_Check(given) ? IValue(THPVariable_Unpack(given)) : number(given));
    }
    values.resize(slots);
    size_t position = 0;
    bool completed;
    {
      py::gil_scoped_release release;
      completed = run_planned(values, position);
    }
    py::list found;
    if (completed) {
      for (uint32_t slot : returned) found.append(wrapped(values[slot]));
    } else {
      for (const IValue& each : values) found.append(wrapped(each));
    }
    {
      py::gil_scoped_release release;
      values.clear();
    }
    if (completed) return found;
    return py::make_tuple(position, found);
  }
};

}  // namespace

void add_interpreter(PyObject* to) {
  auto module = py::reinterpret_borrow<py::module_>(to);
  py::class_<Slot>(module, "Slot", "What is in a slot when an instruction runs.").def(py::init<uint32_t>());
  py::class_<Instructions>(module, "Instructions", "A graph, op by op.")
      .def(py::init<size_t, const py::list&, uint32_t, bool>())
      .def("slot", &Instructions::new_slot)
      .def("add", &Instructions::add)
      .def("finish", &Instructions::finish)
      .def("__len__", &Instructions::size)
      .def("__call__", &Instructions::operator());
}
