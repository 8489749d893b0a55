// Checks of what callers hand to the phx_store_* functions. All fail with PHX_ERR_INVALID and name the call.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx::store {

phx_status check_store(const char *operation, const phx_store *store);
phx_status check_out(const char *operation, const void *out);
phx_status check_key(const char *operation, const char *key);
phx_status check_value(const char *operation, const void *value, size_t size);
phx_status check_token(const char *operation, const void *token, size_t token_size);
// Puts the default in the place of 0.
phx_status check_timeout(const char *operation, int64_t *timeout_ms);

}  // namespace phx::store
