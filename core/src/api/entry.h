// Helpers for the entry points of the C API: they check handle and timeout first, and let no exception pass.
#pragma once

#include <exception>
#include <new>
#include <type_traits>

#include "base/abi.h"
#include "group/group.h"
#include "p2p/window.h"
#include "symm/symm.h"
#include "world/world.h"

namespace phx {

// Calls `body`, which may take the name of the operation after its other arguments, or return nothing: PHX_OK.
template <class Body, class... Args>
phx_status call_body(const char *operation, Body &body, Args &...args) {
  if constexpr (std::is_invocable_v<Body &, Args &..., const char *>)
    return body(args..., operation);
  else if constexpr (std::is_void_v<std::invoke_result_t<Body &, Args &...>>)
    return body(args...), PHX_OK;
  else
    return body(args...);
}

// Runs `body`, which returns a phx_status. An exception becomes an error of `operation`, and a timeout that the
// thread's hook caused becomes PHX_ERR_INTERRUPTED.
template <class Body>
phx_status guarded(const char *operation, Body &&body) noexcept {
  try {
    const phx_status status = call_body(operation, body);
    return status == PHX_ERR_TIMEOUT ? timeout_or_interrupt(operation) : status;
  } catch (const std::bad_alloc &) {
    return fail(PHX_ERR_NO_MEMORY, operation, "out of memory");
  } catch (const std::exception &error) {
    return fail(PHX_ERR_INTERNAL, operation, "%s", error.what());
  }
}

// For each kind of handle: its name in errors, the object behind it, and the group it belongs to (NULL: none).
constexpr const char *name_of_handle(const phx_world *) { return "world"; }
constexpr const char *name_of_handle(const phx_group *) { return "group"; }
constexpr const char *name_of_handle(const phx_symm *) { return "symm"; }
constexpr const char *name_of_handle(const phx_window *) { return "window"; }
constexpr const char *name_of_handle(const phx_work *) { return "work"; }
inline World &behind(const phx_world &handle) { return *handle.ptr; }
inline Group &behind(const phx_group &handle) { return *handle.ptr; }
inline Symm &behind(const phx_symm &handle) { return *handle.symm; }
inline Window &behind(const phx_window &handle) { return *handle.window; }
inline const phx_work &behind(const phx_work &handle) { return handle; }
inline const Group *group_of(const phx_world &) { return nullptr; }
inline const Group *group_of(const phx_group &handle) { return handle.ptr.get(); }
inline const Group *group_of(const phx_symm &handle) { return &handle.symm->group(); }
inline const Group *group_of(const phx_window &handle) { return handle.group.get(); }
inline const Group *group_of(const phx_work &handle) { return handle.group.get(); }
inline const World &world_of(const phx_world &handle) { return *handle.ptr; }
template <class Handle>
const World &world_of(const Handle &handle) {
  return group_of(handle)->world();
}

// Whether a handle is not NULL and belongs to the parent of this forked child. Releasing such a handle does nothing: a
// lock of what is behind it may have been held at the fork, and its threads and connections are the parent's.
template <class Handle>
bool is_inherited(const Handle *handle) {
  return handle != nullptr && __builtin_expect(world_of(*handle).forked(), 0);
}

// PHX_OK if the handle is not NULL and this process is not a forked child of the one that created it.
template <class Handle>
phx_status check_handle(const char *operation, const Handle *handle) {
  if (handle == nullptr) return fail(PHX_ERR_INVALID, operation, "%s is NULL", name_of_handle(handle));
  return is_inherited(handle) ? refuse_fork(operation, world_of(*handle)) : PHX_OK;
}

// Calls body(the object behind the handle) after check_handle. An error that names no group gets that of the handle.
template <class Handle, class Body>
phx_status with_handle(const char *operation, Handle *handle, Body &&body) noexcept {
  PHX_TRY(check_handle(operation, handle));
  const phx_status status = guarded(operation, [&] { return call_body(operation, body, behind(*handle)); });
  if (__builtin_expect(status >= 0, 1)) return status;
  const Group *const group = group_of(*handle);
  return group == nullptr ? status : Failed(status).in(group->name().c_str(), group->self_rank());
}

// Like with_handle, but a finalized world is an error too.
template <class Handle, class Body>
phx_status with_live_handle(const char *operation, Handle *handle, Body &&body) noexcept {
  return with_handle(operation, handle, [&](auto &object) -> phx_status {
    if (world_of(*handle).finalized())
      return fail(PHX_ERR_INVALID, operation, "this world was finalized; make a new one");
    return call_body(operation, body, object);
  });
}

// Like with_handle, but calls body(the object behind the handle, the resolved timeout in ms).
template <class Handle, class Body>
phx_status with_timeout(const char *operation, Handle *handle, int64_t timeout_ms, Body &&body) noexcept {
  return with_handle(operation, handle, [&](auto &object) -> phx_status {
    int64_t timeout = 0;
    PHX_TRY(group_of(*handle)->resolve_timeout(operation, timeout_ms, &timeout));
    return call_body(operation, body, object, timeout);
  });
}

// Checks a timeout that is to become a default.
inline phx_status check_default_timeout(const char *operation, int64_t timeout_ms) {
  if (timeout_ms >= 0) return PHX_OK;
  return fail(PHX_ERR_INVALID, operation, "timeout_ms is %lld; it must be positive, or 0 for the default",
              static_cast<long long>(timeout_ms));
}

}  // namespace phx
