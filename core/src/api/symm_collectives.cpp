// The public collectives on symmetric memory.
#include <algorithm>

#include "api/entry.h"
#include "gpu/gpu_group.h"
#include "ops/enqueue.h"

using namespace phx;

namespace {

// The address of `offset` in this rank's block. The offset has not been checked yet, so the result may not be valid.
char *own_at(const Symm &symm, size_t offset) {
  return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(symm.buffer(symm.group_rank())) + offset);
}

// Whether a call goes through the slots, as on ordinary memory. Small calls do, because a second arrival costs more
// than the copies. It costs most where ranks share cores, above all in a broadcast, whose readers have nothing to do
// before it. There an all_gather that does not fit into the cache is faster through the slots too, because only the
// owner of each block then fetches it from memory. Measured with four ranks on two cores: broadcast of 64 KiB takes 10
// us instead of 15, all_gather of 64 MiB takes 9.0 ms instead of 13. Only with PHX_ALGO_AUTO.
bool goes_through_slots(const Call &call, const Plan &plan, size_t in_bytes) {
  if (call.options().algo != PHX_ALGO_AUTO) return false;
  const size_t small = std::max<size_t>(plan.tuning.one_shot_bytes, size_t{2} << 10);
  const bool crowded = plan.lane.ranks_share_cores(), gathers = call.kind() == Kind::kAllGather;
  if (crowded && gathers && in_bytes * call.group_size() >= 2 * plan.tuning.streaming_bytes) return true;
  const size_t times = !crowded ? 1 : call.kind() == Kind::kBroadcast ? 8 : gathers ? 2 : 1;
  return in_bytes <= std::min(small * times, plan.lane.slot_bytes());
}

// Issues a collective with one count for all ranks. Every rank's block must have room for the input of any rank.
template <Kind kKind>
phx_status issue(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op, int32_t root,
                 const phx_options *options, phx_work **work) {
  return guarded(name_of(kKind, true), [&]() -> phx_status {
    constexpr const CollectiveTraits &kTraits = traits_of(kKind);
    Call call(kKind, symm, options);
    if (!call.ok()) return call.status();
    Symm &s = *symm->symm;
    const size_t n = s.size(), in_parts = parts_on(kTraits.in, n, true);
    const size_t out_parts = parts_on(kTraits.out, n, s.group_rank() == root);
    char *in = own_at(s, offset);
    call.data(in, in_parts, kKind == Kind::kBroadcast ? in : out, out_parts, count, dtype);
    if (kTraits.reduces) call.reduce(op);
    if (kTraits.root != Root::kNone) call.root(root);
    const Buffers &buffers = call.buffers();
    const size_t in_bytes = in_parts * count * buffers.item;
    if (call.ok()) call.inside(s, offset, in_bytes);
    if (kKind == Kind::kAllGather && call.ok() && s.gathered().begins(out, offset, in_bytes))
      return call.gives_at(1).issue(make_barrier(call.plan(work)), work);  // where the inputs lie
    const bool in_place = kKind == Kind::kAllReduce || kKind == Kind::kBroadcast;
    if (!call.overlap(in_parts * count, out_parts * count, 0, in_place).ok()) return call.status();
    if (gpu_symm_of(s) != nullptr) return enqueue(call, s, offset, nullptr, work);
    const Plan plan = call.plan(work);
    if (goes_through_slots(call, plan, in_bytes))
      return call.issue(make_operation(kKind, plan, buffers, call.reduction(), root), work);
    if constexpr (kKind == Kind::kBroadcast)
      return call.issue(make_symm_broadcast(s.shared_from_this(), offset, buffers, root, plan), work);
    else
      return call.issue(
          make_symm(kKind, s.shared_from_this(), offset, buffers, call.reduction(), root, plan, call.options().algo),
          work);
  });
}

