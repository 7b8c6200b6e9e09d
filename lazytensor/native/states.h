// From a tensor to its state and value, and from a value to a tensor; as lazytensor/trace/storage.py.  Part of recorder.cpp.

#pragma once

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/Storage.h>
#include <torch/csrc/autograd/python_variable.h>

#include "cells.h"
#include "nodes.h"
#include "objects.h"

namespace {

// --- from tensors to values -------------------------------------------------------------------------------------------

// The geometry of the base value of a storage; as State.spec.
PyObject* whole(PyObject* base) {
  PyObject* spec = slot(base, model.state_spec);
  if (!absent(spec)) return spec;
  PyObject* value = slot(base, model.state_value);
  if (absent(value)) throw Leave();
  return slot(value, model.value_spec);
}

// The attribute that ties an object to its state, or null (borrowed: the object holds it).
PyObject* tied(PyObject* object) {
  PyObject* state = nullptr;
  if (object != nullptr) ok(PyObject_GetOptionalAttr(object, lt_name, &state));
  if (state == nullptr) return nullptr;
  Py_DECREF(state);
  PyTypeObject* type = Py_TYPE(state);
  return type == model.State || type == model.ViewState || type == model.ViewedState ? state : nullptr;
}

// Let go of the fresh states that no tensor holds, and hold the others weakly; as storage.sweep.
void sweep() {
  Py_ssize_t seen = 0;
  for (; seen < PyList_GET_SIZE(model.fresh); seen++) {
    PyObject* state = PyList_GET_ITEM(model.fresh, seen);
    if (Py_REFCNT(state) == 1) continue;
    Ref weak(ok(PyWeakref_NewRef(state, model.dead)));
    ok(PyDict_SetItem(model.live, weak.p, Py_None));
  }
  ok(PyList_SetSlice(model.fresh, 0, seen, nullptr));
}

void track(PyObject* state) {
  ok(PyList_Append(model.fresh, state));
  if (PyList_GET_SIZE(model.fresh) > model.most_fresh) sweep();
}

// The State of a cell, made if there is none.
PyObject* state_in(Cell* cell) {
  if (cell->state != nullptr) return cell->state;
  Ref state(ok(model.State->tp_alloc(model.State, 0)));
  set_slot(state.p, model.state_value, cell->value);
  cell->state = state.release();
  release(cell->known);
  cell->known = nullptr;
  cell->value = nullptr;
  track(cell->state);
  return cell->state;
}

// A view of a storage; as storage.new_view.  `holds`: whether it is that of the storage's present value.
Ref new_view(PyObject* base, PyObject* parent, PyObject* value, bool holds = true) {
  if (Py_TYPE(base) == model.State) ok(PyObject_SetAttr(base, class_name, reinterpret_cast<PyObject*>(model.ViewedState)));
  if (absent(slot(base, model.state_views))) {
    Ref views(ok(PyDict_New()));
    set_slot(base, model.state_views, views.p);
  }
  PyObject* views = slot(base, model.state_views);
  PyObject* spec = slot(value, model.value_spec);
  if (PyObject* known = PyDict_GetItem(views, spec)) {
    PyObject* view = nullptr;
    ok(PyWeakref_GetRef(known, &view));
    if (view != nullptr) return Ref(view);
  }
  Ref view(ok(model.ViewState->tp_alloc(model.ViewState, 0)));
  set_slot(view.p, model.state_value, holds ? value : Py_None);
  set_slot(view.p, model.state_proto, value);
  set_slot(view.p, model.state_base, base);
  set_slot(view.p, model.state_parent, parent);
  Ref weak(ok(PyWeakref_NewRef(view.p, nullptr)));
  ok(PyDict_SetItem(views, spec, weak.p));
  track(view.p);
  return view;
}

// The ViewState of a view that C++ made.
Ref view_in(Cell* cell, const View& view) {
  PyObject* base = state_in(cell);
  Ref parent = view.parent == nullptr ? Ref(Py_NewRef(base)) : view_in(cell, *view.parent);
  return new_view(base, parent.p, view.value, value_in(cell) == view.over);
}

// The ViewState of a tensor that sees part of a storage in a way that C++ made, or none.
Ref known_view(const at::Tensor& tensor, PyObject* base) {
  Cell* cell = cell_of(tensor.unsafeGetTensorImpl());
  if (cell == nullptr || cell->state != base || Py_TYPE(base) == model.ViewState) return Ref();  // it has another base now
  for (auto& view : cell->views)
    if (looks_like(tensor.unsafeGetTensorImpl(), view->geometry)) return view_in(cell, *view);
  return Ref();
}

// Let the storage lead to its State, so that C++ finds it without the lock.
void tie(const at::Tensor& tensor, PyObject* state) {
  c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  if (tensor.device().index() != 0 || memory->data_ptr().get_context() != nullptr) return;
  Cell* cell = new Cell;
  cell->state = Py_NewRef(state);
  memory->set_data_ptr_noswap(memory_for(cell));
}

// The state of a whole storage, or none (borrowed: the storage holds it).
PyObject* base_of(const at::Tensor& tensor) {
  c10::StorageImpl* memory = tensor.storage().unsafeGetStorageImpl();
  PyObject* base = tied(memory->pyobj_slot()->load_pyobj());
  Cell* cell = cell_of(tensor.unsafeGetTensorImpl());
  if (base == nullptr && cell != nullptr) base = state_in(cell);
  return base == nullptr || Py_TYPE(base) == model.ViewState ? nullptr : base;
}

// The state that a tensor looks at; as storage.state_of.
PyObject* state_of(const at::Tensor& tensor) {
  c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
  if (impl->device_type() != c10::DeviceType::PrivateUse1 || impl->key_set().has(c10::DispatchKey::Python)) throw Leave();
  PyObject* shell = impl->pyobj_slot()->load_pyobj();
  PyObject* known = tied(shell);
  if (known != nullptr && Py_TYPE(known) == model.ViewState) return known;
  if (!impl->has_storage() || !impl->unsafe_storage()) throw Leave();
  PyObject* base = base_of(tensor);
  if (base == nullptr) throw Leave();
  if (cell_of(impl) == nullptr) tie(tensor, base);
  if (known != nullptr) return known;
  // PyTorch or the compiled recorder made this alias in C++: its storage knows.
  if (tensor.is_conj() || tensor.is_neg()) throw Leave();
  PyObject* spec = PyDict_GetItem(model.specs, geometry(tensor, tensor.device().index()).p);
  if (spec == nullptr) throw Leave();
  if (spec == whole(base)) return base;
  Ref state = known_view(tensor, base);
  if (state.p == nullptr) state = Ref(ok(PyObject_CallFunctionObjArgs(model.aliased, base, spec, nullptr)));
  Ref held(ok(THPVariable_Wrap(tensor)));  // a view is held by the tensors that look at it, and by nothing else
  ok(PyObject_SetAttr(held.p, lt_name, state.p));
  return state.p;
}

// states_in(objects): the state of the storage of each of these that is a tensor of ours and has one; None for the others.
PyObject* states_in(PyObject*, PyObject* objects) {
  HANDLE_TH_ERRORS
  Ref items(ok(PySequence_Fast(objects, "a sequence")));
  Ref found(ok(PyList_New(PySequence_Fast_GET_SIZE(items.p))));
  for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(items.p); i++) {
    PyObject* each = PySequence_Fast_GET_ITEM(items.p, i);
    PyObject* state = nullptr;
    if (THPVariable_Check(each)) {
      const at::Tensor& tensor = THPVariable_Unpack(each);
      c10::TensorImpl* impl = tensor.unsafeGetTensorImpl();
      bool ours = impl->device_type() == c10::DeviceType::PrivateUse1 && !impl->key_set().has(c10::DispatchKey::Python);
      if (ours && impl->has_storage() && impl->unsafe_storage()) state = base_of(tensor);
    }
    PyList_SET_ITEM(found.p, i, Py_NewRef(state == nullptr ? Py_None : state));
  }
  return found.release();
  END_HANDLE_TH_ERRORS
}

