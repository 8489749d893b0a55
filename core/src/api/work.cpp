// phx_work_*.
#include <algorithm>

#include "base/error.h"
#include "base/guard.h"
#include "base/wait.h"
#include "group/group.h"

using phx::fail;
using phx::guarded;

extern "C" {

phx_status phx_work_test(phx_work *work) {
  return guarded("work_test", work, [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_test", "work_test: work is NULL");
    const phx_status status = work->ptr->test();
    if (status == PHX_IN_PROGRESS) work->group->world().progress().poll(nullptr);
    return status;
  });
}

phx_status phx_work_wait(phx_work *work, int64_t timeout_ms) {
  return guarded("work_wait", work, [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_wait", "work_wait: work is NULL");
    int64_t timeout = 0;
    const phx_status status = work->group->resolve_timeout("work_wait", timeout_ms, &timeout);
    return status != PHX_OK ? status : work->ptr->wait(timeout);
  });
}

phx_status phx_work_wait_any(phx_work *const *works, size_t count, int64_t timeout_ms, size_t *index) {
  const char *operation = "work_wait_any";
  return guarded(operation, [&]() -> phx_status {
    if (works == nullptr || index == nullptr)
      return fail(PHX_ERR_INVALID, operation, "%s: works or index is NULL", operation);
    phx_work *const *const end = works + count;
    phx_work *const *const first = std::find_if(works, end, [](const phx_work *work) { return work != nullptr; });
    if (first == end) return fail(PHX_ERR_INVALID, operation, "%s: there is no work to wait for", operation);
    int64_t timeout = 0;
    phx_status status = (*first)->group->resolve_timeout(operation, timeout_ms, &timeout);
    if (status != PHX_OK) return status;
    const phx::Deadline deadline = phx::Deadline::after_ms(timeout);
    phx::LazyDeadline until(deadline, nullptr);
    phx::Backoff backoff(20, 500);
    const auto look = [&] {
      bool moved = false;
      for (phx_work *const *at = first; at != end; ++at) {
        if (*at == nullptr) continue;
        status = phx::is_inherited(*at) ? phx::refuse_fork(operation, world_of(**at)) : (*at)->ptr->test();
        *index = static_cast<size_t>(at - works);
        if (status != PHX_IN_PROGRESS) return phx::WaitResult::kReached;
        moved |= (*at)->group->world().progress().poll(nullptr);
      }
      if (moved) backoff = phx::Backoff(20, 500);
      return moved ? phx::WaitResult::kMoved : phx::WaitResult::kNothing;
    };
    const auto sleep = [&] {
      backoff.pause(deadline);
      return phx::WaitResult::kNothing;
    };
    if (phx::Waiter(until).wait(look, sleep) == phx::WaitResult::kReached) return status;
    return fail(PHX_ERR_TIMEOUT, operation, "%s: none of the %zu works is complete: %s", operation, count,
                phx::timed_out(timeout, phx::kLimitOfCall).c_str());
  });
}

phx_status phx_work_expire(phx_work *work, int64_t timeout_ms) {
  return guarded("work_expire", [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_expire", "work_expire: work is NULL");
    int64_t timeout = 0;
    const phx_status status = work->group->resolve_timeout("work_expire", timeout_ms, &timeout);
    return status != PHX_OK ? status : work->ptr->wait(-timeout);
  });
}

phx_status phx_work_get_error(phx_work *work, phx_error_info *out) {
  if (work == nullptr) return fail(PHX_ERR_INVALID, "work_get_error", "work_get_error: work is NULL");
  if (phx::is_inherited(work)) return phx::refuse_fork("work_get_error", world_of(*work));
  if (work->ptr->state() >= 0)
    return fail(PHX_ERR_NOT_FOUND, "work_get_error", "work_get_error: this work has no error");
  return phx::copy_error_out(work->ptr->error(), out, "work_get_error");
}

phx_status phx_work_get_source(phx_work *work, int32_t *group_rank) {
  if (work == nullptr || group_rank == nullptr)
    return fail(PHX_ERR_INVALID, "work_get_source", "work_get_source: work or group_rank is NULL");
  if (phx::is_inherited(work)) return phx::refuse_fork("work_get_source", world_of(*work));
  if (work->ptr->state() != PHX_OK || work->ptr->source() < 0)
    return fail(PHX_ERR_NOT_FOUND, "work_get_source", "work_get_source: this work is no receive that completed");
  *group_rank = work->ptr->source();
  return PHX_OK;
}

phx_work *phx_work_retain(phx_work *work) {
  if (work != nullptr) work->references.fetch_add(1, std::memory_order_relaxed);
  return work;
}

void phx_work_release(phx_work *work) {
  if (work == nullptr || phx::is_inherited(work)) return;
  if (work->references.fetch_sub(1, std::memory_order_acq_rel) == 1) delete work;
}
}
