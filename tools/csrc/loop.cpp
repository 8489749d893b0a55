// The timing loop, and the memory that it works on.
#include <sys/mman.h>

#include <cstring>

#include "clock.h"
#include "data.h"

namespace {

using Function = int32_t (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                             uint64_t);

// All ten words go along always: in the calling conventions of Linux a callee ignores those that it does not name.
inline int32_t invoke(const phxb_call &call) {
  const uint64_t *a = call.arguments;
  return reinterpret_cast<Function>(call.function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9]);
}

int32_t failed(phxb_failure *failure, int32_t result, uint32_t call) {
  if (failure != nullptr) {
    failure->result = result;
    failure->call = call;
  }
  return PHXB_CALL_FAILED;
}

}  // namespace

int32_t phxb_round(const phxb_plan *plan, uint64_t iteration, uint64_t *times_ns, phxb_failure *failure) {
  if (plan == nullptr || !phxb::valid(*plan) || plan->timed.function == nullptr) return PHXB_BAD_PLAN;
  const uint32_t total = plan->warm_up + plan->calls;
  for (uint32_t call = 0; call < total; ++call) {
    phxb::fill(*plan, iteration + call);
    if (plan->barrier.function != nullptr)
      if (const int32_t result = invoke(plan->barrier)) return failed(failure, result, call);
    phxb::fence();
    const uint64_t started = phxb::now_ns();
    const int32_t result = invoke(plan->timed);
    const uint64_t ended = phxb::now_ns();
    phxb::fence();
    if (result != 0) return failed(failure, result, call);
    // A rank that shares its core and is done would else write its next input while the other one is still in the call.
    if (plan->barrier.function != nullptr)
      if (const int32_t late = invoke(plan->barrier)) return failed(failure, late, call);
    if (call >= plan->warm_up) times_ns[call - plan->warm_up] = ended - started;
  }
  if (total == 0) return PHXB_OK;
  if (plan->flags & PHXB_CORRUPT) phxb::corrupt(*plan);
  return phxb_check(plan, iteration + total - 1, failure);
}

int32_t phxb_fill(const phxb_plan *plan, uint64_t iteration) {
  if (plan == nullptr || !phxb::valid(*plan)) return PHXB_BAD_PLAN;
  phxb::fill(*plan, iteration);
  return PHXB_OK;
}

int32_t phxb_check(const phxb_plan *plan, uint64_t iteration, phxb_failure *failure) {
  if (plan == nullptr || !phxb::valid(*plan)) return PHXB_BAD_PLAN;
  return phxb::check(*plan, iteration, failure);
}

void *phxb_alloc(size_t bytes) {
  void *pointer = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  return pointer == MAP_FAILED ? nullptr : pointer;
}

void phxb_free(void *pointer, size_t bytes) {
  if (pointer != nullptr) munmap(pointer, bytes);
}

double phxb_clock_ns() {
  constexpr int kReadings = 100000;
  const uint64_t started = phxb::now_ns();
  for (int i = 1; i < kReadings; ++i) (void)phxb::now_ns();
  return static_cast<double>(phxb::now_ns() - started) / kReadings;
}
