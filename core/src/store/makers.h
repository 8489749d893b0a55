// The kinds of stores, one function each. They check their arguments; `operation` is what their errors name.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phx::store {

phx_status make_memory_store(const char *operation, phx_store **out);
phx_status make_file_store(const char *operation, const char *path, phx_store **out);
phx_status make_prefix_store(const char *operation, phx_store *base, const char *prefix, phx_store **out);
// When it fails, `self` still belongs to the caller: destroy is not called.
phx_status make_wrapped_store(const char *operation, const phx_store_ops *ops, void *self, phx_store **out);
phx_status make_tcp_server(const char *operation, const char *bind_address, const void *token, size_t token_size,
                           uint16_t *port, phx_store **out);
phx_status make_tcp_client(const char *operation, const char *address, uint16_t port, const void *token,
                           size_t token_size, int64_t timeout_ms, phx_store **out);

}  // namespace phx::store
