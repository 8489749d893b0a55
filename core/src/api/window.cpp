// Implements phx_window_*.
#include "api/entry.h"

using namespace phx;

namespace {

phx_status check_memory(const char *operation, const World &world, const void *base, size_t bytes, BlockRef *out,
                        size_t *offset) {
  *out = world.blocks().find(base);
  if (!*out || !(*out)->live() || (*out)->imported)
    return fail(PHX_ERR_NOT_FOUND, operation,
                "%p is not memory that this rank can share. Allocate it with phx_mem_alloc "
                "(phalanx.symm_mem.empty).",
                base);
  if ((*out)->on_device())
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "the memory is on a GPU, and windows are in memory of the host; allocate it with device NULL");
  *offset = static_cast<size_t>(static_cast<const char *>(base) - static_cast<const char *>((*out)->base));
  if (bytes > (*out)->size - *offset)
    return fail(PHX_ERR_INVALID, operation, "%zu bytes at %p end beyond the block, which has %zu bytes", bytes, base,
                (*out)->size);
  return PHX_OK;
}

// Checks what a transfer is of, and calls body(window, the resolved timeout in ms).
template <class Body>
phx_status transfer(const char *operation, phx_window *window, int32_t group_rank, size_t offset, const void *data,
                    size_t bytes, int64_t timeout_ms, const Body &body) {
  return with_timeout(operation, window, timeout_ms, [&](Window &w, int64_t timeout) -> phx_status {
    PHX_TRY(w.check(operation, group_rank, offset, bytes));
    if (data == nullptr && bytes != 0) return fail(PHX_ERR_INVALID, operation, "data is NULL, but bytes is not 0");
    return body(w, timeout);
  });
}

}  // namespace

extern "C" {

phx_status phx_window_create(phx_group *group, phx_world *memory, void *base, size_t bytes, int64_t timeout_ms,
                             phx_window **out) {
  return with_live_handle("window_create", group, [&](Group &g, const char *operation) -> phx_status {
    BlockRef block;
    size_t offset = 0;
    int64_t timeout = 0;
    phx_status status = PHX_OK;
    if (out == nullptr) status = fail(PHX_ERR_INVALID, operation, "out is NULL");
    if (status == PHX_OK && memory != nullptr) status = check_handle(operation, memory);
    if (status == PHX_OK)
      status = check_memory(operation, memory != nullptr ? *memory->ptr : g.world(), base, bytes, &block, &offset);
    if (status == PHX_OK) status = g.resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return g.refuse_exchange();
    if (g.failed()) return g.raise_revoked(operation);
    auto made = std::make_unique<phx_window>();
    made->group = group->ptr;
    PHX_TRY(windows_of(g).create(block, offset, bytes, timeout, &made->window));
    *out = made.release();
    return PHX_OK;
  });
}

phx_status phx_window_put(phx_window *window, int32_t group_rank, size_t offset, const void *data, size_t bytes,
                          int32_t signal, int64_t timeout_ms) {
  return transfer("window_put", window, group_rank, offset, data, bytes, timeout_ms, [&](Window &w, int64_t timeout) {
    return w.put(group_rank, offset, data, bytes, signal != 0, timeout);
  });
}

phx_status phx_window_get(phx_window *window, int32_t group_rank, size_t offset, void *data, size_t bytes,
                          int64_t timeout_ms) {
  return transfer("window_get", window, group_rank, offset, data, bytes, timeout_ms,
                  [&](Window &w, int64_t timeout) { return w.get(group_rank, offset, data, bytes, timeout); });
}

phx_status phx_window_wait_signal(phx_window *window, int32_t group_rank, int64_t timeout_ms) {
  return transfer("window_wait_signal", window, group_rank, 0, nullptr, 0, timeout_ms,
                  [&](Window &w, int64_t timeout) { return w.wait_signal(group_rank, timeout); });
}

phx_status phx_window_get_signals(phx_window *window, int32_t group_rank, uint32_t *out) {
  return with_handle("window_get_signals", window, [&](Window &w, const char *operation) -> phx_status {
    if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "out is NULL");
    PHX_TRY(w.check(operation, group_rank, 0, 0));
    *out = w.signals(group_rank);
    return PHX_OK;
  });
}

phx_status phx_window_flush(phx_window *window, int64_t timeout_ms) {
  return with_timeout("window_flush", window, timeout_ms,
                      [&](Window &, int64_t timeout) { return windows_of(*window->group).flush(timeout); });
}

void *phx_window_memory(phx_window *window, int32_t group_rank) {
  void *found = nullptr;
  (void)with_handle("window_memory", window, [&](const Window &w, const char *operation) -> phx_status {
    PHX_TRY(w.check(operation, group_rank, 0, 0));
    found = w.memory(group_rank);
    if (found != nullptr) return PHX_OK;
    const Group &g = *window->group;
    return fail(PHX_ERR_UNSUPPORTED, operation,
                "%s shares no memory with rank %d; use phx_window_get and phx_window_put",
                g.describe(group_rank).c_str(), g.self_rank());
  });
  return found;
}

void phx_window_release(phx_window *window) {
  if (window == nullptr || is_inherited(window)) return;
  const std::shared_ptr<Group> group = window->group;
  delete window;
}
}
