// What all kinds of store have in common: see the header.
#include "store/semantics.h"

#include <charconv>

#include "base/error.h"

namespace phx::store {

thread_local int64_t CallTimeout::current_ = kDefaultTimeoutMs;

phx_status add_to_counter(const char *key, const std::string *current, int64_t delta, int64_t *result) {
  int64_t value = 0;
  if (current != nullptr) {
    const char *end = current->data() + current->size();
    const auto parsed = std::from_chars(current->data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end)
      return fail(
          PHX_ERR_INVALID, "store_add",
          "store_add: key '%.128s' holds %zu bytes that are not a decimal 64-bit number; use another key for the "
          "counter, or remove this one",
          key, current->size());
  }
  int64_t sum = 0;
  if (__builtin_add_overflow(value, delta, &sum))
    return fail(PHX_ERR_INVALID, "store_add",
                "store_add: key '%.128s' is at %lld; adding %lld leaves the range of 64 bits, so it stays as it was",
                key, static_cast<long long>(value), static_cast<long long>(delta));
  *result = sum;
  return PHX_OK;
}

std::string timed_out(int64_t timeout_ms) {
  return phx::timed_out(timeout_ms, timeout_ms == kDefaultTimeoutMs ? "the default of stores" : kLimitOfCall);
}

phx_status fail_key_timeout(const char *operation, const char *key, const Deadline &deadline) {
  return fail(
      PHX_ERR_TIMEOUT, operation,
      "%s: %s: key '%.128s' was not set; see whether the rank that sets it is running, or give a longer timeout",
      operation, timed_out(deadline.budget_ms()).c_str(), key);
}

phx_status fail_key_missing(const char *operation, const char *key) {
  return fail(PHX_ERR_NOT_FOUND, operation, "%s: there is no key '%.128s' in this store", operation, key);
}

}  // namespace phx::store