// The data of a storage as a leaf of this trace; as storage._leaf.
Ref leaf(PyObject* state) {
  Ref index(ok(PyLong_FromSsize_t(PyList_GET_SIZE(model.leaf_data))));
  Ref key(ok(PyTuple_Pack(2, index.p, slot(state, model.state_spec))));
  PyObject* known = PyDict_GetItemWithError(model.data_leaves, key.p);
  Ref value = known != nullptr ? Ref(Py_NewRef(known)) : new_leaf(index.p, slot(state, model.state_spec), key.p);
  set_slot(state, model.state_number, index.p);
  ok(PyList_Append(model.leaf_data, slot(state, model.state_data)));
  Ref weak(ok(PyWeakref_NewRef(state, nullptr)));
  ok(PyList_Append(model.leaf_states, weak.p));
  set_slot(state, model.state_value, value.p);
  return value;
}

Ref value_of(PyObject* state);

// Has a view op be recorded once more, on another value of its argument; null if that is for Python.
Ref derived(PyObject* proto, PyObject* parent);  // recorder.cpp

// The value of a view that is not used since the last cut; null if it is for Python.
Ref value_of_view(PyObject* view) {
  PyObject* parent = slot(view, model.state_parent);
  if (absent(parent)) return Ref();
  Ref value = derived(slot(view, model.state_proto), value_of(parent).p);
  if (value.p == nullptr) return value;
  track(view);
  set_slot(view, model.state_value, value.p);
  return value;
}

