// What all kinds of store have in common: checks of arguments, the arithmetic of counters, the texts of the usual
// failures.
#pragma once

#include <cstdint>
#include <string>

#include "base/deadline.h"
#include "phalanx/phalanx.h"

namespace phx::store {

// A store has no world that could set a default; it is that of a world (phx_world_params.timeout_ms).
inline constexpr int64_t kDefaultTimeoutMs = 300000;

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

// Calls await_key(key) for each of the keys of a wait, until it fails.
template <class AwaitKey>
phx_status wait_for_each(const char *const *keys, size_t count, AwaitKey await_key) {
  phx_status status = PHX_OK;
  for (size_t i = 0; i < count && status == PHX_OK; ++i) status = await_key(keys[i]);
  return status;
}

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
