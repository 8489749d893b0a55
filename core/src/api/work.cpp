// phx_work_*.
#include "base/error.h"
#include "base/guard.h"
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

phx_status phx_work_expire(phx_work *work, int64_t timeout_ms) {
  return guarded("work_expire", [&]() -> phx_status {
    if (work == nullptr) return fail(PHX_ERR_INVALID, "work_expire", "work_expire: work is NULL");
    int64_t timeout = 0;
    const phx_status status = work->group->resolve_timeout("work_expire", timeout_ms, &timeout);
    return status != PHX_OK ? status : work->ptr->wait(-timeout);
  });
}

phx_status phx_work_error(phx_work *work, phx_error_info *out) {
  if (work == nullptr) return fail(PHX_ERR_INVALID, "work_error", "work_error: work is NULL");
  if (phx::is_inherited(work)) return phx::refuse_fork("work_error", world_of(*work));
  if (work->ptr->state() >= 0) return fail(PHX_ERR_NOT_FOUND, "work_error", "work_error: this work has no error");
  return phx::copy_out(work->ptr->error(), out, "work_error");
}

phx_status phx_work_source(phx_work *work, int32_t *group_rank) {
  if (work == nullptr || group_rank == nullptr)
    return fail(PHX_ERR_INVALID, "work_source", "work_source: work or group_rank is NULL");
  if (phx::is_inherited(work)) return phx::refuse_fork("work_source", world_of(*work));
  if (work->ptr->state() != PHX_OK || work->ptr->source() < 0)
    return fail(PHX_ERR_NOT_FOUND, "work_source", "work_source: this work is no receive that completed");
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
