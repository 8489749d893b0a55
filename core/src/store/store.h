// The key-value store behind phx_store. A handle is reference-counted; implementations derive from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "base/fork.h"

// The opaque handle IS the base class. Every method is thread-safe, bounded by its timeout (> 0, milliseconds) or
// deadline, and on failure records the thread's error and returns its status.
struct phx_store {
  virtual phx_status set(const char *key, const void *value, size_t size) = 0;
  // Waits for the key; PHX_ERR_TIMEOUT when it did not appear in time. `value` may be NULL.
  virtual phx_status await(const char *operation, const char *key, std::string *value,
                           const phx::Deadline &deadline) = 0;
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) {
    return await("store_get", key, value, phx::Deadline::after_ms(timeout_ms));
  }
  virtual phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms);
  virtual phx_status add(const char *key, int64_t delta, int64_t *result) = 0;
  virtual phx_status remove(const char *key) = 0;
  // The host that serves it, as an address without a port; empty if there is none or it is not known.
  virtual std::string server() const { return {}; }

  void retain() { references_.fetch_add(1, std::memory_order_relaxed); }
  void release() {
    // A forked child leaves its parent's store alone: threads of the parent may have been waiting inside it.
    if (is_inherited()) return;
    // acq_rel: the last release sees all that the others did before theirs.
    if (references_.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
  // Whether this process is a forked child of the one that made the store.
  bool is_inherited() const { return made_in_ != phx::process_generation(); }

 protected:
  phx_store() = default;
  virtual ~phx_store() = default;

 private:
  std::atomic<int64_t> references_{1};
  const uint32_t made_in_ = phx::process_generation();
};

namespace phx {

// An owning reference to a store.
using StoreRef = std::shared_ptr<phx_store>;
inline StoreRef store_ref(phx_store *store) {
  if (store == nullptr) return nullptr;
  store->retain();
  return StoreRef(store, [](phx_store *released) { released->release(); });
}

inline constexpr size_t kMaxStoreKey = 1024;                // bytes; longer keys are PHX_ERR_INVALID
inline constexpr size_t kMaxStoreValue = size_t{16} << 20;  // bytes; longer values are PHX_ERR_INVALID

}  // namespace phx

// The kinds of stores, one function each. They check their arguments; `operation` is what their errors name.
namespace phx::store {

phx_status make_memory_store(const char *operation, phx_store **out);
phx_status make_file_store(const char *operation, const char *path, phx_store **out);
phx_status make_prefix_store(const char *operation, phx_store *base, const char *prefix, phx_store **out);
// When it fails, `self` still belongs to the caller: destroy is not called.
phx_status make_wrapped_store(const char *operation, const phx_store_ops *ops, void *self, phx_store **out);
phx_status make_tcp_server(const char *operation, const char *bind_address, const void *token, size_t token_size,
                           uint16_t *port, phx_store **out);
phx_status make_tcp_client(const char *operation, const char *address, uint16_t port, const void *token,
                           size_t token_size, int64_t timeout_ms, phx_store **out);

// A store has no world that could set a default; it is that of a world (phx_world_params.timeout_ms).
inline constexpr int64_t kDefaultTimeoutMs = 300000;

// ---- what all kinds of store have in common

// Checks of what callers hand to the phx_store_* functions. All fail with PHX_ERR_INVALID and name the call.
phx_status check_store(const char *operation, const phx_store *store);
phx_status check_out(const char *operation, const void *out);
phx_status check_key(const char *operation, const char *key);
phx_status check_value(const char *operation, const void *value, size_t size);
phx_status check_token(const char *operation, const void *token, size_t token_size);
// Puts the default in the place of 0.
phx_status check_timeout(const char *operation, int64_t *timeout_ms);

// The new value of the counter whose text is `current`; NULL means that there is none yet, which counts as 0.
phx_status add_to_counter(const char *key, const std::string *current, int64_t delta, int64_t *result);

// The text of an error for a wait of this length.
std::string timed_out(int64_t timeout_ms);
phx_status fail_key_timeout(const char *operation, const char *key, const Deadline &deadline);
phx_status fail_key_missing(const char *operation, const char *key);

// How long set, add and remove may take on this thread while an object of this class lives: they have no timeout of
// their own, but their caller may have one.
class CallTimeout {
 public:
  explicit CallTimeout(int64_t ms) : before_(current_) { current_ = ms > 0 ? ms : 1; }
  ~CallTimeout() { current_ = before_; }
  CallTimeout(const CallTimeout &) = delete;
  CallTimeout &operator=(const CallTimeout &) = delete;
  static int64_t ms() { return current_; }

 private:
  const int64_t before_;
  static thread_local int64_t current_;
};

}  // namespace phx::store
