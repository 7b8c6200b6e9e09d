// Runs compiled steps one after the other without the interpreter's lock, which the program needs to record the next.
//
// A queue holds cuts in order, each with its job.  A job with compiled code runs here, in the thread that called `take`,
// and the next begins as soon as it has ended.  `take` comes back for the others: a cut that Python has to run, and a job
// that failed or builds on a failed one, which Python runs again where the failing operation can be named.
//
// Python objects are only moved, never counted, while the lock is not held: what has ended is kept until `reap`.

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>

#include <dlfcn.h>
#include <sched.h>

#include <ATen/core/LegacyTypeDispatch.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/inductor/aoti_torch/tensor_converter.h>
#include <torch/csrc/utils/pybind.h>

#include "arena.h"
#include "jobs.h"

namespace {

using Clock = std::chrono::steady_clock;
using Lock = std::unique_lock<std::mutex>;
using Entry = void (*)(AtenTensorHandle*, AtenTensorHandle*);

// A compiled graph: its function, which of its results are made and which are inputs that it has overwritten, and which
// are to be copied since they share memory or lie in it otherwise than declared.
struct Code {
  Entry entry;
  std::vector<size_t> returned;
  std::vector<std::pair<size_t, size_t>> replaced;
  std::vector<size_t> copied;
  arena::Plan plan;
};

struct Job;

// A tensor, or the result of an earlier job that may not have run yet.
struct Input {
  at::Tensor tensor;
  std::shared_ptr<Job> from;
  size_t index = 0;
};

struct Work;

struct Job {
  std::shared_ptr<Code> code;  // none: Python will run it
  std::vector<Input> inputs;
  std::vector<at::Tensor> results;
  Work* work = nullptr;  // the queue that it is in
  int threads = 0;       // of OpenMP; 0: as many as there are
  bool gives_way = false;  // one fewer while the program records
  int kernels = 0;
  int recorded_on = -1;  // the core of the thread that handed it over
  double seconds = 0;
  std::atomic<bool> done = false;
  bool lost = false;  // it has run and there are no results for other jobs
  std::vector<size_t> unwanted;  // results that nobody will ask for

  bool ready() const {
    return code && std::none_of(inputs.begin(), inputs.end(), [](const Input& i) { return i.from && i.from->lost; });
  }

  // It has run.  What nobody wants of its results, to be dropped by whoever holds no lock.
  std::vector<at::Tensor> end() {
    done = true;
    std::vector<at::Tensor> dropped;
    for (size_t number : unwanted) {
      if (number < results.size()) dropped.push_back(std::move(results[number]));
    }
    unwanted.clear();
    return dropped;
  }

  // Whether it succeeded; if not, Python will find out why.
  bool run() {
    code->plan.begin();
    try {
      compute();
      code->plan.end(true);
      // What was to be dropped became a result: so where a run makes other memory than the one that was watched.
      for (at::Tensor& result : results) {
        if (arena::holds(result.storage().data())) result = result.clone();
      }
      return true;
    } catch (const std::exception&) {
      code->plan.end(false);
      return false;
    }
  }

 private:
  void compute() {
    std::vector<at::Tensor> given;
    given.reserve(inputs.size());
    for (Input& input : inputs) {
      if (input.from) {
        input.tensor = input.from->results[input.index];
        input.from.reset();  // the rest of that step's results is not held longer than others hold it
      }
      given.push_back(input.tensor);
    }
    std::vector<AtenTensorHandle> in = torch::aot_inductor::unsafe_alloc_new_handles_from_tensors(given);
    std::vector<AtenTensorHandle> out(code->returned.size());
    at::AutoDispatchBelowADInplaceOrView below_autograd;
    auto start = Clock::now();
    code->entry(in.data(), out.data());
    std::vector<at::Tensor> made = torch::aot_inductor::alloc_tensors_by_stealing_from_handles(out.data(), out.size());
    results.resize(code->returned.size() + code->replaced.size());
    for (size_t i = 0; i < made.size(); i++) results[code->returned[i]] = std::move(made[i]);
    for (auto [number, position] : code->replaced) results[number] = given[position];
    for (size_t number : code->copied) results[number] = results[number].clone(at::MemoryFormat::Contiguous);
    seconds = std::chrono::duration<double>(Clock::now() - start).count();
  }
};

// --- cores -----------------------------------------------------------------------------------------------------------

// The functions of the OpenMP library that PyTorch runs on.
struct {
  void (*set_threads)(int) = nullptr;
  int (*threads)() = nullptr;
  int (*pause)(int) = nullptr;
} openmp;

// Where the calling thread may run.  The scheduler likes to wake a thread on the core of the one that woke it; if that
// goes on recording there, the two take turns on one core and the other has nothing to do.
#ifdef __linux__
int this_core() { return sched_getcpu(); }

class Place {
  cpu_set_t everywhere{};
  int kept_off = -1;

