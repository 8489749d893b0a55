// Pools, the allocator that replaces torch's CPU allocator, and the Python module of both. Takes the GIL only to add or
// release a segment.
//
// Compiled at the first use for the installed torch and Python, and loaded by these only.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "heap.h"

namespace py = pybind11;

namespace {

using phalanx_pool::Heap;

// ---- Python objects ----

// Python objects that were released without the GIL.
struct Dead {
  PyObject *object;
  Dead *below;
};
std::atomic<Dead *> all_dead{nullptr};

// The caller holds the GIL.
int bury(void *) {
  for (Dead *each = all_dead.exchange(nullptr); each != nullptr;) {
    const std::unique_ptr<Dead> gone(each);
    each = gone->below;
    Py_DECREF(gone->object);
  }
  return 0;
}

// May be called on any thread, with or without the GIL. It does not wait for the GIL, because the thread that holds it
// may wait for this one.
void let_go(void *object) {
  if (Py_IsInitialized() == 0) return;  // the process ends, and its memory with it
  Dead *const dead = new Dead{static_cast<PyObject *>(object), all_dead.load()};
  while (!all_dead.compare_exchange_weak(dead->below, dead)) {
  }
  if (PyGILState_Check() != 0)
    bury(nullptr);
  else
    Py_AddPendingCall(bury, nullptr);  // the main thread runs it soon; if its queue is full, the next call does
}

struct NewSegment {
  char *base;  // NULL: there is not enough memory, and `failure` has the reason
  void *owner;
  std::string failure;
};

// Calls make(size in bytes) -> (address, owner), or (0, reason), without any lock of this module. The exceptions that
// it raises are raised by the op that allocates.
NewSegment make_segment(PyObject *make, size_t size_bytes) {
  TORCH_CHECK(Py_IsInitialized() != 0, "a memory pool cannot grow while Python ends");
  const py::gil_scoped_acquire gil;
  bury(nullptr);
  try {
    auto [address, owner] = py::handle(make)(size_bytes).cast<std::pair<uintptr_t, py::object>>();
    if (address == 0) return {nullptr, nullptr, py::str(owner)};
    return {reinterpret_cast<char *>(address), owner.release().ptr(), ""};
  } catch (py::error_already_set &error) {
    const std::string text = py::str(error.value());
    TORCH_CHECK(false, text);
  }
}

// ---- pools ----

// A forked child shares the pages of its parent, so it takes no piece of them.
std::atomic<unsigned> generation{0};

struct Pool {
  explicit Pool(py::object maker) : make(maker.release().ptr()) {}
  ~Pool() { let_go(make); }
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  PyObject *const make;  // see `make_segment`
  const unsigned made_in = generation.load();
  Heap heap;  // guarded by State::mutex, as is open
  bool open = true;
};
using PoolRef = std::shared_ptr<Pool>;

struct Place {
  PoolRef pool;
  Heap::Index index;
};

// Never destroyed: storages may end after all static objects.
struct State {
  std::mutex mutex;                    // never held while waiting, above all for the GIL
  std::map<uintptr_t, Place> places;   // of the segments of all pools, by address
  c10::DeleterFnPtr others = nullptr;  // frees memory of the previous allocator
};

State &state() {
  static State *const one = new State;
  return *one;
}

uintptr_t number(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The caller holds the mutex. Returns the segment's owner, to be let go after the mutex is released.
void *remove(const PoolRef &pool, Heap::Index index) {
  state().places.erase(number(pool->heap.segments().at(index).base));
  return pool->heap.remove(index);
}

// Releases the empty segments; also those that become empty later, unless the pool is kept open.
void release_empty(const PoolRef &pool, bool keep_open) {
  std::vector<void *> owners;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    pool->open = keep_open;
    for (const Heap::Index index : pool->heap.empty_segments()) owners.push_back(remove(pool, index));
  }
  for (void *const owner : owners) let_go(owner);
}

// The pools of a thread, the one in use first.
struct Entered {
  PoolRef pool;
  Entered *below;
};
thread_local Entered *top = nullptr;

// False, and nothing is done, unless `entered` is what this thread entered last.
bool leave(uintptr_t entered) {
  if (entered != number(top)) return false;
  const std::unique_ptr<Entered> gone(top);
  top = gone->below;
  return true;
}

// The source of segments may allocate tensors itself.
class Outside {
 public:
  Outside() : top_(std::exchange(top, nullptr)) {}
  ~Outside() { top = top_; }
  Outside(const Outside &) = delete;
  Outside &operator=(const Outside &) = delete;

