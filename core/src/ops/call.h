// One public call on a group, as checked so far. Every argument is checked before anything is sent.
#pragma once

#include <vector>

#include "gpu/launch.h"
#include "ops/coalesced.h"
#include "ops/collectives.h"
#include "ops/operation.h"
#include "phalanx/cuda.h"
#include "symm/symm.h"

namespace phx {

// `status` keeps the first error; later checks do nothing after it. The error counts as the call: see
// refuse_collective.
class Call {
 public:
  // is_part: of a list of calls, which answers for what is wrong with it.
  Call(Kind kind, phx_group *group, const phx_options *options, bool is_part = false);
  Call(Kind kind, phx_symm *symm, const phx_options *options);

  const char *name() const { return name_of(named_, symmetric_); }
  Kind kind() const { return kind_; }
  bool symmetric() const { return symmetric_; }  // on symmetric memory
  bool ok() const { return status_ == PHX_OK; }
  phx_status status() const { return status_; }
  Group &group() const { return *group_; }
  int group_size() const { return group_->size(); }
  const phx_options &options() const { return options_; }
  const phx_gpu_options &gpu() const { return gpu_; }
  int64_t timeout_ms() const { return timeout_ms_; }
  const Buffers &buffers() const { return buffers_; }
  const Reduction &reduction() const { return reduction_; }
  const CallRecord &record() const { return record_; }
  Plan plan(phx_work **work) const { return {group_->lane(options_.channel), group_->tuning(), work == nullptr}; }

  // in_parts and out_parts: how many times `count` elements each buffer holds; 0 where this rank has none.
  Call &data(const void *in, size_t in_parts, void *out, size_t out_parts, size_t count, int32_t dtype);
  // Refuses buffers that overlap, but for the one way that is safe: in == out + in_offset elements. (Modulo 2^64, so
  // that it may point backwards, and that a count which was refused does no harm here.)
  Call &overlap(size_t in_elements, size_t out_elements, size_t in_offset, bool alias_allowed);
  Call &reduce(int32_t op);
  Call &root(int32_t group_rank);
  // All of these, in this order, as the row of the collective says. In line, where the row is a constant.
  Call &check(const CollectiveTraits &traits, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
              int32_t root, Extent *extent) {
    if (!ok()) return *this;
    const int self = group_->group_rank();
    *extent = extent_of(traits, group_size(), self, self == root);
    data(in, extent->in_parts, out, extent->out_parts, count, dtype);
    overlap(extent->in_parts * count, extent->out_parts * count, extent->in_offset * count, extent->may_be_in_place);
    if (traits.reduces) reduce(op);
    if (traits.root != Root::kNone) this->root(root);
    return *this;
  }
  // One count for each rank, the same list on all: sets `total` to their sum. `counts` may be NULL: an error.
  Call &counts(const size_t *counts, size_t *total);
  // The same check where every rank has a list of its own, which is compared later.
  Call &own_counts(const size_t *counts, size_t *total);
  // From here on the block may be in memory of a GPU: it is for kernels.
  Call &on_stream();
  // `bytes` at `offset` must lie inside the block. Calls on other blocks or offsets do not match, nor does one in place
  // with one that is not.
  Call &inside(const Symm &symm, size_t offset, size_t bytes);
  // The result is where the inputs lie, which ranks that want it elsewhere do not match.
  Call &stays();
  // Calls whose results lie elsewhere do not match.
  Call &gives_at(uint64_t place);
  // Whether its buffers are ordinary memory of a GPU.
  bool on_gpu() const { return gpu_.device.type == PHX_DEVICE_CUDA; }
  // The same call as a kernel does it: under its own name, on other buffers. The ranks' records have been compared.
  Call on(const char *in, char *out) const;
  // Where its inputs are, if they need not be at the same place on all ranks. NULL: they are.
  Call &finds(const cuda::Inputs *inputs);
  const cuda::Inputs *inputs() const { return inputs_; }
  Call one_of(const CoalescedCall &one) const;
  // What to compare with the other ranks' calls before a kernel runs; NULL: that has been done.
  const CallRecord *uncompared() const { return compared_ ? nullptr : &record_; }
  // The algorithm, once it is resolved: ranks that chose differently must not meet.
  Call &chose(int32_t algo);
  Call &coalesces(const std::vector<CoalescedCall> &calls);
  Call &refuse(phx_status status) { return set(status); }  // that of this thread's last error

  Engine &engine() const { return collectives_of(*group_).engine(options_.channel); }
  phx_status issue(OperationPtr operation, phx_work **work);

 private:
  Call(Kind kind, Group *group, const phx_options *options, bool is_part, bool symmetric, bool for_kernels);
  Call &set(phx_status status);
  bool read_gpu();  // options of it; false: they are wrong

  Kind kind_;
  const Kind named_;  // by which the caller knows it
  Group *const group_;
  const bool is_part_;
  const bool symmetric_;
  const bool for_kernels_;
  phx_options options_ = PHX_OPTIONS_INIT;
  phx_gpu_options gpu_ = PHX_GPU_OPTIONS_INIT;
  int64_t timeout_ms_ = 0;
  Buffers buffers_;
  Reduction reduction_;
  CallRecord record_;
  bool on_stream_ = false;
  bool compared_ = false;
  const cuda::Inputs *inputs_ = nullptr;
  phx_status status_ = PHX_OK;
};

}  // namespace phx