Ref value_of(PyObject* state) {
  PyObject* value = slot(state, model.state_value);
  if (!absent(value)) return Ref(Py_NewRef(value));
  if (Py_TYPE(state) == model.ViewState) {
    Ref found = value_of_view(state);
    if (found.p != nullptr) return found;
  } else if (absent(slot(state, model.state_error)) && !absent(slot(state, model.state_data)) && !absent(slot(state, model.state_spec))) {
    return leaf(state);
  }
  return Ref(ok(PyObject_CallOneArg(model.value_of_state, state)));
}

// --- from values to tensors -------------------------------------------------------------------------------------------

at::Tensor unpacked(Ref shell) { return THPVariable_Unpack(shell.p); }

void attach(const at::Tensor& tensor, PyObject* state) {
  Ref shell(ok(THPVariable_Wrap(tensor)));
  ok(PyObject_SetAttr(shell.p, lt_name, state));
}

// A new tensor over a new storage with this result; as storage.make.
at::Tensor make(Known* known, const Result& result) {
  if (result.value == nullptr) return {};
  const Geometry* geometry = result.geometry;
  if (!geometry->ordinary) return unpacked(Ref(ok(PyObject_CallOneArg(model.make, result.value))));
  // As torch._C._acc.create_empty_tensor makes it: no bytes, and an allocator that lets the Meta kernels give it some.
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(c10::Storage::use_byte_size_t(), 0, memory_for(new_cell(known, result)), allocator, true),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::scalarTypeToTypeMeta(geometry->dtype));
  if (geometry->plain) {
    tensor.unsafeGetTensorImpl()->set_sizes_contiguous(geometry->size);
  } else {
    tensor.unsafeGetTensorImpl()->set_sizes_and_strides(geometry->size, geometry->stride, geometry->offset);
  }
  return tensor;
}

at::Tensor alias(const at::Tensor& tensor, const Geometry* geometry) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(tensor.storage()), tensor.key_set(), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(geometry->size, geometry->stride, geometry->offset);
  return made;
}

// Whether C++ can make this view of a tensor: all but the dtype and the bits may change.
bool can_alias(const at::Tensor& tensor, const Geometry* geometry) {
  return geometry->dtype == tensor.scalar_type() && geometry->ordinary && !tensor.is_conj() && !tensor.is_neg();
}

// A new tensor over the storage of another; as storage.make_view.
at::Tensor make_view(const at::Tensor& tensor, Known* known, const Result& result) {
  Sight sight;
  if (can_alias(tensor, result.geometry) && see(tensor.unsafeGetTensorImpl(), sight) && add_view(sight, known, result))
    return alias(tensor, result.geometry);
  PyObject* parent = state_of(tensor);
  if (!can_alias(tensor, result.geometry)) {
    attach(tensor, parent);  // where the Python function looks for it
    Ref shell(ok(THPVariable_Wrap(tensor)));
    return unpacked(Ref(ok(PyObject_CallFunctionObjArgs(model.make_view, shell.p, result.value, nullptr))));
  }
  PyObject* base = Py_TYPE(parent) == model.ViewState ? slot(parent, model.state_base) : parent;
  at::Tensor made = alias(tensor, result.geometry);
  if (result.geometry->spec != whole(base)) attach(made, new_view(base, parent, result.value).p);
  return made;
}

// Make every view of this storage derive its value again, and drop those that no tensor holds; as storage.forget_views.
void forget_views(PyObject* state) {
  PyObject* views = slot(state, model.state_views);
  if (absent(views)) return;
  PyObject *spec, *reference, *view;
  Py_ssize_t place = 0;
  std::vector<PyObject*> dead;
  while (PyDict_Next(views, &place, &spec, &reference)) {
    ok(PyWeakref_GetRef(reference, &view));
    if (view == nullptr) {
      dead.push_back(spec);
      continue;
    }
    set_slot(view, model.state_value, Py_None);
    Py_DECREF(view);
  }
  for (PyObject* each : dead) ok(PyDict_DelItem(views, each));  // specs are kept for ever
}

// Let the tensor have this value; as storage.write.
void write(const at::Tensor& tensor, PyObject* state, PyObject* value) {
  bool viewed = Py_TYPE(state) == model.ViewedState;
  if ((viewed || Py_TYPE(state) == model.State) && absent(slot(state, model.state_error))) {
    PyObject* old = slot(state, model.state_value);
    if (absent(old) || slot(old, model.value_leaf) == Py_True) track(state);
    begin_to_hold(value);
    cease_to_hold(cell_of(tensor.unsafeGetTensorImpl()), old);
    set_slot(state, model.state_value, value);
    if (viewed) forget_views(state);
    return;
  }
  Ref shell(ok(THPVariable_Wrap(tensor)));
  Ref(ok(PyObject_CallFunctionObjArgs(model.write, shell.p, value, nullptr)));
}

}  // namespace