 public:
  Place() {
    if (sched_getaffinity(0, sizeof everywhere, &everywhere) != 0) CPU_ZERO(&everywhere);
  }
  void keep_off(int core) {
    if (core == kept_off || core < 0) return;
    cpu_set_t others = everywhere;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) > 0 && sched_setaffinity(0, sizeof others, &others) == 0) kept_off = core;
  }
  void anywhere() {
    if (kept_off >= 0 && sched_setaffinity(0, sizeof everywhere, &everywhere) == 0) kept_off = -1;
  }
};
#else
int this_core() { return -1; }

struct Place {
  void keep_off(int) {}
  void anywhere() {}
};
#endif

thread_local Place place;

// Give the calling thread's parallel loops so many threads.  One that computes alone is kept off the core that records;
// with others to wait for it runs where it can.
void share(int threads, int recorded_on) {
  if (threads == 1) {
    place.keep_off(recorded_on);
  } else {
    place.anywhere();  // before OpenMP makes its threads, which run where the one that makes them may
  }
  if (openmp.threads == nullptr || threads == 0) return;
  int before = openmp.threads();
  if (before == threads) return;
  openmp.set_threads(threads);
  if (threads < before) openmp.pause(1);  // the others would stand by, on a core that is needed
}

// Whether the program records now, as far as one can tell: it does not wait for a cut, or is about to be told that one has ended.
std::atomic<bool> recording = false;

thread_local Job* running = nullptr;

// A job that gives way may run on any core: each has been given up by the time that something is recorded.
void share(const Job& job) {
  share(job.threads - (job.gives_way && recording ? 1 : 0), job.gives_way ? -1 : job.recorded_on);
}

// Called by compiled code before each kernel.
void between() {
  if (running == nullptr) return;
  running->kernels++;
  if (running->gives_way) share(*running);
}

// --- the queue -------------------------------------------------------------------------------------------------------

struct Item {
  PyObject* task;  // owned
  std::shared_ptr<Job> job;
};

struct Work {
  std::mutex mutex;
  std::condition_variable added, ended;
  std::deque<Item> items;  // what runs or waits to run, the first of them now
  std::vector<Item> finished;
  const std::function<bool()>* awaited = nullptr;  // what the program waits for

  // The program is about to record: give up a core for it first.  When it has woken up it takes one from a thread that computes, or from
  // one that is to be ended, and the others wait for that.
  void make_room(Lock& lock) {
    recording = true;
    if (items.empty() || !items.front().job->gives_way) return;
    std::shared_ptr<Job> next = items.front().job;
    lock.unlock();
    share(*next);
    lock.lock();
  }

  // The next task that is for Python; runs the jobs before it.
  PyObject* take() {
    Lock lock(mutex);
    while (true) {
      added.wait(lock, [&] { return !items.empty(); });
      Item& item = items.front();
      if (!item.job->ready()) break;
      lock.unlock();
      share(*item.job);
      running = item.job.get();
      bool succeeded = running->run();
      running = nullptr;
      lock.lock();
      if (!succeeded) break;
      std::vector<at::Tensor> dropped = item.job->end();
      finished.push_back(std::move(item));
      items.pop_front();
      if (awaited != nullptr && (*awaited)()) make_room(lock);
      ended.notify_all();
      lock.unlock();
      dropped.clear();
      lock.lock();
    }
    place.anywhere();
    return items.front().task;
  }

