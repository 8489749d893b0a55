// Calls on tensors of GPUs: the stream that they are put on, and who has to come after them.
//
// A collective is put on the stream that is torch's current one when the op is called, so whatever follows on that
// stream comes after it. For other streams it leaves a mark where it has written: wait_tensor, and every op of ours
// that reads or writes there, makes its own current stream come after the mark. Nothing waits on the host.
#pragma once

#include <atomic>
#include <vector>

#include "groups.h"
#include "phalanx/cuda.h"
#include "tensors.h"

namespace phxt::gpu {

// Whether this torch can tell its current stream: of CUDA builds, or 2.13 and later.
bool knows_streams();
void *current_stream(int32_t gpu);
phx_gpu_options options(int32_t gpu);  // the GPU and its current stream

struct Output {
  uintptr_t storage;
  Range range;
};
// Everything that was put on the stream of `put` by now has written these.
void leave_mark(const Group *group, const phx_gpu_options &put, const std::vector<Output> &outputs);

inline std::atomic<uint64_t> marks{0};  // how many there are
inline bool has_marks() { return marks.load(std::memory_order_relaxed) != 0; }
bool has_mark(uintptr_t storage);
void sweep_marks();  // forgets those that their streams have passed
// These make the current stream of each mark's GPU come after what matches, and return the first error, with its text
// in phxt_last_error(). `found` (may be NULL) tells whether anything matched. A mark stays until it is passed: others
// may have to come after it as well.
phx_status follow_storage(uintptr_t storage, bool *found);
phx_status follow_overlapping(uintptr_t storage, const Range &range);
phx_status follow_group(const Group *group);

}  // namespace phxt::gpu
