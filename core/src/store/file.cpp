// The store in a file that the processes of one host share: what the operations mean in terms of the log.
#include "base/error.h"
#include "base/wait.h"
#include "store/file_log.h"
#include "store/store.h"

namespace phx::store {
namespace {

class FileStore final : public phx_store {
 public:
  explicit FileStore(std::unique_ptr<FileLog> log) : log_(std::move(log)) {}

  phx_status set(const char *key, const void *value, size_t size) override {
    return exclusively("store_set",
                       [&](const char *operation) { return log_->append(operation, FileLog::kSet, key, value, size); });
  }
  // Nothing wakes a reader of a file, so it looks again after growing pauses.
  phx_status await(const char *operation, const char *key, std::string *value, const Deadline &deadline) override {
    Backoff backoff(50, 5000);
    for (;;) {
      uint64_t known = 0;  // what this look has seen: another thread of this store may see more meanwhile
      const phx_status status = look(operation, key, value, deadline, &known);
      if (status != PHX_IN_PROGRESS) return status;
      do {
        if (deadline.passed()) return fail_key_timeout(operation, key, deadline);
        backoff.pause(deadline);
      } while (!log_->may_have_grown(known));
    }
  }
  phx_status add(const char *key, int64_t delta, int64_t *result) override {
    return exclusively("store_add", [&](const char *operation) { return add_locked(operation, key, delta, result); });
  }
  phx_status remove(const char *key) override {
    return exclusively("store_remove", [&](const char *operation) -> phx_status {
      if (log_->find(key) == nullptr) return fail_key_missing(operation, key);
      return log_->append(operation, FileLog::kRemove, key, nullptr, 0);
    });
  }

 private:
  // Runs `body` with the lock and with all that is in the file known.
  template <class Body>
  phx_status exclusively(const char *operation, Body &&body) {
    PHX_TRY(log_->lock(operation, FileLog::Access::kExclusive, Deadline::after_ms(CallTimeout::ms())));
    const FileLock lock(*log_, std::adopt_lock);
    return body(operation);
  }

  phx_status add_locked(const char *operation, const char *key, int64_t delta, int64_t *result) {
    std::string current;
    const FileLog::Location *place = log_->find(key);
    if (place != nullptr) PHX_TRY(log_->read_value(operation, key, *place, &current));
    int64_t sum = 0;
    PHX_TRY(add_to_counter(key, place == nullptr ? nullptr : &current, delta, &sum));
    const std::string text = std::to_string(sum);
    PHX_TRY(log_->append(operation, FileLog::kSet, key, text.data(), text.size()));
    *result = sum;
    return PHX_OK;
  }

  // PHX_IN_PROGRESS: the key is not there.
  phx_status look(const char *operation, const char *key, std::string *value, const Deadline &deadline,
                  uint64_t *known) {
    PHX_TRY(log_->lock(operation, FileLog::Access::kShared, deadline));
    const FileLock lock(*log_, std::adopt_lock);
    *known = log_->known();
    const FileLog::Location *place = log_->find(key);
    if (place == nullptr) return PHX_IN_PROGRESS;
    return value == nullptr ? PHX_OK : log_->read_value(operation, key, *place, value);
  }

  std::unique_ptr<FileLog> log_;
};

}  // namespace

phx_status make_file_store(const char *operation, const char *path, phx_store **out) {
  PHX_TRY(check_out(operation, out));
  if (path == nullptr || *path == '\0') return fail(PHX_ERR_INVALID, operation, "the path is empty");
  std::unique_ptr<FileLog> log;
  PHX_TRY(FileLog::open(operation, path, &log));
  // A file of something else is refused now and not by a later get.
  PHX_TRY(log->lock(operation, FileLog::Access::kShared, Deadline::after_ms(kDefaultTimeoutMs)));
  log->unlock();
  *out = new FileStore(std::move(log));
  return PHX_OK;
}

}  // namespace phx::store