  // Wait for a condition without the interpreter's lock, but let signals through.
  void wait(const std::function<bool()>& condition) {
    recording = false;
    struct Resume {
      ~Resume() { recording = true; }
    } resume;
    while (true) {
      bool is_so;
      {
        py::gil_scoped_release release;
        Lock lock(mutex);
        awaited = &condition;
        is_so = ended.wait_for(lock, std::chrono::milliseconds(100), condition);
        awaited = nullptr;
      }
      if (is_so) return;
      if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    }
  }
};

// The queue as Python sees it.  What it works on is never freed: a thread may wait there when the process ends or forks.
class Queue {
  Work* work = new Work();

 public:
  void put(py::object task, std::shared_ptr<Job> job) {
    job->work = work;
    job->recorded_on = this_core();
    recording = true;
    Lock lock(work->mutex);
    work->items.push_back({task.release().ptr(), std::move(job)});
    work->added.notify_one();
  }
  py::object take() {
    PyObject* task;
    {
      py::gil_scoped_release release;
      task = work->take();
    }
    return py::reinterpret_borrow<py::object>(task);
  }
  // The first task has been run by Python, with these results or with none that other jobs could take.
  void drop(std::optional<std::vector<at::Tensor>> results) {
    Item item;
    std::vector<at::Tensor> dropped;
    {
      Lock lock(work->mutex);
      item = std::move(work->items.front());
      work->items.pop_front();
      item.job->lost = !results;
      if (results) item.job->results = std::move(*results);
      dropped = item.job->end();
      work->ended.notify_all();
    }
    item.job->inputs.clear();
    Py_DECREF(item.task);
  }
  size_t size() const {
    Lock lock(work->mutex);
    return work->items.size();
  }
  void wait_below(size_t count) {
    if (size() >= count) work->wait([&] { return work->items.size() < count; });
  }
  // The tasks whose jobs have run since this was last asked, and how many seconds and kernels each took.
  py::list reap() {
    std::vector<Item> found;
    {
      Lock lock(work->mutex);
      found.swap(work->finished);
    }
    py::list tasks;
    for (Item& item : found) {
      item.job->inputs.clear();
      tasks.append(py::make_tuple(py::reinterpret_steal<py::object>(item.task), item.job->seconds, item.job->kernels));
    }
    return tasks;
  }
};

// --- for Python ------------------------------------------------------------------------------------------------------

// Of the inputs so many are data: tensors, or futures (lazytensor.trace.future).  None if the cut of one has no job.
std::shared_ptr<Job> make_job(std::shared_ptr<Code> code, const py::list& inputs, size_t data,
                              const std::vector<double>& floats, const std::vector<int64_t>& ints, int threads) {
  static PyObject* const run_name = PyUnicode_InternFromString("run");
  static PyObject* const job_name = PyUnicode_InternFromString("job");
  static PyObject* const value_name = PyUnicode_InternFromString("value");
  static PyObject* const number_name = PyUnicode_InternFromString("number");
  auto job = std::make_shared<Job>();
  job->code = std::move(code);
  job->threads = std::abs(threads);
  job->gives_way = threads < 0;
  job->inputs.reserve(data + 2);
  for (size_t i = 0; i < data; i++) {
    PyObject* input = PyList_GET_ITEM(inputs.ptr(), i);
    if (THPVariable_Check(input)) {
      job->inputs.push_back({THPVariable_Unpack(input), nullptr, 0});
    } else {
      py::object value = py::getattr(input, value_name);
      if (THPVariable_Check(value.ptr())) {
        job->inputs.push_back({THPVariable_Unpack(value.ptr()), nullptr, 0});
        continue;
      }
      py::object run = py::getattr(input, run_name);
      auto from = py::getattr(run, job_name).cast<std::shared_ptr<Job>>();
      if (!from) return nullptr;
      job->inputs.push_back({at::Tensor(), std::move(from), py::getattr(input, number_name).cast<size_t>()});
    }
  }
  if (!floats.empty()) job->inputs.push_back({at::tensor(floats, at::kDouble), nullptr, 0});
  if (!ints.empty()) job->inputs.push_back({at::tensor(ints, at::kLong), nullptr, 0});
  return job;
}

