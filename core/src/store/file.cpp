// The store in a file that the processes of one host share: what the operations mean in terms of the log.
#include "base/error.h"
#include "base/wait.h"
#include "store/file_log.h"
#include "store/semantics.h"
#include "store/store.h"

namespace phx::store {
namespace {

class FileStore final : public phx_store {
 public:
  explicit FileStore(std::unique_ptr<FileLog> log) : log_(std::move(log)) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    return exclusively("store_set",
                       [&](const char *operation) { return log_->append_set(operation, key, value, size); });
  }
  phx_status get(const char *key, std::string *value, int64_t timeout_ms) override {
    return get_before("store_get", key, value, Deadline::after_ms(timeout_ms));
  }
  phx_status wait(const char *const *keys, size_t count, int64_t timeout_ms) override {
    const Deadline deadline = Deadline::after_ms(timeout_ms);
    return wait_for_each(keys, count, [&](auto key) { return get_before("store_wait", key, nullptr, deadline); });
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return exclusively("store_add", [&](const char *operation) { return add_locked(operation, key, delta, result); });
  }
  phx_status remove(const char *key) override {
    return exclusively("store_remove", [&](const char *operation) {
      return log_->find(key) == nullptr ? fail_key_missing(operation, key) : log_->append_remove(operation, key);
    });
  }

 private:
  // Runs `body` with the lock and with all that is in the file known.
  template <class Body>
  phx_status exclusively(const char *operation, Body &&body) {
    FileLock lock(operation, *log_, FileLog::Access::kExclusive, Deadline::after_ms(CallTimeout::ms()));
    if (lock.status() != PHX_OK) return lock.status();
    const phx_status status = log_->refresh(operation);
    return status != PHX_OK ? status : body(operation);
  }

  phx_status add_locked(const char *operation, const char *key, int64_t delta, int64_t *result) {
    std::string current;
    const FileLog::Location *place = log_->find(key);
    phx_status status = place == nullptr ? PHX_OK : log_->read_value(operation, key, *place, &current);
    int64_t sum = 0;
    if (status == PHX_OK) status = add_to_counter(key, place == nullptr ? nullptr : &current, delta, &sum);
    if (status != PHX_OK) return status;
    const std::string text = std::to_string(sum);
    status = log_->append_set(operation, key, text.data(), text.size());
    if (status == PHX_OK) *result = sum;
    return status;
  }

  // Nothing wakes a reader of a file, so it looks again after growing pauses. value may be NULL.
  phx_status get_before(const char *operation, const char *key, std::string *value, const Deadline &deadline) {
    Backoff backoff(50, 5000);
    for (;;) {
      bool found = false;
      uint64_t known = 0;  // what this look has seen: another thread of this store may see more meanwhile
      const phx_status status = look(operation, key, value, deadline, &found, &known);
      if (status != PHX_OK || found) return status;
      do {
        if (deadline.passed()) return fail_key_timeout(operation, key, deadline);
        backoff.pause(deadline);
      } while (!log_->may_have_grown(known));
    }
  }

  phx_status look(const char *operation, const char *key, std::string *value, const Deadline &deadline, bool *found,
                  uint64_t *known) {
    FileLock lock(operation, *log_, FileLog::Access::kShared, deadline);
    if (lock.status() != PHX_OK) return lock.status();
    PHX_TRY(log_->refresh(operation));
    *known = log_->known();
    const FileLog::Location *place = log_->find(key);
    *found = place != nullptr;
    return place == nullptr || value == nullptr ? PHX_OK : log_->read_value(operation, key, *place, value);
  }

  std::unique_ptr<FileLog> log_;
};

}  // namespace

phx_status make_file_store(const char *operation, const char *path, phx_store **out) {
  phx_status status = check_out(operation, out);
  if (status != PHX_OK) return status;
  if (path == nullptr || *path == '\0') return fail(PHX_ERR_INVALID, operation, "the path is empty");
  std::unique_ptr<FileLog> log;
  status = FileLog::open(operation, path, &log);
  if (status != PHX_OK) return status;
  // A file of something else is refused now and not by a later get.
  {
    FileLock lock(operation, *log, FileLog::Access::kShared, Deadline::after_ms(kDefaultTimeoutMs));
    status = lock.status() != PHX_OK ? lock.status() : log->refresh(operation);
  }
  if (status == PHX_OK) *out = new FileStore(std::move(log));
  return status;
}

}  // namespace phx::store
