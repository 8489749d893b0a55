// The Python side of the backend: a module with one function, `create`.
//
// Compiled on first use for the torch and the Python that are installed, and loaded only by these.
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include <algorithm>

#include "checked.h"
#include "show_ops.h"

namespace py = pybind11;

namespace {

using phalanx::Hooks;
using phalanx::Milliseconds;

// A Python callable that threads without the interpreter's lock may hold, and let go of.
class Callable {
 public:
  explicit Callable(py::object function)
      : function_(new py::object(std::move(function)), [](py::object *held) {
          if (Py_IsInitialized() == 0) return;  // torch may let go of a group while the process exits
          const py::gil_scoped_acquire gil;
          delete held;
        }) {}

  template <class Use>
  void call(Use use) const {
    const py::gil_scoped_acquire gil;
    try {
      use(*function_);
    } catch (py::error_already_set &error) {
      if (!error.matches(PyExc_Exception)) throw;  // such as Ctrl-C
      const std::string text = py::str(error.value());
      if (error.matches(PyExc_ValueError)) C10_THROW_ERROR(ValueError, text);
      if (error.matches(PyExc_NotImplementedError)) C10_THROW_ERROR(NotImplementedError, text);
      C10_THROW_ERROR(DistBackendError, text);
    }
  }

 private:
  std::shared_ptr<py::object> function_;
};

void unlocked(const std::function<void()> &run) {
  if (Py_IsInitialized() != 0 && PyGILState_Check() != 0) {
    const py::gil_scoped_release release;
    run();
  } else {
    run();
  }
}

// The slots of phalanx.core.interrupts: the type and value of a signal handler's exception, and the main thread.
void **kept = nullptr;

class Interrupted final : public py::builtin_exception {
 public:
  explicit Interrupted(const std::string &text) : builtin_exception(text) {}
  void set_error() const override {  // a failed work throws it at each wait
    PyObject *const exception = static_cast<PyObject *>(std::exchange(kept[1], nullptr));
    if (exception != nullptr)
      PyErr_SetObject(static_cast<PyObject *>(kept[0]), exception);
    else
      PyErr_SetString(PyExc_RuntimeError, what());
  }
};

void throw_kept(const std::string &text) {
  if (kept != nullptr && kept[1] != nullptr && reinterpret_cast<uintptr_t>(kept[2]) == pthread_self())
    throw Interrupted(text);
}

// The engines that may still live. Callers hold the GIL.
std::vector<std::weak_ptr<phalanx::Engine>> &engines() {
  static auto *const all = new std::vector<std::weak_ptr<phalanx::Engine>>;
  all->erase(std::remove_if(all->begin(), all->end(), [](const auto &each) { return each.expired(); }), all->end());
  return *all;
}

// Called at the end of the interpreter: the threads must end before it.
void close_all() {
  const auto all = engines();
  for (const auto &each : all)
    if (const auto engine = each.lock()) engine->complete();
  for (const auto &each : all)
    if (const auto engine = each.lock()) engine->close();
}

// Args: functions: the addresses of the functions of core_api.h by name; name, store: those of the group; rank: the
// group rank; ranks: the global ranks; connect: a callable(timeout in ms) -> (address of a phx_group, token), called at
// the first use; disconnect: a callable(), called when the group is not used any more.
c10::intrusive_ptr<c10d::Backend> create(const std::unordered_map<std::string, uintptr_t> &functions, std::string name,
                                         int rank, std::vector<int64_t> ranks, c10::intrusive_ptr<c10d::Store> store,
                                         int64_t timeout_ms, py::object connect, py::object disconnect) {
  Hooks hooks;
  hooks.connect = [held = Callable(std::move(connect))](Milliseconds timeout) {
    Hooks::Connection made;
    held.call([&](py::object &function) {
      const auto [address, token] = function(timeout.count()).cast<std::pair<uintptr_t, std::string>>();
      made = {reinterpret_cast<phx_group *>(address), token};
    });
    return made;
  };
  hooks.disconnect = [held = Callable(std::move(disconnect))] {
    if (Py_IsInitialized() != 0) held.call([](py::object &function) { function(); });
  };
  hooks.unlocked = unlocked;
  auto engine = std::make_shared<phalanx::Engine>(phalanx::load_core(functions), std::move(name), std::move(hooks));
  engines().push_back(engine);
  return c10::make_intrusive<phalanx::CheckedBackend>(rank, std::move(ranks), std::move(store),
                                                      Milliseconds(timeout_ms), std::move(engine));
}

}  // namespace

PYBIND11_MODULE(phalanx_c10d, module) {
  module.def("create", &create);
  module.def("close_all", &close_all);
  phalanx::add_recording(module);
  module.def("set_invalid", [](const py::object &type) {  // the class that InvalidArgument is in Python
    static PyObject *invalid = nullptr;
    invalid = type.inc_ref().ptr();
    py::register_exception_translator([](std::exception_ptr raised) {
      try {
        std::rethrow_exception(std::move(raised));
      } catch (const phalanx::InvalidArgument &error) {
        PyErr_SetString(invalid, error.what_without_backtrace());
      }
    });
  });
  module.def("set_interrupted", [](uintptr_t slots) {
    kept = reinterpret_cast<void **>(slots);
    phalanx::throw_interruption = throw_kept;
  });
#define X(name) "phx_" #name,
  module.attr("functions") = std::vector<std::string>{PHALANX_CORE_FUNCTIONS(X)};
#undef X
}
