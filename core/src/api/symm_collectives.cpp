// The public collectives on symmetric memory.
#include <algorithm>

#include "base/guard.h"
#include "gpu/gpu_group.h"
#include "ops/call.h"
#include "ops/enqueue.h"

using phx::Call;
using phx::guarded;
using phx::Kind;

namespace {

// Where `offset` of this rank's block is; not yet checked to lie in it, so it may be no address at all.
char *own_at(const phx::Symm &symm, size_t offset) {
  return reinterpret_cast<char *>(reinterpret_cast<uintptr_t>(symm.buffer(symm.group_rank())) + offset);
}

struct Shape {
  size_t in_parts;
  size_t out_parts;
};

size_t size_of(const phx_symm *symm) { return symm == nullptr ? 1 : symm->symm->size(); }
bool is_root(const phx_symm *symm, int32_t group_rank) {
  return symm != nullptr && symm->symm->group_rank() == group_rank;
}

// What is small goes through the slots after all: a second arrival costs more than the copies. Where ranks share cores
// it costs the most, above all a broadcast, whose readers have nothing to do before it; and there an all_gather which
// fits no cache is faster through them, as each block is then fetched from memory by its owner alone. Measured with
// four ranks on two cores: broadcast of 64 KiB 10 us and not 15, all_gather of 64 MiB 9.0 ms and not 13. With
// PHX_ALGO_AUTO only.
bool goes_through_slots(const Call &call, const phx::Plan &plan, size_t in_bytes) {
  if (call.options().algo != PHX_ALGO_AUTO) return false;
  const size_t small = std::max<size_t>(plan.tuning.one_shot_bytes, phx::kDemotedBytes);
  const bool crowded = plan.lane.ranks_share_cores(), gathers = call.kind() == Kind::kSymmAllGather;
  if (crowded && gathers && in_bytes * call.group_size() >= 2 * plan.tuning.streaming_bytes) return true;
  const size_t times = !crowded ? 1 : call.kind() == Kind::kSymmBroadcast ? 8 : gathers ? 2 : 1;
  return in_bytes <= std::min(small * times, plan.lane.slot_bytes());
}

phx::OperationPtr make(const Call &call, const phx::Plan &plan, phx::Symm &symm, size_t offset, size_t in_bytes,
                       int root) {
  const phx::Buffers &buffers = call.buffers();
  switch (goes_through_slots(call, plan, in_bytes) ? call.kind() : Kind::kNone) {
    case Kind::kSymmAllReduce: return phx::make_all_reduce(plan, buffers, call.reduction(), PHX_ALGO_AUTO);
    case Kind::kSymmAllGather: return phx::make_all_gather(plan, buffers);
    case Kind::kSymmReduceScatter: return phx::make_reduce_scatter(plan, buffers, call.reduction());
    case Kind::kSymmAllToAll: return phx::make_all_to_all(plan, buffers);
    case Kind::kSymmBroadcast: return phx::make_broadcast(plan, buffers, root);
    case Kind::kSymmReduce: return phx::make_reduce(plan, buffers, call.reduction(), root);
    case Kind::kSymmGather: return phx::make_gather(plan, buffers, root);
    case Kind::kSymmScatter: return phx::make_scatter(plan, buffers, root);
    default: break;
  }
  if (call.kind() == Kind::kSymmBroadcast)
    return phx::make_symm_broadcast(symm.shared_from_this(), offset, buffers, root, plan.tuning);
  return phx::make_symm(call.kind(), symm.shared_from_this(), offset, buffers, call.reduction(), root, plan,
                        call.options().algo);
}

// Those with one count for all. op 0: no reduction. root < 0 with has_root false: none.
phx_status issue(Kind kind, phx_symm *symm, size_t offset, void *out, Shape shape, size_t count, int32_t dtype,
                 const int32_t *op, const int32_t *root, const phx_options *options, phx_work **work) {
  return guarded(phx::kind_name(kind), [&]() -> phx_status {
    Call call(kind, symm, options);
    if (!call.ok()) return call.status();
    phx::Symm &s = *symm->symm;
    char *in = own_at(s, offset);
    if (phx::side_of(s) != nullptr) call.on_stream();
    call.data(in, shape.in_parts, kind == Kind::kSymmBroadcast ? in : out, shape.out_parts, count, dtype);
    if (op != nullptr) call.reduce(*op);
    if (root != nullptr) call.root(*root);
    const size_t in_bytes = shape.in_parts * count * call.buffers().item;
    if (call.ok()) call.inside(s, offset, in_bytes);
    if (call.ok() && kind == Kind::kSymmAllGather && s.gathered().begins(out, offset, in_bytes))
      return call.stays().issue(phx::make_barrier(), work);
    const bool in_place = kind == Kind::kSymmAllReduce || kind == Kind::kSymmBroadcast;
    call.overlap(shape.in_parts * count, shape.out_parts * count, 0, in_place);
    if (!call.ok()) return call.status();
    if (phx::side_of(s) != nullptr) return phx::enqueue(call, s, offset, root == nullptr ? -1 : *root, work);
    return call.issue(make(call, call.plan(work), s, offset, in_bytes, root == nullptr ? -1 : *root), work);
  });
}

}  // namespace

extern "C" {

phx_status phx_symm_all_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                               const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmAllReduce, symm, offset, out, {1, 1}, count, dtype, &op, nullptr, options, work);
}

