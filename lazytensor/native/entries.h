// Kernels that take their arguments as C++ passes them, for the signatures that most calls have; others get them boxed.
//
// To box a tensor counts a reference to it.  One that only Python held until then has its Python object counted, too, under the
// interpreter's lock, and once more when the box is opened: recording `x + y` took the lock eight times where eager takes it four times,
// and 0.77 µs instead of 0.67.  Here the boxes borrow their tensors; they are counted if the Python kernel gets them.
// Part of recorder.cpp.

#pragma once

#include <array>
#include <tuple>

#include <ATen/core/dispatch/Dispatcher.h>

#include "kernel.h"

namespace {

// --- arguments -------------------------------------------------------------------------------------------------------

// The boxed arguments of one call.
class Boxes {
 public:
  Boxes() : items(std::move(spare())) { items.clear(); }
  Boxes(const Boxes&) = delete;
  ~Boxes() {
    if (borrowing)
      for (c10::IValue& each : items)
        if (each.isTensor()) std::move(each).toTensor().unsafeReleaseTensorImpl();
    items.clear();
    spare() = std::move(items);
  }

  void add(const at::Tensor& tensor) {
    items.emplace_back(at::Tensor(c10::intrusive_ptr<at::TensorImpl, c10::UndefinedTensorImpl>::reclaim(tensor.unsafeGetTensorImpl())));
  }
  void add(const std::optional<at::Tensor>& tensor) {
    if (tensor) add(*tensor);
    else items.emplace_back();
  }
  template <class T>
  void add(const T& value) { items.emplace_back(value); }

  // From now on the tensors are counted: they are given away.
  Stack* own() {
    for (c10::IValue& each : items)
      if (each.isTensor() && each.toTensor().defined()) c10::raw::intrusive_ptr::incref(each.toTensor().unsafeGetTensorImpl());
    borrowing = false;
    return &items;
  }

  Stack items;

 private:
  bool borrowing = true;

  // The room of the last call's, for the next.
  static Stack& spare() {
    thread_local Stack left;
    return left;
  }
};

// --- results ---------------------------------------------------------------------------------------------------------

template <class Result>
struct Returned;

template <>
struct Returned<at::Tensor> {
  template <class... Args>
  static at::Tensor from(Results& results, const Args&...) { return std::move(results[0]).toTensor(); }
};

// What is written to its first argument is that.
template <>
struct Returned<at::Tensor&> {
  template <class... Args>
  static at::Tensor& from(Results&, at::Tensor& first, const Args&...) { return first; }
};

template <class... Tensors>
struct Returned<std::tuple<Tensors...>> {
  template <class... Args>
  static std::tuple<Tensors...> from(Results& results, const Args&...) { return all(results, std::index_sequence_for<Tensors...>()); }
  template <size_t... I>
  static std::tuple<Tensors...> all(Results& results, std::index_sequence<I...>) { return {std::move(results[I]).toTensor()...}; }
};

// --- the kernel ------------------------------------------------------------------------------------------------------

template <class Signature>
class Entry;

template <class Result, class... Args>
class Entry<Result(Args...)> final : public c10::OperatorKernel {
 public:
  Entry(std::unique_ptr<Recorder> recorder, const c10::OperatorHandle& op) : recorder(std::move(recorder)), op(op) {}

  Result operator()(c10::DispatchKeySet keys, Args... args) {
    Boxes boxes;
    (boxes.add(args), ...);
    Results results;
    if (!recorder->done(&boxes.items, results)) {
      recorder->in_python(op, keys, boxes.own());
      for (c10::IValue& each : boxes.items) results.push_back(std::move(each));
    }
    return Returned<Result>::from(results, args...);
  }

