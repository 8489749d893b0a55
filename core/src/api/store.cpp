// Implements phx_store_*.
#include <algorithm>
#include <cstring>

#include "api/entry.h"
#include "store/store.h"

using phx::guarded;
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
    const phx_status status = check_store(operation, store);
    return status != PHX_OK ? status : body();
  });
}

// Calls `body` if the store is not NULL and the key is valid.
template <class Body>
phx_status with_key(const char *operation, const phx_store *store, const char *key, Body &&body) noexcept {
  return with_store(operation, store, [&]() -> phx_status {
    const phx_status status = check_key(operation, key);
    return status != PHX_OK ? status : body();
  });
}

phx_status check_keys(const char *operation, const char *const *keys, size_t count) {
  if (keys == nullptr && count > 0)
    return phx::fail(PHX_ERR_INVALID, operation, "the array of keys is NULL but its count is %zu", count);
  phx_status status = PHX_OK;
  for (size_t i = 0; i < count && status == PHX_OK; ++i) status = check_key(operation, keys[i]);
  return status;
}

}  // namespace

extern "C" {

phx_status phx_store_memory(phx_store **out) {
  constexpr const char *kOperation = "store_memory";
  return guarded(kOperation, [&] { return phx::store::make_memory_store(kOperation, out); });
}

phx_status phx_store_file(const char *path, phx_store **out) {
  constexpr const char *kOperation = "store_file";
  return guarded(kOperation, [&] { return phx::store::make_file_store(kOperation, path, out); });
}

phx_status phx_store_prefix(phx_store *base, const char *prefix, phx_store **out) {
  constexpr const char *kOperation = "store_prefix";
  return guarded(kOperation, [&] { return phx::store::make_prefix_store(kOperation, base, prefix, out); });
}

phx_status phx_store_wrap(const phx_store_ops *ops, void *self, phx_store **out) {
  constexpr const char *kOperation = "store_wrap";
  return guarded(kOperation, [&] { return phx::store::make_wrapped_store(kOperation, ops, self, out); });
}

phx_status phx_store_tcp_serve(const char *bind_address, const void *token, size_t token_size, uint16_t *port,
                               phx_store **out) {
  constexpr const char *kOperation = "store_tcp_serve";
  return guarded(kOperation,
                 [&] { return phx::store::make_tcp_server(kOperation, bind_address, token, token_size, port, out); });
}

phx_status phx_store_tcp_connect(const char *address, uint16_t port, const void *token, size_t token_size,
                                 int64_t timeout_ms, phx_store **out) {
  constexpr const char *kOperation = "store_tcp_connect";
  return guarded(kOperation, [&] {
    return phx::store::make_tcp_client(kOperation, address, port, token, token_size, timeout_ms, out);
  });
}

phx_status phx_store_set(phx_store *store, const char *key, const void *value, size_t size) {
  constexpr const char *kOperation = "store_set";
  return with_key(kOperation, store, key, [&]() -> phx_status {
    const phx_status status = check_value(kOperation, value, size);
    // Implementations copy with memcpy, to which NULL must not be passed even for 0 bytes.
    return status != PHX_OK ? status : store->set(key, size == 0 ? "" : value, size);
  });
}

phx_status phx_store_get(phx_store *store, const char *key, void *value, size_t capacity, size_t *size,
                         int64_t timeout_ms) {
  constexpr const char *kOperation = "store_get";
  return with_key(kOperation, store, key, [&]() -> phx_status {
    phx_status status = check_out(kOperation, size);
    if (status == PHX_OK) status = check_timeout(kOperation, &timeout_ms);
    if (status != PHX_OK) return status;
    if (value == nullptr && capacity > 0)
      return phx::fail(PHX_ERR_INVALID, kOperation, "the buffer is NULL but its capacity is %zu", capacity);
    std::string stored;
    status = store->get(key, &stored, timeout_ms);
    if (status != PHX_OK) return status;
    const size_t copied = std::min(capacity, stored.size());
    if (copied > 0) std::memcpy(value, stored.data(), copied);
    *size = stored.size();
    return PHX_OK;
  });
}

phx_status phx_store_wait(phx_store *store, const char *const *keys, size_t count, int64_t timeout_ms) {
  constexpr const char *kOperation = "store_wait";
  return with_store(kOperation, store, [&]() -> phx_status {
    phx_status status = check_keys(kOperation, keys, count);
    if (status == PHX_OK) status = check_timeout(kOperation, &timeout_ms);
    return status != PHX_OK ? status : store->wait(keys, count, timeout_ms);
  });
}

phx_status phx_store_add(phx_store *store, const char *key, int64_t delta, int64_t *result) {
  constexpr const char *kOperation = "store_add";
  return with_key(kOperation, store, key, [&]() -> phx_status {
    const phx_status status = check_out(kOperation, result);
    return status != PHX_OK ? status : store->add(key, delta, result);
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
