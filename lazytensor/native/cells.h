// Values that only C++ has looked at yet: what a hit needs to know of a tensor, where it can be read without the lock.
//
// A recorded tensor has a storage without memory.  Where Python ties a State to it by attributes, which takes objects, a
// dictionary and the interpreter's lock, the compiled recorder lets the storage own a Cell: its value, and the views of it.
// The State is made when Python asks for it (`state_in`): a cut asks for those that are still alive, a Python kernel for those
// of its arguments.  From then on the State has the value, and the cell leads to it.
//
// Most tensors are dead before anybody asks, and then nothing of Python was touched for them.
//
// Cells are read and changed by the thread that records and by whoever holds the lock while that thread does not record.
// A storage may die anywhere; then its cell is only marked, and freed by the thread that records.
// Nothing here counts references to Python objects without the lock: a value is kept by the Known that it comes from.
// Part of recorder.cpp.

#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include <pthread.h>

#include <c10/core/TensorImpl.h>
#include <c10/util/SmallVector.h>
#include <c10/util/flat_hash_map.h>
#include <torch/csrc/Dtype.h>

#include "objects.h"

namespace {

// --- what tensors look like ------------------------------------------------------------------------------------------

using Dims = c10::SmallVector<int64_t, 6>;

// A Spec in numbers.  As specs are, they are kept for ever.
struct Geometry {
  Dims size, stride;
  int64_t offset;
  at::ScalarType dtype;
  bool plain;     // contiguous and not empty
  bool ordinary;  // on the first device, and seen as it lies there: neither conjugated nor negated
  PyObject* spec;
};

Dims dims(PyObject* tuple) {
  Dims made;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); i++) made.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
  return made;
}

ska::flat_hash_map<PyObject*, std::unique_ptr<Geometry>> geometries;

const Geometry* geometry_of(PyObject* spec) {
  auto& found = geometries[spec];
  if (found == nullptr) {
    found = std::make_unique<Geometry>();
    found->size = dims(slot(spec, model.spec_size));
    found->stride = dims(slot(spec, model.spec_stride));
    found->offset = PyLong_AsLongLong(slot(spec, model.spec_offset));
    found->dtype = reinterpret_cast<THPDtype*>(slot(spec, model.spec_dtype))->scalar_type;
    found->plain = slot(spec, model.spec_plain) == Py_True;
    found->ordinary = PyLong_AsLong(slot(spec, model.spec_device)) == 0 && PyLong_AsLong(slot(spec, model.spec_bits)) == 0;
    found->spec = Py_NewRef(spec);
  }
  return found.get();
}

bool looks_like(const c10::TensorImpl* tensor, const Geometry* geometry) {
  return tensor->dtype() == c10::scalarTypeToTypeMeta(geometry->dtype) && tensor->storage_offset() == geometry->offset &&
         tensor->sizes() == c10::IntArrayRef(geometry->size) && tensor->strides() == c10::IntArrayRef(geometry->stride);
}

// --- what calls gave -------------------------------------------------------------------------------------------------

// One result of a known call; no value: it is undefined.
struct Result {
  const Geometry* geometry = nullptr;
  PyObject* value = nullptr;
};

// A call whose table entry is known, in words that can be compared without the lock (see Recorder::words).
struct Known {
  c10::SmallVector<uint64_t, 8> words;
  c10::SmallVector<Result, 1> results;  // for an op in place: what is written
  PyObject *key, *entry;        // of the Python table: they keep every object that `words` and `results` point to
  Known* next = nullptr;        // of the same hash
  size_t users = 0;             // the table, cells and views
};

std::vector<Known*> unused;  // to be freed under the lock

void release(Known* known) {
  if (known != nullptr && --known->users == 0) unused.push_back(known);
}

void free_unused() {
  while (!unused.empty()) {
    Known* known = unused.back();
    unused.pop_back();
    Py_DECREF(known->key);
    Py_DECREF(known->entry);
    delete known;
  }
}

// --- cells -----------------------------------------------------------------------------------------------------------

