// A view of another store in which every key gets a prefix.
#include <string>
#include <vector>

#include "base/error.h"
#include "store/store.h"

namespace phx::store {
namespace {

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

phx_status make_prefix_store(const char *operation, phx_store *base, const char *prefix, phx_store **out) {
  PHX_TRY(check_store(operation, base));
  PHX_TRY(check_out(operation, out));
  if (prefix == nullptr) return fail(PHX_ERR_INVALID, operation, "the prefix is NULL");
  if (*prefix != '\0') PHX_TRY(check_key(operation, prefix));  // "" is allowed: a view of the whole store
  *out = new PrefixStore(base, prefix);
  return PHX_OK;
}

}  // namespace phx::store
