// A public call on a group, while its arguments are checked. Nothing is sent before all of them are.
#pragma once

#include "net/net.h"
#include "ops/blocks.h"
#include "ops/engine.h"
#include "phalanx/cuda.h"
#include "symm/symm.h"

namespace phx {

// `status` keeps the first error, after which later checks do nothing. The refused call takes the place of a
// collective, so that peers that make the call get an error: see Collectives::refuse.
class Call {
 public:
  // is_part: the call is part of a coalesced list, which is refused as a whole.
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
  bool is_buffered() const { return (options_.flags & PHX_OPTION_BUFFERED) != 0; }
  int64_t timeout_ms() const { return timeout_ms_; }
  const Buffers &buffers() const { return buffers_; }
  const Reduction &reduction() const { return reduction_; }
  const CallRecord &record() const { return record_; }
  int root() const { return record_.root; }  // -1: the collective has none
  Plan plan(phx_work **work) {
    Net *const net = __builtin_expect(group_->spans_hosts(), 0) ? &net_of(*group_) : nullptr;
    const bool blocking = work == nullptr;
    return {group_->lane(options_.channel), group_->tuning(), blocking || !is_buffered(), net, options_.channel,
            blocking ? &room_ : nullptr};
  }

  // in_parts and out_parts: how many times `count` elements each buffer holds; 0 where this rank has none.
  Call &data(const void *in, size_t in_parts, void *out, size_t out_parts, size_t count, int32_t dtype);
  // Refuses overlapping buffers, except for the one alias that is safe: in == out + in_offset elements. in_offset is
  // modulo 2^64, so that it may be negative; the overflow of a count that was refused before does no harm.
  Call &overlap(size_t in_elements, size_t out_elements, size_t in_offset, bool alias_allowed);
  Call &reduce(int32_t op);
  Call &root(int32_t group_rank);
  // Makes the checks above that the traits of the collective ask for. Inline, because callers pass constant traits.
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
  // How much this call moves; it has been checked and has one count for all ranks.
  Volume volume(const Extent &extent) const;
  // Checks one count for each rank (NULL is an error), sets `total` to their sum, and adds the list to the record: it
  // must be the same on all ranks.
  Call &counts(const size_t *counts, size_t *total);
  // The same check without the record, for lists that differ between ranks or are compared later.
  Call &own_counts(const size_t *counts, size_t *total);
  // Checks a block for each rank, of elements of `item` bytes.
  Call &blocks(const phx_block *blocks, size_t item, BlocksFound *found);
  // Refuses an output that overlaps another one or an input, but, with own_alias, this rank's block of a list at the
  // address of the only block on the other side.
  Call &apart(const phx_block *in, size_t ins, const phx_block *out, size_t outs, bool own_alias);
  // Where the blocks lie; the caller keeps it until the operation is made.
  Call &listed(const Lists *lists) {
    buffers_.lists = lists;
    return *this;
  }
  // Checks that `bytes` at `offset` lie inside the block. Adds the block, the offset and whether the call is in place
  // to the record, so that calls that differ in one of them do not match.
  Call &inside(const Symm &symm, size_t offset, size_t bytes);
  // Records where the results lie; calls whose results lie elsewhere do not match.
  Call &gives_at(uint64_t place);
  // Whether the buffers are ordinary GPU memory.
  bool on_gpu() const { return gpu_.device.type == PHX_DEVICE_CUDA; }
  // A copy of this call on other buffers, for a kernel. The ranks' records have been compared already.
  Call on(const char *in, char *out) const;
  // The same with the kind, buffers, reduction and root of one part of this list.
  Call one_of(const CoalescedCall &part) const;
  // The record to compare with the other ranks' calls before a kernel runs; NULL: it has been compared.
  const CallRecord *uncompared() const { return compared_ ? nullptr : &record_; }
  // Adds the resolved algorithm to the record: calls of ranks that chose another one do not match.
  void chose(int32_t algo) { record_.algo = static_cast<uint8_t>(options_.algo | algo << 4); }
  Call &coalesces(const std::vector<CoalescedCall> &calls);
  // Refuses the call, with the status of this thread's last error.
  phx_status refuse(phx_status status) { return set(status).status(); }

  Engine &engine() const { return collectives_of(*group_).engine(options_.channel); }
  phx_status issue(OperationPtr operation, phx_work **work);

 private:
  Call(Kind kind, Group *group, const phx_options *options, bool is_part, bool symmetric, bool for_kernels);
  Call &set(phx_status status);
  bool add(size_t count, size_t *total);  // false: a count is too large
  bool read_gpu();                        // reads options_.gpu; false: an option is wrong

  Kind kind_;
  const Kind named_;  // the kind that errors name: one_of does not change it
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
  bool compared_ = false;
  phx_status status_ = PHX_OK;
  Plan::Room room_;
};

// ---- zero_copy.cpp: collectives on ordinary buffers whose inputs happen to lie in symmetric memory, where peers read
// them without a copy

inline constexpr size_t kSmallestInput = size_t{4} << 10;
// The symmetric memory in which an input lies, if collectives of the group should read it there. NULL: they copy it.
std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes);
// Whether an input of `in_bytes` on another rank can perhaps be read where it lies. This is a hint: the read may still
// turn out to be impossible.
bool may_find_input(const Group &group, size_t in_bytes);

// The operation to run instead of `staged`, or `staged` itself. `in_bytes`: the size of the input on a rank that has
// one.
//
// Whether the inputs of the other ranks lie in the same allocation is known when all have arrived (see zero_copy.cpp).
// If they do not, `staged` runs after all.
OperationPtr with_zero_copy_of_large(const Call &call, const Plan &plan, size_t in_bytes, OperationPtr staged);
inline OperationPtr with_zero_copy(const Call &call, const Plan &plan, size_t in_bytes, OperationPtr staged) {
  return in_bytes < kSmallestInput ? std::move(staged)
                                   : with_zero_copy_of_large(call, plan, in_bytes, std::move(staged));
}
// The same for a list of calls.
OperationPtr coalesced_with_zero_copy(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