 private:
  Entered *top_;
};

// ---- the allocator ----

void *take(const PoolRef &pool, size_t nbytes) {
  size_t wanted = 0;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (void *const found = pool->heap.take(nbytes)) return found;
    wanted = pool->heap.next_segment(nbytes);
  }
  const Outside outside;
  const NewSegment made = make_segment(pool->make, wanted);
  if (made.base == nullptr) {
    c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "phalanx memory pool: can't allocate memory: you tried to allocate ",
                     nbytes, " bytes, and a segment of ", wanted, " bytes cannot be had: ", made.failure);
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  const Heap::Index index = pool->heap.add(made.base, wanted, made.owner);
  state().places[number(made.base)] = {pool, index};
  return pool->heap.take(nbytes);  // this segment has room, so there is a piece whatever other threads took
}

// The deleter of every storage of a pool, for any thread, with or without the GIL.
void put_back(void *pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);  // first: then another thread may take the piece
  PoolRef pool;
  void *owner = nullptr;
  {
    std::unique_lock<std::mutex> lock(state().mutex);
    const auto next = state().places.upper_bound(number(pointer));
    const auto found = next == state().places.begin() ? next : std::prev(next);
    if (found == next ||
        number(pointer) - found->first >= found->second.pool->heap.segments().at(found->second.index).size_bytes) {
      const c10::DeleterFnPtr others = state().others;  // memory from raw_allocate outside of pools
      lock.unlock();
      others(pointer);
      return;
    }
    pool = found->second.pool;
    const Heap::Index index = found->second.index;
    bool empty = false;
    if (pool->heap.put_back(index, pointer, &empty) && empty && !pool->open) owner = remove(pool, index);
  }
  if (owner != nullptr) let_go(owner);
}

// The allocator of torch: it uses the pool of the thread, or else the previous allocator.
class Front final : public c10::Allocator {
 public:
  explicit Front(c10::Allocator *previous) : previous_(previous) {}

  c10::DataPtr allocate(size_t nbytes) override {
    const Entered *const entered = top;
    if (entered == nullptr || entered->pool->made_in != generation.load(std::memory_order_relaxed))
      return previous_->allocate(nbytes);
    void *const taken = take(entered->pool, nbytes);
    c10::profiledCPUMemoryReporter().New(taken, nbytes);
    return {taken, taken, &put_back, c10::Device(c10::DeviceType::CPU)};
  }

  // For raw_deallocate, which does not say where the memory came from.
  c10::DeleterFnPtr raw_deleter() const override { return previous_->raw_deleter() != nullptr ? &put_back : nullptr; }

  void copy_data(void *to, const void *from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  c10::Allocator *const previous_;
};

// Keeps the state consistent in the child, whatever other threads of the parent did.
void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }
void after_fork_in_child() {
  generation.fetch_add(1);
  after_fork();
}

// Puts the allocator in front of torch's. False: something else was put in front of it since.
bool install() {
  static Front *const front = [] {
    c10::Allocator *const previous = c10::GetCPUAllocator();
    state().others = previous->raw_deleter();
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    auto *const made = new Front(previous);               // torch keeps it for ever
    std::atomic_thread_fence(std::memory_order_release);  // other threads may read torch's pointer to it at once
    c10::SetCPUAllocator(made);
    return made;
  }();
  return c10::GetCPUAllocator() == front;
}

// ---- the module ----

// A pool as a Python object. At its end, segments with tensors stay until these are gone.
struct Handle {
  explicit Handle(py::object make) : pool(std::make_shared<Pool>(std::move(make))) {}
  ~Handle() {
    if (Py_IsInitialized() != 0) release_empty(pool, false);
  }
  Handle(const Handle &) = delete;
  Handle &operator=(const Handle &) = delete;

  const PoolRef pool;
};

// (address, size, bytes in use) of each segment
std::vector<std::tuple<uintptr_t, size_t, size_t>> segments(const Handle &handle) {
  bury(nullptr);
  const std::lock_guard<std::mutex> lock(state().mutex);
  std::vector<std::tuple<uintptr_t, size_t, size_t>> found;
  for (const auto &[index, each] : handle.pool->heap.segments())
    found.emplace_back(number(each.base), each.size_bytes, each.used_bytes);
  return found;
}

uint64_t layout(const Handle &handle) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return handle.pool->heap.layout();
}

void trim(const Handle &handle) {
  bury(nullptr);
  release_empty(handle.pool, true);
}

// From now on this thread allocates from the pool. Returns what `leave` wants.
uintptr_t enter(const Handle &handle) { return number(top = new Entered{handle.pool, top}); }

}  // namespace

PYBIND11_MODULE(phalanx_pool, module) {
  module.def("install", &install);
  module.def("leave", &leave);
  py::class_<Handle>(module, "Pool")
      .def(py::init<py::object>())
      .def("segments", &segments)
      .def("layout", &layout)
      .def("trim", &trim)
      .def("enter", &enter);
}