phx_status phx_symm_all_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmAllGather, symm, offset, out, {1, size_of(symm)}, count, dtype, nullptr, nullptr, options,
               work);
}

phx_status phx_symm_reduce_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                                   const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmReduceScatter, symm, offset, out, {size_of(symm), 1}, count, dtype, &op, nullptr, options,
               work);
}

phx_status phx_symm_all_to_all(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                               const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmAllToAll, symm, offset, out, {size_of(symm), size_of(symm)}, count, dtype, nullptr, nullptr,
               options, work);
}

phx_status phx_symm_broadcast(phx_symm *symm, size_t offset, size_t count, int32_t dtype, int32_t root_group_rank,
                              const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmBroadcast, symm, offset, nullptr, {1, 1}, count, dtype, nullptr, &root_group_rank, options,
               work);
}

phx_status phx_symm_reduce(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype, int32_t op,
                           int32_t root_group_rank, const phx_options *options, phx_work **work) {
  const Shape shape{1, is_root(symm, root_group_rank) ? size_t{1} : 0};
  return issue(Kind::kSymmReduce, symm, offset, out, shape, count, dtype, &op, &root_group_rank, options, work);
}

phx_status phx_symm_gather(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                           int32_t root_group_rank, const phx_options *options, phx_work **work) {
  const Shape shape{1, is_root(symm, root_group_rank) ? size_of(symm) : 0};
  return issue(Kind::kSymmGather, symm, offset, out, shape, count, dtype, nullptr, &root_group_rank, options, work);
}

phx_status phx_symm_scatter(phx_symm *symm, size_t offset, void *out, size_t count, int32_t dtype,
                            int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue(Kind::kSymmScatter, symm, offset, out, {size_of(symm), 1}, count, dtype, nullptr, &root_group_rank,
               options, work);
}

phx_status phx_symm_all_gather_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype,
                                 const phx_options *options, phx_work **work) {
  return guarded("symm_all_gather_v", [&]() -> phx_status {
    Call call(Kind::kSymmAllGatherV, symm, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    phx::Symm &s = *symm->symm;
    const size_t mine = counts[s.group_rank()];
    char *in = own_at(s, offset);
    if (phx::side_of(s) != nullptr) call.on_stream();
    call.data(in, 1, out, 1, total, dtype).counts(counts, &total);
    // Every rank's block must hold the largest: all see the same list, so all refuse alike.
    size_t most = 0;
    for (int i = 0; i < s.size(); ++i) most = counts[i] > most ? counts[i] : most;
    if (call.ok()) call.inside(s, offset, most * call.buffers().item);
    if (!call.overlap(mine, total, 0, false).ok()) return call.status();
    if (phx::side_of(s) != nullptr) return phx::enqueue_v(call, s, offset, counts, counts, work);
    return call.issue(phx::make_symm_v(Kind::kSymmAllGatherV, s.shared_from_this(), offset, call.buffers(), {}, counts,
                                       call.group().tuning()),
                      work);
  });
}

phx_status phx_symm_reduce_scatter_v(phx_symm *symm, size_t offset, void *out, const size_t *counts, int32_t dtype,
                                     int32_t op, const phx_options *options, phx_work **work) {
  return guarded("symm_reduce_scatter_v", [&]() -> phx_status {
    Call call(Kind::kSymmReduceScatterV, symm, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    phx::Symm &s = *symm->symm;
    const size_t mine = counts[s.group_rank()];
    char *in = own_at(s, offset);
    if (phx::side_of(s) != nullptr) call.on_stream();
    call.data(in, 1, in, 1, total, dtype).data(in, 1, out, 1, mine, dtype).reduce(op).counts(counts, &total);
    if (call.ok()) call.inside(s, offset, total * call.buffers().item);
    if (!call.overlap(total, mine, 0, false).ok()) return call.status();
    if (phx::side_of(s) != nullptr) return phx::enqueue_v(call, s, offset, counts, counts, work);
    return call.issue(phx::make_symm_v(Kind::kSymmReduceScatterV, s.shared_from_this(), offset, call.buffers(),
                                       call.reduction(), counts, call.group().tuning()),
                      work);
  });
}

phx_status phx_symm_all_to_all_v(phx_symm *symm, size_t offset, const size_t *in_counts, void *out,
                                 const size_t *out_counts, int32_t dtype, const phx_options *options, phx_work **work) {
  return guarded("symm_all_to_all_v", [&]() -> phx_status {
    Call call(Kind::kSymmAllToAllV, symm, options);
    size_t ins = 0, outs = 0;
    if (!call.own_counts(in_counts, &ins).own_counts(out_counts, &outs).ok()) return call.status();
    phx::Symm &s = *symm->symm;
    char *in = own_at(s, offset);
    if (phx::side_of(s) != nullptr) call.on_stream();
    if (outs != 0 && out == nullptr)
      return call.refuse(phx::fail(PHX_ERR_INVALID, call.name(), "%s: a buffer is NULL", call.name())).status();
    if (call.data(in, 0, out, 0, 0, dtype).ok()) call.inside(s, offset, ins * call.buffers().item);
    if (!call.overlap(ins, outs, 0, false).ok()) return call.status();
    if (phx::side_of(s) != nullptr) return phx::enqueue_v(call, s, offset, in_counts, out_counts, work);
    return call.issue(phx::make_symm_all_to_all_v(call.group(), call.name(), s.shared_from_this(), offset,
                                                  call.buffers(), in_counts, out_counts, 0),
                      work);
  });
}
}
