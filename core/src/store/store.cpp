// What all kinds of store have in common: see the header.
#include "store/store.h"

#include <algorithm>
#include <charconv>
#include <cstring>

#include "base/error.h"

phx_status phx_store::wait(const char *const *keys, size_t count, int64_t timeout_ms) {
  const phx::Deadline deadline = phx::Deadline::after_ms(timeout_ms);
  for (size_t i = 0; i < count; ++i) PHX_TRY(await("store_wait", keys[i], nullptr, deadline));
  return PHX_OK;
}

namespace phx::store {
namespace {

constexpr size_t kMaxToken = 4096;  // far more than any secret needs

}  // namespace

thread_local int64_t CallTimeout::current_ = kDefaultTimeoutMs;

phx_status check_store(const char *operation, const phx_store *store) {
  if (store != nullptr) return PHX_OK;
  return fail(PHX_ERR_INVALID, operation, "the store is NULL");
}

phx_status check_out(const char *operation, const void *out) {
  if (out != nullptr) return PHX_OK;
  return fail(PHX_ERR_INVALID, operation, "the out-parameter is NULL");
}

phx_status check_key(const char *operation, const char *key) {
  if (key == nullptr) return fail(PHX_ERR_INVALID, operation, "the key is NULL");
  const size_t length = strnlen(key, kMaxStoreKey + 1);
  if (length == 0) return fail(PHX_ERR_INVALID, operation, "the key is empty");
  if (length > kMaxStoreKey)
    return fail(PHX_ERR_INVALID, operation, "the key '%.64s...' has more than %zu bytes; shorten it", key,
                kMaxStoreKey);
  return PHX_OK;
}

phx_status check_value(const char *operation, const void *value, size_t size) {
  if (value == nullptr && size > 0)
    return fail(PHX_ERR_INVALID, operation, "the value is NULL but its size is %zu", size);
  if (size > kMaxStoreValue)
    return fail(PHX_ERR_INVALID, operation,
                "the value has %zu bytes, but a store takes at most %zu; split it over several keys", size,
                kMaxStoreValue);
  return PHX_OK;
}

phx_status check_token(const char *operation, const void *token, size_t token_size) {
  if (token == nullptr || token_size == 0)
    return fail(PHX_ERR_INVALID, operation,
                "the token is empty; give the same secret on the serving and on the connecting side");
  if (token_size > kMaxToken)
    return fail(PHX_ERR_INVALID, operation, "the token has %zu bytes; at most %zu are taken", token_size, kMaxToken);
  return PHX_OK;
}

phx_status check_timeout(const char *operation, int64_t *timeout_ms) {
  if (*timeout_ms < 0)
    return fail(PHX_ERR_INVALID, operation,
                "timeout_ms is %lld; no wait is unbounded: give milliseconds, or 0 for the default of %lld",
                static_cast<long long>(*timeout_ms), static_cast<long long>(kDefaultTimeoutMs));
  if (*timeout_ms == 0) *timeout_ms = kDefaultTimeoutMs;
  *timeout_ms = std::min(*timeout_ms, Deadline::kMaxMs);  // a caller's own store may compute with it
  return PHX_OK;
}

phx_status add_to_counter(const char *key, const std::string *current, int64_t delta, int64_t *result) {
  int64_t value = 0;
  if (current != nullptr) {
    const char *end = current->data() + current->size();
    const auto parsed = std::from_chars(current->data(), end, value);
    if (parsed.ec != std::errc() || parsed.ptr != end)
      return fail(PHX_ERR_INVALID, "store_add",
                  "key '%.128s' holds %zu bytes that are not a decimal 64-bit number; use another key for the "
                  "counter, or remove this one",
                  key, current->size());
  }
  int64_t sum = 0;
  if (__builtin_add_overflow(value, delta, &sum))
    return fail(PHX_ERR_INVALID, "store_add",
                "key '%.128s' is at %lld; adding %lld leaves the range of 64 bits, so it stays as it was", key,
                static_cast<long long>(value), static_cast<long long>(delta));
  *result = sum;
  return PHX_OK;
}

std::string timed_out(int64_t timeout_ms) {
  return phx::timed_out(timeout_ms, timeout_ms == kDefaultTimeoutMs ? "the default of stores" : kLimitOfCall);
}

phx_status fail_key_timeout(const char *operation, const char *key, const Deadline &deadline) {
  return fail(PHX_ERR_TIMEOUT, operation,
              "%s: key '%.128s' was not set; see whether the rank that sets it is running, or give a longer timeout",
              timed_out(deadline.budget_ms()).c_str(), key);
}

phx_status fail_key_missing(const char *operation, const char *key) {
  return fail(PHX_ERR_NOT_FOUND, operation, "key '%.128s' is not in this store", key);
}

}  // namespace phx::store
