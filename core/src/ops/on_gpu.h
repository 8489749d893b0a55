// The collectives of a group on ordinary GPU memory: puts the copies and kernels of a call on its stream.
#pragma once

#include <vector>

#include "ops/call.h"

namespace phx {

// In bytes: what this rank reads and writes, and the largest input of any rank, which is the same on all.
struct Volume {
  size_t in;
  size_t out;
  size_t largest;
};

// The volume of a checked call with one count for all ranks.
Volume volume_of(Kind kind, const Extent &extent, size_t group_size, bool is_root, size_t bytes);

// Puts a checked call on its stream. root < 0: none.
phx_status put_on_gpu(Call &call, const Volume &volume, int root, phx_work **work);
// all_gather_v, reduce_scatter_v and all_to_all_v: see enqueue_v.
phx_status put_on_gpu_v(Call &call, const Volume &volume, const size_t *in_counts, const size_t *out_counts,
                        phx_work **work);
// Puts the calls of a list on the stream one after the other. volumes[i] belongs to calls[i].
phx_status put_on_gpu(Call &all, const std::vector<CoalescedCall> &calls, const std::vector<Volume> &volumes,
                      phx_work **work);
phx_status put_barrier_on_gpu(Call &call, phx_work **work);

}  // namespace phx
