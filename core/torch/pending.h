// Collectives that were started and not yet waited for, by the storage that they are going to write. Knows no contexts:
// an address is unique in the process.
#pragma once

#include <utility>

#include "groups.h"
#include "tensors.h"

namespace phxt {

// What the function given to phxt_set_around has opened for the op that runs on this thread; a collective that is left
// pending takes it over.
inline thread_local void *open_span = nullptr;
void end_span(void *span);

struct Pending {
  ~Pending() {
    phx_work_release(work);
    if (span != nullptr) end_span(span);
  }
  uintptr_t storage = 0;
  Range output;
  GroupRef group;
  Tensor tensor;  // keeps the memory until the work is done, and its address from being used again
  phx_work *work = nullptr;
  void *span = std::exchange(open_span, nullptr);
};

uint64_t pending_count();
void pending_add(std::shared_ptr<Pending> entry);
void pending_leave(const Group *group);  // forgets work that is over, also failed work of this group

// Each of these waits for all that matches, forgets it, and returns the first error, with its text in
// phxt_last_error(). `found` (may be NULL) tells whether anything matched.
phx_status wait_storage(uintptr_t storage, int64_t timeout_ms, bool *found);
phx_status wait_overlapping(uintptr_t storage, const Range &range);

}  // namespace phxt