// Part of a storage, as a view op made it.  It holds for as long as the storage's value is `over`.
struct View : std::enable_shared_from_this<View> {
  const Geometry* geometry;
  Known* known;
  PyObject* value;
  PyObject* over;
  std::shared_ptr<View> parent;  // none: the whole storage
  View(Known* known, const Result& result, PyObject* over, std::shared_ptr<View> parent)
      : geometry(result.geometry), known(known), value(result.value), over(over), parent(std::move(parent)) {
    known->users++;
  }
  ~View() { release(known); }
};

struct Cell {
  Known* known = nullptr;  // where the value comes from
  PyObject* value = nullptr;
  const Geometry* whole = nullptr;
  PyObject* state = nullptr;  // Python's State, which has the value once there is one
  std::vector<std::shared_ptr<View>> views;
  bool listed = false;  // among `pending`
  std::atomic<bool> gone{false};
};

std::vector<Cell*> pending;  // cells with a value of this trace, in order; some have a State or are gone by now
size_t most_pending = 256;   // before they are looked through

std::atomic<bool> enabled{false};  // whether the compiled path is taken
std::atomic<bool> inside{false};   // whether the owner records without the lock just now
pthread_t owner;                   // the thread that records
std::mutex orphans_lock;
std::vector<Cell*> orphans;  // whose storages have died in other threads, and which are not among `pending`

void destroy(Cell* cell) {
  release(cell->known);
  delete cell;
}

// --- who sees what was run ahead (births.h); of the thread that records ------------------------------------------------

bool ahead = false;                             // whether new ops are run as they are recorded
ska::flat_hash_map<PyObject*, size_t> holders;  // values of such a trace -> how many storages have them, as far as C++ gave them
std::vector<PyObject*> unseen;                  // values, also of views, that no storage has any more: to be compared, not read

// A storage gets this value.
void begin_to_hold(PyObject* value) {
  if (ahead) holders[value]++;
}

// A storage has this value no more.
void cease_to_hold(const Cell* cell, PyObject* value) {
  if (!ahead || value == nullptr) return;
  auto place = holders.find(value);
  if (place == holders.end() || --place->second > 0) return;
  holders.erase(place);
  unseen.push_back(value);
  if (cell == nullptr) return;
  for (auto& view : cell->views)
    if (view->over == value) unseen.push_back(view->value);
}

// The storage has died, in whichever thread.
void storage_died(void* context) {
  Cell* cell = static_cast<Cell*>(context);
  bool mine = pthread_equal(pthread_self(), owner);
  if (cell->state != nullptr) {
    if (!Py_IsInitialized()) return;
    Hold lock;
    if (mine && Py_TYPE(cell->state) != model.ViewState) cease_to_hold(cell, slot(cell->state, model.state_value));
    Py_CLEAR(cell->state);
  } else if (mine) {
    cease_to_hold(cell, cell->value);
  }
  if (cell->listed) {
    cell->gone.store(true, std::memory_order_release);
  } else if (mine) {
    destroy(cell);
  } else {
    std::lock_guard guard(orphans_lock);
    orphans.push_back(cell);
  }
}

// The cell of a storage, or none.
Cell* cell_of(const c10::StorageImpl* storage) {
  const c10::DataPtr& memory = storage->data_ptr();
  return memory.get_deleter() == &storage_died ? static_cast<Cell*>(memory.get_context()) : nullptr;
}

// The cell of a tensor's storage; none if it has none, or if the tensor is not what a cell can tell of.
Cell* cell_of(const c10::TensorImpl* tensor) {
  constexpr c10::DispatchKeySet unusual({c10::DispatchKey::Python, c10::DispatchKey::Conjugate, c10::DispatchKey::Negative});
  if (tensor->device_type() != c10::DeviceType::PrivateUse1 || tensor->key_set().has_any(unusual) || !tensor->has_storage())
    return nullptr;
  const c10::Storage& storage = tensor->unsafe_storage();
  return storage ? cell_of(storage.unsafeGetStorageImpl()) : nullptr;
}

c10::DataPtr memory_for(Cell* cell) {
  return {nullptr, cell, &storage_died, c10::Device(c10::DeviceType::PrivateUse1, 0)};
}

// The value of a whole storage; none if Python has to say.
PyObject* value_in(const Cell* cell) {
  if (cell->state == nullptr) return cell->value;
  if (Py_TYPE(cell->state) == model.ViewState) return nullptr;  // the storage was given another base
  PyObject* value = slot(cell->state, model.state_value);
  return absent(value) ? nullptr : value;
}

