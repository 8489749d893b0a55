// The Python module: the class `Pool` and `install`.
//
// Compiled at the first use for the installed torch and Python, and loaded by these only.
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <atomic>
#include <memory>
#include <utility>

#include "pools.h"

namespace py = pybind11;

namespace {

using phalanx_pool::PoolRef;
using phalanx_pool::Source;

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

// make: a callable(size in bytes) -> (address, owner), or (0, reason).
Source source_of(py::object make) {
  const std::shared_ptr<py::object> held(new py::object(std::move(make)), [](py::object *object) {
    let_go(object->release().ptr());
    delete object;
  });
  Source source;
  source.make = [held](size_t size_bytes) {
    TORCH_CHECK(Py_IsInitialized() != 0, "a memory pool cannot grow while Python ends");
    const py::gil_scoped_acquire gil;
    bury(nullptr);
    try {
      auto [address, keeper] = (*held)(size_bytes).cast<std::pair<uintptr_t, py::object>>();
      Source::Segment made;
      if (address == 0) {
        made.failure = py::str(keeper);
      } else {
        made.base = reinterpret_cast<char *>(address);
        made.owner = keeper.release().ptr();
      }
      return made;
    } catch (py::error_already_set &error) {
      const std::string text = py::str(error.value());
      TORCH_CHECK(false, text);
    }
  };
  source.release = let_go;
  return source;
}

class Pool {
 public:
  explicit Pool(py::object make) : pool_(phalanx_pool::open_pool(source_of(std::move(make)))) {}
  ~Pool() {
    if (Py_IsInitialized() != 0) phalanx_pool::close_pool(pool_);
  }
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  phalanx_pool::Segments segments() const {
    bury(nullptr);
    return phalanx_pool::segments(pool_);
  }
  uint64_t layout() const { return phalanx_pool::layout(pool_); }
  void trim() const {
    bury(nullptr);
    phalanx_pool::trim(pool_);
  }
  uintptr_t enter() const { return reinterpret_cast<uintptr_t>(phalanx_pool::enter(pool_)); }

 private:
  PoolRef pool_;
};

}  // namespace

PYBIND11_MODULE(phalanx_pool, module) {
  module.def("install", &phalanx_pool::install);
  module.def("leave", [](uintptr_t entered) { return phalanx_pool::leave(reinterpret_cast<void *>(entered)); });
  py::class_<Pool>(module, "Pool")
      .def(py::init<py::object>())
      .def("segments", &Pool::segments)
      .def("layout", &Pool::layout)
      .def("trim", &Pool::trim)
      .def("enter", &Pool::enter);
}
