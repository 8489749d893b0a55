// phx_work_*.
#include <sched.h>

#include <algorithm>
#include <ctime>

#include "api/entry.h"
#include "base/deadline.h"

using phx::fail;
using phx::with_handle;
using phx::with_timeout;

namespace {

// phx_work_wait_any looks at its works again and again: first it yields, then it sleeps longer and longer.
constexpr int64_t kShortestSleepNs = 20000;
constexpr int64_t kLongestSleepNs = 500000;

}  // namespace

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
  if (works == nullptr || index == nullptr)
    return fail(PHX_ERR_INVALID, operation, "%s: works or index is NULL", operation);
  phx_work *const *const end = works + count;
  phx_work *const *const first = std::find_if(works, end, [](const phx_work *work) { return work != nullptr; });
  if (first == end) return fail(PHX_ERR_INVALID, operation, "%s: there is no work to wait for", operation);
  return with_timeout(operation, *first, timeout_ms, [&](const phx_work &, int64_t timeout) -> phx_status {
    const phx::Deadline deadline = phx::Deadline::after_ms(timeout);
    for (int64_t sleep_ns = 0;; sleep_ns = std::min<int64_t>(2 * sleep_ns + 1000, kLongestSleepNs)) {
      bool moved = false;
      for (phx_work *const *at = first; at != end; ++at) {
        if (*at == nullptr) continue;
        phx_status status = phx::check_handle(operation, *at);
        if (status == PHX_OK) status = (*at)->ptr->test();
        if (status == PHX_IN_PROGRESS) {
          moved = (*at)->group->world().progress().poll(nullptr) || moved;
          continue;
        }
        *index = static_cast<size_t>(at - works);
        return status;
      }
      if (moved) sleep_ns = 0;
      if (deadline.passed()) break;
      if (sleep_ns >= kShortestSleepNs) {
        const timespec pause{0, static_cast<long>(std::min(sleep_ns, std::max<int64_t>(deadline.left_ns(), 1)))};
        nanosleep(&pause, nullptr);
      } else {
        sched_yield();
      }
    }
    return fail(PHX_ERR_TIMEOUT, operation, "%s: none of the %zu works is complete: %s", operation, count,
                phx::timed_out(timeout, phx::kLimitOfCall).c_str());
  });
}

phx_status phx_work_expire(phx_work *work, int64_t timeout_ms) {
  return with_timeout("work_expire", work, timeout_ms,
                      [](const phx_work &w, int64_t timeout) { return w.ptr->wait(-timeout); });
}

phx_status phx_work_get_error(phx_work *work, phx_error_info *out) {
  const char *operation = "work_get_error";
  return with_handle(operation, work, [&](const phx_work &w) -> phx_status {
    if (w.ptr->state() >= 0) return fail(PHX_ERR_NOT_FOUND, operation, "%s: this work has no error", operation);
    return phx::copy_error_out(w.ptr->error(), out, operation);
  });
}

phx_status phx_work_get_source(phx_work *work, int32_t *group_rank) {
  const char *operation = "work_get_source";
  return with_handle(operation, work, [&](const phx_work &w) -> phx_status {
    if (group_rank == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: group_rank is NULL", operation);
    if (w.ptr->state() != PHX_OK || w.ptr->source() < 0)
      return fail(PHX_ERR_NOT_FOUND, operation, "%s: this work is no receive that completed", operation);
    *group_rank = w.ptr->source();
    return PHX_OK;
  });
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
