// The Python side of the backend.
//
// Compiled on first use for the torch and the Python that are installed, and loaded only by these.
#include <torch/csrc/utils/pybind.h>

#include <pthread.h>

#include <algorithm>

#include "autograd.h"
#include "backend.h"
#include "show_ops.h"
#include "window.h"

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

  template <class Result, class... Given>
  Result call(const Given &...given) const {
    const py::gil_scoped_acquire gil;
    try {
      return (*function_)(given...).template cast<Result>();
    } catch (py::error_already_set &error) {
      if (!error.matches(PyExc_Exception)) throw;  // such as Ctrl-C
      const std::string text = py::str(error.value());
      if (error.matches(PyExc_ValueError)) throw phalanx::InvalidArgument(text);
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

using Functions = std::unordered_map<std::string, uintptr_t>;

// The ranks that Python describes: (position of this rank, global ranks, store, connection). A connection has the
// methods address(timeout in ms) -> (address of a retained phx_group, token), called at the first use, close(), and
// block(tensor) -> (addresses of the block of symmetric memory that it lies in, and of the phx_world of that).
phalanx::Roster roster_of(const Functions &functions, const std::string &name, const py::tuple &described) {
  const py::object connection = described[3];
  Hooks hooks;
  hooks.connect = [held = Callable(connection.attr("address"))](Milliseconds timeout) {
    const auto [address, token] = held.call<std::pair<uintptr_t, std::string>>(timeout.count());
    return Hooks::Connection{reinterpret_cast<phx_group *>(address), token};
  };
  hooks.disconnect = [held = Callable(connection.attr("close"))] {
    if (Py_IsInitialized() != 0) held.call<void>();
  };
  hooks.block = [held = Callable(connection.attr("block"))](const at::Tensor &tensor) {
    const auto [base, world] = held.call<std::pair<uintptr_t, uintptr_t>>(tensor);
    return Hooks::Block{reinterpret_cast<char *>(base), reinterpret_cast<phx_world *>(world)};
  };
  hooks.unlocked = unlocked;
  auto engine = std::make_shared<phalanx::Engine>(phalanx::load_core(functions), name, std::move(hooks));
  engines().push_back(engine);
  return {described[0].cast<int>(), described[1].cast<std::vector<int64_t>>(),
          described[2].cast<c10::intrusive_ptr<c10d::Store>>(), std::move(engine)};
}

// Args: functions: the addresses of the functions of core_api.h by name; name, timeout_ms: those of the group; roster:
// see roster_of; membership: an object of the class Membership in _membership.py.
c10::intrusive_ptr<c10d::Backend> create(const Functions &functions, const std::string &name, int64_t timeout_ms,
                                         const py::tuple &roster, const py::object &membership) {
  phalanx::Membership changes;
  changes.handle = [held = Callable(membership.attr("handle"))] { return held.call<std::string>(); };
  changes.reconfigure = [functions, name, held = Callable(membership.attr("reconfigure"))](
                            int64_t uuid, const std::vector<std::string> &handles, bool ordered, Milliseconds timeout) {
    const py::gil_scoped_acquire gil;
    return roster_of(functions, name, held.call<py::tuple>(uuid, handles, ordered, timeout.count()));
  };
  changes.shrink = [held = Callable(membership.attr("shrink"))](const std::vector<int64_t> &positions,
                                                                Milliseconds timeout) {
    return held.call<c10::intrusive_ptr<c10d::Backend>>(positions, timeout.count());
  };
  return c10::make_intrusive<phalanx::Backend>(roster_of(functions, name, roster), Milliseconds(timeout_ms),
                                               std::move(changes));
}

}  // namespace

PYBIND11_MODULE(phalanx_c10d, module) {
  module.def("create", &create);
  module.def("close_all", &close_all);
  phalanx::add_recording(module);
  phalanx::add_autograd_kernels();
#ifdef C10D_BACKEND_HAS_WINDOW
  module.def(
      "window_get",
      [](const c10::intrusive_ptr<c10d::Window> &window, const at::Tensor &out, int64_t rank, int64_t offset) {
        auto *const own = dynamic_cast<phalanx::Window *>(window.get());
        phalanx::require(own != nullptr, "window_get: the window is of another backend than phalanx");
        own->get(out, rank, offset);
      },
      py::call_guard<py::gil_scoped_release>());
#endif
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
