// The public collectives on ordinary memory.
#include <algorithm>
#include <cstdint>

#include "api/entry.h"
#include "ops/call.h"
#include "ops/on_gpu.h"
#include "ops/zero_copy.h"

using phx::Call;
using phx::guarded;
using phx::Kind;

namespace {

// Checks, creates and issues a collective with one count for all ranks, as its row in kCollectives says.
template <Kind kKind>
phx_status issue(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op, int32_t root,
                 const phx_options *options, phx_work **work) {
  return guarded(phx::name_of(kKind), [&]() -> phx_status {
    constexpr const phx::CollectiveTraits &kTraits = phx::traits_of(kKind);
    Call call(kKind, group, options);
    phx::Extent extent;
    if (!call.check(kTraits, in, out, count, dtype, op, root, &extent).ok()) return call.status();
    const size_t n = call.group_size(), bytes = count * call.buffers().item;
    if (call.on_gpu()) {
      const bool is_root = call.group().group_rank() == root;
      return phx::put_on_gpu(call, phx::volume_of(kKind, extent, n, is_root, bytes), root, work);
    }
    const bool blocking = work == nullptr;
    const phx::Plan plan = call.plan(work);
    const size_t in_bytes = phx::parts_on(kTraits.in, n, true) * bytes;  // of a rank that has an input
    int32_t algo = PHX_ALGO_AUTO;
    if constexpr (kKind == Kind::kAllReduce) {
      algo = phx::choose_all_reduce(plan, bytes, call.options().algo);
      call.chose(algo);
    }
    phx::OperationPtr staged = phx::make_operation(kKind, plan, call.buffers(), call.reduction(), root, algo);
    if (in_bytes >= phx::kSmallestInput)
      staged = phx::with_zero_copy(call, in_bytes, std::move(staged), blocking, root);
    return call.issue(std::move(staged), work);
  });
}

}  // namespace

extern "C" {

phx_status phx_barrier(phx_group *group, const phx_options *options, phx_work **work) {
  return guarded("barrier", [&]() -> phx_status {
    Call call(Kind::kBarrier, group, options);
    if (!call.ok()) return call.status();
    return call.on_gpu() ? phx::put_barrier_on_gpu(call, work) : call.issue(phx::make_barrier(), work);
  });
}

phx_status phx_all_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                          const phx_options *options, phx_work **work) {
  return issue<Kind::kAllReduce>(group, in, out, count, dtype, op, -1, options, work);
}

phx_status phx_all_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return issue<Kind::kAllGather>(group, in, out, count, dtype, 0, -1, options, work);
}

phx_status phx_reduce_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                              const phx_options *options, phx_work **work) {
  return issue<Kind::kReduceScatter>(group, in, out, count, dtype, op, -1, options, work);
}

phx_status phx_all_to_all(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return issue<Kind::kAllToAll>(group, in, out, count, dtype, 0, -1, options, work);
}

phx_status phx_broadcast(phx_group *group, void *buffer, size_t count, int32_t dtype, int32_t root_group_rank,
                         const phx_options *options, phx_work **work) {
  return issue<Kind::kBroadcast>(group, buffer, buffer, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                      int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue<Kind::kReduce>(group, in, out, count, dtype, op, root_group_rank, options, work);
}

phx_status phx_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t root_group_rank,
                      const phx_options *options, phx_work **work) {
  return issue<Kind::kGather>(group, in, out, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                       int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue<Kind::kScatter>(group, in, out, count, dtype, 0, root_group_rank, options, work);
}

phx_status phx_all_gather_v(phx_group *group, const void *in, void *out, const size_t *counts, int32_t dtype,
                            const phx_options *options, phx_work **work) {
  return guarded("all_gather_v", [&]() -> phx_status {
    Call call(Kind::kAllGatherV, group, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    const int self = call.group().group_rank();
    size_t before = 0;
    for (int i = 0; i < self; ++i) before += counts[i];
    call.data(out, 1, out, 1, total, dtype).data(in, 1, out, 0, counts[self], dtype);
    call.overlap(counts[self], total, before, true).counts(counts, &total);
    if (!call.ok()) return call.status();
    const size_t item = call.buffers().item, bytes = counts[self] * item;
    if (call.on_gpu()) {
      const size_t most = *std::max_element(counts, counts + call.group_size());
      return phx::put_on_gpu_v(call, {bytes, total * item, most * item}, counts, counts, work);
    }
    phx::OperationPtr staged = phx::make_all_gather(call.plan(work), call.buffers());
    return call.issue(phx::with_zero_copy(call, bytes, std::move(staged), work == nullptr), work);
  });
}

phx_status phx_reduce_scatter_v(phx_group *group, const void *in, void *out, const size_t *counts, int32_t dtype,
                                int32_t op, const phx_options *options, phx_work **work) {
  return guarded("reduce_scatter_v", [&]() -> phx_status {
    Call call(Kind::kReduceScatterV, group, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    const int self = call.group().group_rank();
    size_t before = 0;
    for (int i = 0; i < self; ++i) before += counts[i];
    call.data(in, 1, in == nullptr ? out : const_cast<void *>(in), 1, total, dtype);
    call.data(in, 0, out, 1, counts[self], dtype).overlap(total, counts[self], 0 - before, true);
    call.reduce(op).counts(counts, &total);
    if (!call.ok()) return call.status();
    const size_t bytes = total * call.buffers().item;
    if (call.on_gpu())
      return phx::put_on_gpu_v(call, {bytes, counts[self] * call.buffers().item, bytes}, counts, counts, work);
    phx::OperationPtr staged = phx::make_reduce_scatter(call.plan(work), call.buffers(), call.reduction());
    return call.issue(phx::with_zero_copy(call, bytes, std::move(staged), work == nullptr), work);
  });
}

phx_status phx_all_to_all_v(phx_group *group, const void *in, const size_t *in_counts, void *out,
                            const size_t *out_counts, int32_t dtype, const phx_options *options, phx_work **work) {
  return guarded("all_to_all_v", [&]() -> phx_status {
    Call call(Kind::kAllToAllV, group, options);
    size_t ins = 0, outs = 0;
    if (!call.own_counts(in_counts, &ins).own_counts(out_counts, &outs).ok()) return call.status();
    if ((ins != 0 && in == nullptr) || (outs != 0 && out == nullptr))
      return call.refuse(phx::fail(PHX_ERR_INVALID, call.name(), "%s: a buffer is NULL", call.name())).status();
    // The counts differ from rank to rank, so they are compared in the first round and not in the record.
    if (!call.data(in, 0, out, 0, 0, dtype).overlap(ins, outs, 0, false).ok()) return call.status();
    const size_t bytes = ins * call.buffers().item;
    if (call.on_gpu())
      return phx::put_on_gpu_v(call, {bytes, outs * call.buffers().item, 0}, in_counts, out_counts, work);
    phx::OperationPtr staged =
        phx::make_all_to_all_v(call.group(), call.plan(work), call.buffers(), in_counts, out_counts);
    return call.issue(phx::with_zero_copy(call, bytes, std::move(staged), work == nullptr, -1, in_counts, out_counts),
                      work);
  });
}
}
