// Stores over another: a store that the caller implements, behind a table of callbacks, and a view of a store in which
// every key gets a prefix.
#include <algorithm>
#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

#include "base/abi.h"
#include "store/store.h"

namespace phx::store {
namespace {

constexpr size_t kFirstCapacity = 4096;  // of a get; a longer value costs a second call

class WrapStore final : public phx_store {
 public:
  WrapStore(const phx_store_ops &ops, void *self) : ops_(ops), self_(self) {}
  ~WrapStore() override {
    if (ops_.destroy != nullptr) ops_.destroy(self_);
  }

  phx_status set(const char *key, const void *value, size_t size) override {
    return judge("store_set", key, ops_.set(self_, key, value, size));
  }
  // Asks again with a larger buffer as long as the value does not fit.
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    std::string buffer(kFirstCapacity, '\0');
    for (;;) {
      size_t size = 0;
      // At least 1: a key that exists must be found even at the very end of the time.
      const int64_t left_ms = std::max<int64_t>(deadline.left_ms(), 1);
      const phx_status status = ops_.get(self_, key, &buffer[0], buffer.size(), &size, left_ms);
      if (status == PHX_ERR_TIMEOUT) return fail_key_timeout(operation, key, deadline);
      if (status != PHX_OK) return judge(operation, key, status);
      if (size <= buffer.size() || value == nullptr) {
        if (value != nullptr) value->assign(buffer, 0, size);
        return PHX_OK;
      }
      if (size > kMaxStoreValue)
        return fail(PHX_ERR_INVALID, operation,
                    "the caller's store says that the value of key '%.128s' has %zu bytes; at most %zu are taken", key,
                    size, kMaxStoreValue);
      buffer.assign(size, '\0');
    }
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    int64_t sum = 0;
    PHX_TRY(judge("store_add", key, ops_.add(self_, key, delta, &sum)));
    *result = sum;
    return PHX_OK;
  }
  phx_status remove(const char *key) override {
    if (ops_.remove == nullptr)
      return fail(PHX_ERR_UNSUPPORTED, "store_remove",
                  "the caller's store has no remove function, so key '%.128s' stays", key);
    return judge("store_remove", key, ops_.remove(self_, key));
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    if (count == 0 || ops_.wait == nullptr) return phx_store::wait(keys, count, timeout_ms);
    return judge_wait(keys, count, timeout_ms, ops_.wait(self_, keys, count, timeout_ms));
  }

 private:
  // Callbacks give a status and no text, so the text is made here.
  static phx_status judge(const char *operation, const char *key, phx_status status) {
    if (status == PHX_OK) return PHX_OK;
    if (status == PHX_ERR_NOT_FOUND) return fail_key_missing(operation, key);
    if (status > 0)
      return fail_text(PHX_ERR_INVALID, operation,
                       "%s of key '%.128s': the caller's store returned %d, which is neither PHX_OK nor an error",
                       operation, key, status);
    return fail_text(status, operation, "%s of key '%.128s': the caller's store failed with %s (%d)", operation, key,
                     phx_status_name(status), status);
  }

  static phx_status judge_wait(const char *const *keys, size_t count, int64_t timeout_ms, phx_status status) {
    if (status != PHX_ERR_TIMEOUT) return judge("store_wait", keys[0], status);
    return fail(PHX_ERR_TIMEOUT, "store_wait",
                "%s: not all of %zu keys ('%.128s' is the first) were set; see whether the ranks that set them are "
                "running, or give a longer timeout",
                timed_out(timeout_ms).c_str(), count, keys[0]);
  }

  phx_store_ops ops_;
  void *self_;
};

// Copies as much of the caller's table as its version has; the rest stays NULL.
phx_status copy_ops(const char *operation, const phx_store_ops *ops, phx_store_ops *copy) {
  if (ops == nullptr) return fail(PHX_ERR_INVALID, operation, "the table of functions is NULL");
  PHX_TRY(read_in(ops, copy, operation));
  const uint32_t size = ops->struct_size;
  constexpr size_t required = offsetof(phx_store_ops, wait);
  if (size < required)
    return fail(PHX_ERR_ABI, operation,
                "struct_size is %u, but at least %zu is needed; set it to sizeof(phx_store_ops) before the call", size,
                required);
  if (copy->flags != 0)
    return fail(PHX_ERR_INVALID, operation, "flags is %u; this version knows none, so it must be 0", copy->flags);
  const char *missing = copy->set == nullptr   ? "set"
                        : copy->get == nullptr ? "get"
                        : copy->add == nullptr ? "add"
                                               : nullptr;
  if (missing != nullptr)
    return fail(PHX_ERR_INVALID, operation, "the function '%s' is NULL; set, get and add are required", missing);
  return PHX_OK;
}

// ---- prefixes

class PrefixStore final : public phx_store {
 public:
  PrefixStore(phx_store *base, const char *prefix) : base_(store_ref(base)), prefix_(prefix) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    return with_key("store_set", key, [&](const char *full) { return base_->set(full, value, size); });
  }
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    return with_key(operation, key, [&](const char *full) { return base_->await(operation, full, value, deadline); });
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return with_key("store_add", key, [&](const char *full) { return base_->add(full, delta, result); });
  }
  phx_status remove(const char *key) override {
    return with_key("store_remove", key, [&](const char *full) { return base_->remove(full); });
  }
  std::string server() const override { return base_->server(); }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    std::vector<std::string> full;
    std::vector<const char *> pointers;
    full.reserve(count);  // so that the pointers stay right
    pointers.reserve(count);
    for (size_t i = 0; i < count; ++i) {
      full.push_back(prefix_ + keys[i]);
      pointers.push_back(full.back().c_str());
      PHX_TRY(check_key("store_wait", pointers.back()));
    }
    return base_->wait(pointers.data(), count, timeout_ms);
  }

 private:
  template <class Call>
  phx_status with_key(const char *operation, const char *key, Call &&call) const {
    const std::string full = prefix_ + key;
    PHX_TRY(check_key(operation, full.c_str()));  // the two together may be too long
    return call(full.c_str());
  }

  StoreRef base_;
  std::string prefix_;
};

}  // namespace

phx_status make_wrapped_store(const char *operation, const phx_store_ops *ops, void *self, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  phx_store_ops copy = PHX_STORE_OPS_INIT;
  PHX_TRY(copy_ops(operation, ops, &copy));
  *out = new WrapStore(copy, self);
  return PHX_OK;
}

phx_status make_prefix_store(const char *operation, phx_store *base, const char *prefix, phx_store **out) {
  PHX_TRY(check_store(operation, base));
  PHX_TRY(check_out(operation, out));
  if (prefix == nullptr) return fail(PHX_ERR_INVALID, operation, "the prefix is NULL");
  if (*prefix != '\0') PHX_TRY(check_key(operation, prefix));  // "" is allowed: a view of the whole store
  *out = new PrefixStore(base, prefix);
  return PHX_OK;
}

}  // namespace phx::store
