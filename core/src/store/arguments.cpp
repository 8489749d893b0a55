// Checks of what callers hand to the phx_store_* functions: see the header.
#include "store/arguments.h"

#include <algorithm>
#include <cstring>

#include "base/deadline.h"
#include "base/error.h"
#include "store/semantics.h"
#include "store/store.h"

namespace phx::store {
namespace {

constexpr size_t kMaxToken = 4096;  // far more than any secret needs

}  // namespace

phx_status check_store(const char *operation, const phx_store *store) {
  if (store != nullptr) return PHX_OK;
  return fail(PHX_ERR_INVALID, operation, "%s: the store is NULL", operation);
}

phx_status check_out(const char *operation, const void *out) {
  if (out != nullptr) return PHX_OK;
  return fail(PHX_ERR_INVALID, operation, "%s: the out-parameter is NULL", operation);
}

phx_status check_key(const char *operation, const char *key) {
  if (key == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: the key is NULL", operation);
  const size_t length = strnlen(key, kMaxStoreKey + 1);
  if (length == 0) return fail(PHX_ERR_INVALID, operation, "%s: the key is empty", operation);
  if (length > kMaxStoreKey)
    return fail(PHX_ERR_INVALID, operation, "%s: the key '%.64s...' has more than %zu bytes; shorten it", operation,
                key, kMaxStoreKey);
  return PHX_OK;
}

phx_status check_value(const char *operation, const void *value, size_t size) {
  if (value == nullptr && size > 0)
    return fail(PHX_ERR_INVALID, operation, "%s: the value is NULL but its size is %zu", operation, size);
  if (size > kMaxStoreValue)
    return fail(PHX_ERR_INVALID, operation,
                "%s: the value has %zu bytes, but a store takes at most %zu; split it over several keys", operation,
                size, kMaxStoreValue);
  return PHX_OK;
}

phx_status check_token(const char *operation, const void *token, size_t token_size) {
  if (token == nullptr || token_size == 0)
    return fail(PHX_ERR_INVALID, operation,
                "%s: the token is empty; give the same secret on the serving and on the connecting side", operation);
  if (token_size > kMaxToken)
    return fail(PHX_ERR_INVALID, operation, "%s: the token has %zu bytes; at most %zu are taken", operation, token_size,
                kMaxToken);
  return PHX_OK;
}

phx_status check_timeout(const char *operation, int64_t *timeout_ms) {
  if (*timeout_ms < 0)
    return fail(PHX_ERR_INVALID, operation,
                "%s: timeout_ms is %lld; no wait is unbounded: give milliseconds, or 0 for the default of %lld",
                operation, static_cast<long long>(*timeout_ms), static_cast<long long>(kDefaultTimeoutMs));
  if (*timeout_ms == 0) *timeout_ms = kDefaultTimeoutMs;
  *timeout_ms = std::min(*timeout_ms, Deadline::kMaxMs);  // a caller's own store may compute with it
  return PHX_OK;
}

}  // namespace phx::store
