// The thread's last error, and the exceptions that carry it out of a kernel.
#include "errors.h"

#include <pthread.h>

#include <atomic>
#include <cstdint>
#include <new>
#include <stdexcept>
#include <utility>

#include "optional_shim.h"
#include "phalanx_torch.h"

// As pybind11 declares it (pybind11/pybind11.h), which knows an exception of C++ by the name of its type: one that sets
// the exception of Python by itself. Nothing else of pybind11 is needed here, and nothing of Python.
namespace pybind11 {
class PHX_API builtin_exception : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
  virtual void set_error() const = 0;
};
}  // namespace pybind11

namespace phxt {
namespace {

// What phxt_set_interrupted was given.
std::atomic<phxt_raise> raise_object{nullptr};
std::atomic<void **> kept{nullptr};

bool is_kept() {
  void **const slots = kept.load(std::memory_order_acquire);
  return slots != nullptr && slots[1] != nullptr && reinterpret_cast<uintptr_t>(slots[2]) == pthread_self();
}

class Interrupted final : public pybind11::builtin_exception {
 public:
  Interrupted(const std::string &text) : builtin_exception(text) {}
  void set_error() const override {
    void **const slots = kept.load(std::memory_order_acquire);
    raise_object.load()(slots[0], std::exchange(slots[1], nullptr));
  }
};

struct LastError {
  phx_status status = PHX_OK;
  std::string text;
};
thread_local LastError last_error;

}  // namespace

phx_status set_error(phx_status status, std::string text) {
  last_error.status = status;
  last_error.text = std::move(text);
  return status;
}

void raise(phx_status status, const std::string &text) {
  set_error(status, text);
  if (is_kept()) throw Interrupted(text);
  if (status == PHX_ERR_INVALID) throw std::invalid_argument(text);
  throw std::runtime_error(text);
}

void raise_core(phx_status status) { raise(status, phx_last_error()); }

void raise_kept(phx_status status) { raise(status, last_error.text); }

phx_status status_of_exception() noexcept {
  try {
    throw;
  } catch (const std::bad_alloc &) {
    return set_error(PHX_ERR_NO_MEMORY, "out of memory");
  } catch (const std::exception &error) {
    if (last_error.status < 0 && last_error.text == error.what()) return last_error.status;  // by raise()
    return set_error(PHX_ERR_INTERNAL, error.what());
  } catch (...) {
    return set_error(PHX_ERR_INTERNAL, "an exception of an unknown type");
  }
}

std::string torch_reason() {
  const auto what = optional_shim().exception_get_what_without_backtrace;
  if (!what) return "torch has printed the reason";  // before 2.13 there is no call that returns it
  std::string reason = what();
  const size_t traceback = reason.find("\n\nAt:\n");  // of an exception of Python
  return traceback == std::string::npos ? reason : reason.substr(0, traceback);
}

void raise_torch(const char *doing) {
  raise(PHX_ERR_INTERNAL, std::string("phalanx could not ") + doing + ": " + torch_reason());
}

}  // namespace phxt

extern "C" void phxt_set_interrupted(phxt_raise raise, void **kept) {
  phxt::raise_object.store(raise);
  phxt::kept.store(kept, std::memory_order_release);
}
extern "C" int32_t phxt_take_interrupted(void **type, void **exception) {
  if (!phxt::is_kept()) return 0;
  void **const slots = phxt::kept.load(std::memory_order_acquire);
  *type = slots[0];
  *exception = std::exchange(slots[1], nullptr);
  return 1;
}
extern "C" phx_status phxt_last_status(void) { return phxt::last_error.status; }
extern "C" const char *phxt_last_error(void) { return phxt::last_error.text.c_str(); }
