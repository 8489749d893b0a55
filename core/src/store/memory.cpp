// The store among the threads of one process: a Table with a handle.
#include "base/error.h"
#include "store/semantics.h"
#include "store/store.h"
#include "store/table.h"

namespace phx::store {
namespace {

class MemoryStore final : public phx_store {
 public:
  phx_status set(const char *key, const void *value, size_t size) override {
    const phx_status status = check_process("store_set");
    if (status == PHX_OK) table_.set(key, value, size);
    return status;
  }
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    const phx_status status = check_process("store_get");
    return status != PHX_OK ? status : table_.get("store_get", key, value, Deadline::after_ms(timeout_ms));
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    const phx_status status = check_process("store_wait");
    return status != PHX_OK ? status : table_.wait(keys, count, Deadline::after_ms(timeout_ms));
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    const phx_status status = check_process("store_add");
    return status != PHX_OK ? status : table_.add(key, delta, result);
  }
  phx_status remove(const char *key) override {
    const phx_status status = check_process("store_remove");
    return status != PHX_OK ? status : table_.remove(key);
  }

 private:
  phx_status check_process(const char *operation) const {
    if (!is_inherited()) return PHX_OK;
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "%s: this memory store belongs to the process from which this one was forked, and joins the threads of "
                "that process only; use a file or TCP store among processes",
                operation);
  }

  Table table_;
};

}  // namespace

phx_status make_memory_store(const char *operation, phx_store **out) {
  const phx_status status = check_out(operation, out);
  if (status == PHX_OK) *out = new MemoryStore;
  return status;
}

}  // namespace phx::store