// Run a job on the calling thread alone, which then needs no OpenMP threads of its own.
bool run_alone(Job& job) {
  int before = openmp.threads == nullptr ? 1 : openmp.threads();
  if (before > 1) openmp.set_threads(1);
  bool succeeded = job.run();
  if (before > 1) openmp.set_threads(before);
  return succeeded;
}

// The results of a job that nobody can ask for, since only this list of its futures refers to them, are dropped when it
// ends: gradients that the program let go of while they were made would lie beside those of the next step.
void forget(Job& job, const py::list& futures) {
  std::vector<at::Tensor> dropped;
  Lock lock(job.work->mutex);
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(futures.ptr()); i++) {
    if (Py_REFCNT(PyList_GET_ITEM(futures.ptr(), i)) == 1) job.unwanted.push_back(i);
  }
  if (job.done) dropped = job.end();
  lock.unlock();
}

std::shared_ptr<Code> make_code(const std::string& path, std::vector<size_t> returned,
                                std::vector<std::pair<size_t, size_t>> replaced, std::vector<size_t> copied) {
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* entry = library == nullptr ? nullptr : dlsym(library, "_Z19inductor_entry_implPP16AtenTensorOpaqueS1_");
  if (entry == nullptr) throw std::runtime_error(path + " has no entry");
  if (void* hook = dlsym(library, "lazytensor_between")) *reinterpret_cast<void (**)()>(hook) = &between;
  return std::make_shared<Code>(
      Code{reinterpret_cast<Entry>(entry), std::move(returned), std::move(replaced), std::move(copied), {}});
}

}  // namespace

bool run_here(PyObject* code, const std::vector<at::Tensor>& inputs, std::vector<at::Tensor>& results, bool alone) {
  Job job;
  job.code = py::cast<std::shared_ptr<Code>>(py::handle(code));
  job.inputs.reserve(inputs.size());
  for (const at::Tensor& input : inputs) job.inputs.push_back({input, nullptr, 0});
  {
    py::gil_scoped_release release;
    if (!(alone ? run_alone(job) : job.run())) return false;
  }
  results = std::move(job.results);
  return true;
}

void add_runner(PyObject* to) {
  auto module = py::reinterpret_borrow<py::module_>(to);
  py::class_<Code, std::shared_ptr<Code>>(module, "Code", "A compiled graph.").def(py::init(&make_code));
  py::class_<Job, std::shared_ptr<Job>>(module, "Job", "A compiled graph and what it is to run on.")
      .def_static("of", &make_job)
      .def("run", &Job::run, py::call_guard<py::gil_scoped_release>())
      .def("run_alone", &run_alone, py::call_guard<py::gil_scoped_release>())
      .def("is_set", [](const Job& job) { return job.done.load(); })
      .def("wait", [](const Job& job) { if (!job.done) job.work->wait([&] { return job.done.load(); }); })
      .def("forget", &forget)
      .def("results", [](const Job& job) { return job.results; });
  py::class_<Queue>(module, "Queue", "Cuts in order, and the loop that runs the compiled ones.")
      .def(py::init())
      .def("put", &Queue::put)
      .def("job", [](const Queue&) { return std::make_shared<Job>(); })
      .def("take", &Queue::take)
      .def("drop", &Queue::drop, py::arg("results").none(true) = py::none())
      .def("wait_below", &Queue::wait_below)
      .def("reap", &Queue::reap)
      .def("__len__", &Queue::size);
  py::class_<arena::Plan>(module, "Plan", "Where the temporaries of one graph lie.")
      .def(py::init())
      .def("begin", &arena::Plan::begin)
      .def("end", &arena::Plan::end)
      .def("bytes", &arena::Plan::bytes);
  module.def("open_arena", &arena::open, "Let runs have memory of their own, up to so many bytes.");
  module.def("empty_arena", &arena::empty, "Give that memory back to the system, unless a run has it.");
  module.def("arena_holds", [](size_t address) { return arena::holds(reinterpret_cast<void*>(address)); });
  module.def("use_openmp", [](size_t set_threads, size_t threads, size_t pause) {
    openmp.set_threads = reinterpret_cast<void (*)(int)>(set_threads);
    openmp.threads = reinterpret_cast<int (*)()>(threads);
    openmp.pause = reinterpret_cast<int (*)(int)>(pause);
  });
}