// Checks and issues all_gather_v or reduce_scatter_v: `counts` are those of the output or of the input.
template <Kind kKind>
phx_status issue_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype, int32_t op,
                   const phx_options *options, phx_work **work) {
  return guarded(name_of(kKind, true), [&]() -> phx_status {
    constexpr bool kGathers = kKind == Kind::kAllGatherV;
    Call call(kKind, symm, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    Symm &s = *symm->symm;
    const size_t mine = counts[s.group_rank()];
    char *in = own_at(s, offset);
    call.data(in, 1, kGathers ? out : in, 1, total, dtype).data(in, 1, out, kGathers ? 0 : 1, mine, dtype);
    if (!kGathers) call.reduce(op);
    call.counts(counts, &total);
    // Every rank's block must have room for the largest input. All ranks have the same list, so all refuse together.
    const size_t most = kGathers ? *std::max_element(counts, counts + s.size()) : total;
    if (call.ok()) call.inside(s, offset, most * call.buffers().item);
    if (!call.overlap(kGathers ? mine : total, kGathers ? total : mine, 0, false).ok()) return call.status();
    Lists lists;
    (kGathers ? lists.out_counts : lists.in_counts) = counts;
    call.listed(&lists);
    if (gpu_symm_of(s) != nullptr) return enqueue(call, s, offset, nullptr, work);
    return call.issue(
        make_symm(kKind, s.shared_from_this(), offset, call.buffers(), call.reduction(), -1, call.plan(work)), work);
  });
}

}  // namespace

extern "C" {

phx_status phx_symm_all_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                               const phx_options *options, phx_work **work) {
  return issue<Kind::kAllReduce>(symm, offset, out, count, dtype, op, -1, options, work);
}

phx_status phx_symm_all_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  return issue<Kind::kAllGather>(symm, offset, out, count, dtype, 0, -1, options, work);
}

phx_status phx_symm_reduce_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                                   const phx_options *options, phx_work **work) {
  return issue<Kind::kReduceScatter>(symm, offset, out, count, dtype, op, -1, options, work);
}

phx_status phx_symm_all_to_all(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  return issue<Kind::kAllToAll>(symm, offset, out, count, dtype, 0, -1, options, work);
}

phx_status phx_symm_broadcast(phx_symm *symm, size_t offset, size_t count, int32_t dtype, int32_t root_group_rank,
                              const phx_options *options, phx_work **work) {
  return issue<Kind::kBroadcast>(symm, offset, nullptr, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_symm_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                           int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue<Kind::kReduce>(symm, offset, out, count, dtype, op, root_group_rank, options, work);
}

phx_status phx_symm_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                           int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue<Kind::kGather>(symm, offset, out, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_symm_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                            int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue<Kind::kScatter>(symm, offset, out, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_symm_all_gather_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype,
                                 const phx_options *options, phx_work **work) {
  return issue_v<Kind::kAllGatherV>(symm, offset, out, counts, dtype, 0, options, work);
}

phx_status phx_symm_reduce_scatter_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype,
                                     int32_t op, const phx_options *options, phx_work **work) {
  return issue_v<Kind::kReduceScatterV>(symm, offset, out, counts, dtype, op, options, work);
}

phx_status phx_symm_all_to_all_v(phx_symm *symm, size_t offset, const size_t *in_counts, void *out,
                                 const size_t *out_counts, int32_t dtype, const phx_options *options, phx_work **work) {
  return guarded("symm_all_to_all_v", [&]() -> phx_status {
    Call call(Kind::kAllToAllV, symm, options);
    size_t ins = 0, outs = 0;
    if (!call.own_counts(in_counts, &ins).own_counts(out_counts, &outs).ok()) return call.status();
    Symm &s = *symm->symm;
    char *in = own_at(s, offset);
    if (outs != 0 && out == nullptr)
      return call.refuse(fail(PHX_ERR_INVALID, call.name(), "out is NULL, but the counts are not all 0"));
    if (call.data(in, 0, out, 0, 0, dtype).ok()) call.inside(s, offset, ins * call.buffers().item);
    if (!call.overlap(ins, outs, 0, false).ok()) return call.status();
    const Lists lists{in_counts, out_counts, nullptr, nullptr};
    call.listed(&lists);
    if (gpu_symm_of(s) != nullptr) return enqueue(call, s, offset, nullptr, work);
    return call.issue(make_symm_all_to_all_v(call.group(), call.name(), s.shared_from_this(), offset, call.buffers(), 0,
                                             call.plan(work)),
                      work);
  });
}
}