 private:
  std::unique_ptr<Recorder> recorder;
  c10::OperatorHandle op;
};

// --- which signatures there are --------------------------------------------------------------------------------------

struct Shape {
  bool (*fits)(const c10::OperatorHandle&);
  c10::KernelFunction (*make)(std::unique_ptr<Recorder>, const c10::OperatorHandle&);
};

// A letter for each type that arguments and results have here.
template <class> inline constexpr const char* letter = nullptr;
template <> inline constexpr const char* letter<const at::Tensor&> = "T";
template <> inline constexpr const char* letter<at::Tensor> = "T";
template <> inline constexpr const char* letter<at::Tensor&> = "W";
template <> inline constexpr const char* letter<std::tuple<at::Tensor, at::Tensor, at::Tensor>> = "TTT";
template <> inline constexpr const char* letter<const std::optional<at::Tensor>&> = "o";
template <> inline constexpr const char* letter<const at::Scalar&> = "N";
template <> inline constexpr const char* letter<int64_t> = "i";
template <> inline constexpr const char* letter<c10::SymInt> = "s";
template <> inline constexpr const char* letter<std::optional<c10::SymInt>> = "q";
template <> inline constexpr const char* letter<at::IntArrayRef> = "I";
template <> inline constexpr const char* letter<c10::SymIntArrayRef> = "S";
template <> inline constexpr const char* letter<at::OptionalIntArrayRef> = "J";
template <> inline constexpr const char* letter<bool> = "b";
template <> inline constexpr const char* letter<double> = "d";
template <> inline constexpr const char* letter<std::optional<double>> = "e";
template <> inline constexpr const char* letter<at::ScalarType> = "y";
template <> inline constexpr const char* letter<std::optional<at::ScalarType>> = "t";
template <> inline constexpr const char* letter<std::optional<at::MemoryFormat>> = "m";
template <> inline constexpr const char* letter<std::string_view> = "x";
template <> inline constexpr const char* letter<std::array<bool, 3>> = "3";

// The same for a type as a schema has it; nothing if there is none.
std::string letter_of(const c10::Type& type, bool written, std::optional<int32_t> count) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType: return written ? "W" : "T";
    case c10::TypeKind::NumberType: return "N";
    case c10::TypeKind::IntType: return "i";
    case c10::TypeKind::SymIntType: return "s";
    case c10::TypeKind::BoolType: return "b";
    case c10::TypeKind::FloatType: return "d";
    case c10::TypeKind::ScalarTypeType: return "y";
    case c10::TypeKind::StringType: return "x";
    case c10::TypeKind::OptionalType: {
      std::string of = letter_of(*type.expectRef<c10::OptionalType>().getElementType(), false, count);
      for (auto [plain, optional] : {std::pair("T", "o"), {"s", "q"}, {"I", "J"}, {"d", "e"}, {"y", "t"}})
        if (of == plain) return optional;
      return type.expectRef<c10::OptionalType>().getElementType()->kind() == c10::TypeKind::MemoryFormatType ? "m" : "";
    }
    case c10::TypeKind::ListType: {
      switch (type.expectRef<c10::ListType>().getElementType()->kind()) {
        case c10::TypeKind::IntType: return "I";
        case c10::TypeKind::SymIntType: return "S";
        case c10::TypeKind::BoolType: return count == 3 ? "3" : "";
        default: return "";
      }
    }
    default: return "";
  }
}

template <class Result, class... Args>
std::pair<std::string, Shape> shape(Result (*)(Args...)) {
  using Signature = Result(Args...);
  std::string name = (std::string() + ... + letter<Args>) + ">" + letter<Result>;
  auto make = [](std::unique_ptr<Recorder> recorder, const c10::OperatorHandle& op) {
    return c10::KernelFunction::makeFromUnboxedFunctor<false, Entry<Signature>>(
        std::make_unique<Entry<Signature>>(std::move(recorder), op));
  };
  auto fits = [](const c10::OperatorHandle& op) {
    try {
      op.typed<Signature>();
      return true;
    } catch (const c10::Error&) {  // a few are declared otherwise than their schema says, such as resize_as_sparse_
      return false;
    }
  };
  return {name, {fits, make}};
}

template <class... Signatures>
std::unordered_map<std::string, Shape> shapes() { return {shape(static_cast<Signatures*>(nullptr))...}; }

using T = const at::Tensor&;
using W = at::Tensor&;
using N = const at::Scalar&;
using O = const std::optional<at::Tensor>&;
using Size = c10::SymIntArrayRef;
using Dim = std::optional<c10::SymInt>;
using Tensor = at::Tensor;
using Three = std::tuple<Tensor, Tensor, Tensor>;

// Those of the operations that models mostly consist of, forward and backward; each costs a second of the compiler's time.
const std::unordered_map<std::string, Shape>& known_shapes() {
  static const auto known = shapes<
      Tensor(T), Tensor(T, T), Tensor(T, T, T), Tensor(T, N), Tensor(N, T), Tensor(T, T, N), Tensor(T, N, N), Tensor(T, T, T, N, N),
      Tensor(T, T, T, N), W(W), W(W, T), W(W, N), W(W, T, N), W(W, N, N), W(W, T, T, N), Tensor(T, int64_t), Tensor(T, int64_t, bool),
      Tensor(T, int64_t, int64_t), Tensor(T, int64_t, c10::SymInt), Tensor(T, int64_t, Dim, Dim, c10::SymInt), Tensor(T, Size),
      Tensor(T, Size, bool), Tensor(T, at::IntArrayRef), Tensor(T, T, int64_t, at::ScalarType), Tensor(T, T, c10::SymInt, bool, bool),
      Tensor(T, T, c10::SymInt, c10::SymInt, bool), Tensor(T, std::optional<at::ScalarType>),
      Tensor(T, at::OptionalIntArrayRef, bool, std::optional<at::ScalarType>), Tensor(T, std::optional<at::MemoryFormat>),
      Tensor(T, std::string_view), Tensor(T, T, std::string_view), Tensor(T, T, int64_t), Three(T, Size, O, O, double)>();
  return known;
}

// The letters of a schema, as the names of shapes have them; nothing if there is a type without one.
std::string shape_of(const c10::FunctionSchema& schema) {
  std::string name;
  for (const c10::Argument& each : schema.arguments()) {
    std::string found = letter_of(*each.real_type(), each.alias_info() != nullptr && each.alias_info()->isWrite(), each.N());
    if (found.empty()) return "";
    name += found;
  }
  name += ">";
  for (const c10::Argument& each : schema.returns()) {
    bool written = each.alias_info() != nullptr && each.alias_info()->isWrite();
    if (each.type()->kind() != c10::TypeKind::TensorType) return "";
    name += written ? "W" : "T";
  }
  return name;
}

}  // namespace
