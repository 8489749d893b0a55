// The key-value store behind phx_store. A handle is reference-counted; implementations derive from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

#include "base/fork.h"
#include "phalanx/phalanx.h"

// The opaque handle IS the base class. Every method is thread-safe, bounded by its timeout (> 0, milliseconds), and on
// failure records the thread's error and returns its status.
struct phx_store {
  virtual phx_status set(const char *key, const void *value, size_t size) = 0;
  // PHX_ERR_TIMEOUT when the key did not appear in time.
  virtual phx_status get(const char *key, std::string *value, int64_t timeout_ms) = 0;
  virtual phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) = 0;
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
class StoreRef {
 public:
  StoreRef() = default;
  explicit StoreRef(phx_store *store) : store_(store) {
    if (store_ != nullptr) store_->retain();
  }
  StoreRef(const StoreRef &other) : StoreRef(other.store_) {}
  StoreRef(StoreRef &&other) noexcept : store_(other.store_) { other.store_ = nullptr; }
  StoreRef &operator=(StoreRef other) noexcept {
    phx_store *mine = store_;
    store_ = other.store_;
    other.store_ = mine;
    return *this;
  }
  ~StoreRef() {
    if (store_ != nullptr) store_->release();
  }
  phx_store *get() const { return store_; }
  phx_store *operator->() const { return store_; }
  explicit operator bool() const { return store_ != nullptr; }

 private:
  phx_store *store_ = nullptr;
};

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

}  // namespace phx::store