// What a tensor sees of a storage.
struct Sight {
  Cell* cell = nullptr;
  View* view = nullptr;  // none: all of it
  PyObject* value = nullptr;
};

// Whether C++ can tell what a tensor sees.
bool see(const c10::TensorImpl* tensor, Sight& sight) {
  Cell* cell = cell_of(tensor);
  if (cell == nullptr) return false;
  PyObject* value = value_in(cell);
  if (value == nullptr || cell->whole == nullptr) return false;
  if (cell->state != nullptr) {
    PyObject* spec = slot(cell->state, model.state_spec);
    if ((absent(spec) ? slot(value, model.value_spec) : spec) != cell->whole->spec) return false;
  }
  sight.cell = cell;
  if (looks_like(tensor, cell->whole)) {
    sight.view = nullptr;
    sight.value = value;
    return true;
  }
  for (auto& view : cell->views) {
    if (!looks_like(tensor, view->geometry)) continue;
    if (view->over != value) return false;
    sight.view = view.get();
    sight.value = view->value;
    return true;
  }
  return false;
}

// The State of a tensor that sees all of a storage with data that was not used since the last cut; none if it is not such a
// tensor, or if Python has to say.
PyObject* unused_data(const c10::TensorImpl* tensor) {
  Cell* cell = cell_of(tensor);
  if (cell == nullptr || cell->state == nullptr || cell->whole == nullptr || Py_TYPE(cell->state) == model.ViewState) return nullptr;
  bool has_data = absent(slot(cell->state, model.state_value)) && absent(slot(cell->state, model.state_error)) &&
                  !absent(slot(cell->state, model.state_data)) && slot(cell->state, model.state_spec) == cell->whole->spec;
  return has_data && looks_like(tensor, cell->whole) ? cell->state : nullptr;
}

// --- changes ---------------------------------------------------------------------------------------------------------

// Free the cells whose storages have died, and forget those that Python takes care of.
void look_through_pending() {
  {
    std::lock_guard guard(orphans_lock);
    for (Cell* cell : orphans) destroy(cell);
    orphans.clear();
  }
  size_t kept = 0;
  for (Cell* cell : pending) {
    if (cell->gone.load(std::memory_order_acquire)) {
      destroy(cell);
    } else if (cell->state != nullptr) {
      cell->listed = false;
    } else {
      pending[kept++] = cell;
    }
  }
  pending.resize(kept);
  most_pending = std::max<size_t>(256, 2 * kept);
}

// A cell for a new storage with this result of a call.
Cell* new_cell(Known* known, const Result& result) {
  if (pending.size() >= most_pending) look_through_pending();
  Cell* cell = new Cell;
  cell->known = known;
  known->users++;
  cell->value = result.value;
  begin_to_hold(result.value);
  cell->whole = result.geometry;
  cell->listed = true;
  pending.push_back(cell);
  return cell;
}

void set_value(Cell* cell, Known* known, const Result& result) {
  known->users++;
  release(cell->known);
  cell->known = known;
  begin_to_hold(result.value);
  cease_to_hold(cell, cell->value);
  cell->value = result.value;
}

constexpr size_t MOST_VIEWS = 64;  // of one storage, or Python takes care of the next

// Remember what a view op gave for a tensor that sees `sight`; false if there are too many.
bool add_view(const Sight& sight, Known* known, const Result& result) {
  if (result.geometry == sight.cell->whole) return true;
  PyObject* over = value_in(sight.cell);
  auto& views = sight.cell->views;
  size_t place = 0;
  while (place < views.size() && views[place]->geometry != result.geometry) place++;
  if (place < views.size() && views[place]->over == over) return true;  // the same part of the same value, by another way
  std::shared_ptr<View> parent = sight.view == nullptr ? nullptr : sight.view->shared_from_this();
  if (place == views.size()) {
    if (views.size() >= MOST_VIEWS) std::erase_if(views, [&](auto& view) { return view->over != over; });
    if (views.size() >= MOST_VIEWS) return false;
    place = views.size();
    views.emplace_back();
  }
  views[place] = std::make_shared<View>(known, result, over, std::move(parent));
  return true;
}

// The numbers lifted since Python last looked; `model.numbers` holds those before them.
std::vector<c10::IValue> lifted;

}  // namespace
