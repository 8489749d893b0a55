// Implements phx_work_*.
#include <algorithm>

#include "api/entry.h"
#include "base/wait.h"

using namespace phx;

extern "C" {

phx_status phx_work_test(phx_work *work) {
  return with_handle("work_test", work, [](const phx_work &w) {
    const phx_status status = w.ptr->test();
    if (status == PHX_IN_PROGRESS) w.group->world().progress().poll(nullptr);
    return status;
  });
}

phx_status phx_work_wait(phx_work *work, int64_t timeout_ms) {
  return with_timeout("work_wait", work, timeout_ms,
                      [](const phx_work &w, int64_t timeout) { return w.ptr->wait(timeout); });
}

phx_status phx_work_wait_any(phx_work *const *works, size_t count, int64_t timeout_ms, size_t *index) {
  const char *operation = "work_wait_any";
  if (works == nullptr || index == nullptr) return fail(PHX_ERR_INVALID, operation, "works or index is NULL");
  phx_work *const *const end = works + count;
  phx_work *const *const first = std::find_if(works, end, [](const phx_work *work) { return work != nullptr; });
  if (first == end) return fail(PHX_ERR_INVALID, operation, "count is 0 or all works are NULL; pass at least one work");
  return with_timeout(operation, *first, timeout_ms, [&](const phx_work &, int64_t timeout) -> phx_status {
    const Deadline deadline = Deadline::after_ms(timeout);
    LazyDeadline until(deadline, nullptr);
    phx_status status = PHX_OK;
    Backoff backoff(20, 500);
    const auto look = [&] {
      bool moved = false;
      for (phx_work *const *at = first; at != end; ++at) {
        if (*at == nullptr) continue;
        status = check_handle(operation, *at);
        if (status == PHX_OK) status = (*at)->ptr->test();
        *index = static_cast<size_t>(at - works);
        if (status != PHX_IN_PROGRESS) return WaitResult::kReached;
        moved |= (*at)->group->world().progress().poll(nullptr);
      }
      if (moved) backoff = Backoff(20, 500);
      return moved ? WaitResult::kMoved : WaitResult::kNothing;
    };
    const auto sleep = [&] {
      backoff.pause(deadline);
      return WaitResult::kNothing;
    };
    if (Waiter(until).wait(look, sleep) == WaitResult::kReached) return status;
    return fail(PHX_ERR_TIMEOUT, operation, "none of the %zu works is complete: %s", count,
                timed_out(timeout, kLimitOfCall).c_str());
  });
}

phx_status phx_work_expire(phx_work *work, int64_t timeout_ms) {
  return with_timeout("work_expire", work, timeout_ms,
                      [](const phx_work &w, int64_t timeout) { return w.ptr->wait(-timeout); });
}

phx_status phx_work_get_error(phx_work *work, phx_error_info *out) {
  return with_handle("work_get_error", work, [&](const phx_work &w, const char *operation) -> phx_status {
    if (w.ptr->state() >= 0)
      return fail(PHX_ERR_NOT_FOUND, operation, "this work has not failed, so there is no error to return");
    return copy_error_out(w.ptr->error(), out, operation);
  });
}

phx_status phx_work_get_source(phx_work *work, int32_t *group_rank) {
  return with_handle("work_get_source", work, [&](const phx_work &w, const char *operation) -> phx_status {
    if (group_rank == nullptr) return fail(PHX_ERR_INVALID, operation, "group_rank is NULL");
    if (w.ptr->state() != PHX_OK || w.ptr->source() < 0)
      return fail(PHX_ERR_NOT_FOUND, operation,
                  "only a receive that has completed has a source, and this work is not one");
    *group_rank = w.ptr->source();
    return PHX_OK;
  });
}

phx_work *phx_work_retain(phx_work *work) {
  if (work != nullptr) work->references.fetch_add(1, std::memory_order_relaxed);
  return work;
}

void phx_work_release(phx_work *work) {
  if (work == nullptr || is_inherited(work)) return;
  if (work->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete work;
}
}
