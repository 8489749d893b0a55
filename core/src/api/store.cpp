// Implements phx_store_*.
#include <algorithm>
#include <cstring>

#include "api/entry.h"
#include "store/store.h"

using namespace phx;
using phx::store::check_key;
using phx::store::check_out;
using phx::store::check_store;
using phx::store::check_timeout;
using phx::store::check_value;

namespace {

// Calls `body` if the store is not NULL.
template <class Body>
phx_status with_store(const char *operation, const phx_store *store, Body &&body) noexcept {
  return guarded(operation, [&]() -> phx_status {
    PHX_TRY(check_store(operation, store));
    return call_body(operation, body);
  });
}

// Calls `body` if the store is not NULL and the key is valid.
template <class Body>
phx_status with_key(const char *operation, const phx_store *store, const char *key, Body &&body) noexcept {
  return with_store(operation, store, [&]() -> phx_status {
    PHX_TRY(check_key(operation, key));
    return call_body(operation, body);
  });
}

// Calls make(operation, arguments...), which makes a store.
template <class... Params, class... Args>
phx_status make(const char *operation, phx_status (*make_store)(const char *, Params...), Args... args) noexcept {
  return guarded(operation, [&] { return make_store(operation, args...); });
}

phx_status check_keys(const char *operation, const char *const *keys, size_t count) {
  if (keys == nullptr && count > 0)
    return fail(PHX_ERR_INVALID, operation, "the array of keys is NULL but its count is %zu", count);
  for (size_t i = 0; i < count; ++i) PHX_TRY(check_key(operation, keys[i]));
  return PHX_OK;
}

}  // namespace

extern "C" {

phx_status phx_store_memory(phx_store **out) { return make("store_memory", store::make_memory_store, out); }

phx_status phx_store_file(const char *path, phx_store **out) {
  return make("store_file", store::make_file_store, path, out);
}

phx_status phx_store_prefix(phx_store *base, const char *prefix, phx_store **out) {
  return make("store_prefix", store::make_prefix_store, base, prefix, out);
}

phx_status phx_store_wrap(const phx_store_ops *ops, void *self, phx_store **out) {
  return make("store_wrap", store::make_wrapped_store, ops, self, out);
}

phx_status phx_store_tcp_serve(const char *bind_address, const void *token, size_t token_size, uint16_t *port,
                               phx_store **out) {
  return make("store_tcp_serve", store::make_tcp_server, bind_address, token, token_size, port, out);
}

phx_status phx_store_tcp_connect(const char *address, uint16_t port, const void *token, size_t token_size,
                                 int64_t timeout_ms, phx_store **out) {
  return make("store_tcp_connect", store::make_tcp_client, address, port, token, token_size, timeout_ms, out);
}

phx_status phx_store_set(phx_store *store, const char *key, const void *value, size_t size) {
  return with_key("store_set", store, key, [&](const char *operation) -> phx_status {
    PHX_TRY(check_value(operation, value, size));
    // Implementations copy with memcpy, to which NULL must not be passed even for 0 bytes.
    return store->set(key, size == 0 ? "" : value, size);
  });
}

phx_status phx_store_get(phx_store *store, const char *key, void *value, size_t capacity, size_t *size,
                         int64_t timeout_ms) {
  return with_key("store_get", store, key, [&](const char *operation) -> phx_status {
    PHX_TRY(check_out(operation, size));
    PHX_TRY(check_timeout(operation, &timeout_ms));
    if (value == nullptr && capacity > 0)
      return fail(PHX_ERR_INVALID, operation, "the buffer is NULL but its capacity is %zu", capacity);
    std::string stored;
    PHX_TRY(store->get(key, &stored, timeout_ms));
    const size_t copied = std::min(capacity, stored.size());
    if (copied > 0) std::memcpy(value, stored.data(), copied);
    *size = stored.size();
    return PHX_OK;
  });
}

phx_status phx_store_wait(phx_store *store, const char *const *keys, size_t count, int64_t timeout_ms) {
  return with_store("store_wait", store, [&](const char *operation) -> phx_status {
    PHX_TRY(check_keys(operation, keys, count));
    PHX_TRY(check_timeout(operation, &timeout_ms));
    return store->wait(keys, count, timeout_ms);
  });
}

phx_status phx_store_add(phx_store *store, const char *key, int64_t delta, int64_t *result) {
  return with_key("store_add", store, key, [&](const char *operation) -> phx_status {
    PHX_TRY(check_out(operation, result));
    return store->add(key, delta, result);
  });
}

phx_status phx_store_remove(phx_store *store, const char *key) {
  return with_key("store_remove", store, key, [&] { return store->remove(key); });
}

phx_store *phx_store_retain(phx_store *store) {
  if (store != nullptr) store->retain();
  return store;
}

void phx_store_release(phx_store *store) {
  if (store != nullptr) store->release();
}
}
