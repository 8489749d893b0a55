// The public collectives on ordinary memory.
#include <algorithm>
#include <cstdint>

#include "base/guard.h"
#include "ops/call.h"
#include "ops/on_gpu.h"
#include "ops/recognised.h"

using phx::Call;
using phx::guarded;
using phx::Kind;

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
  return guarded("all_reduce", [&]() -> phx_status {
    Call call(Kind::kAllReduce, group, options);
    call.data(in, 1, out, 1, count, dtype).overlap(count, count, 0, true).reduce(op);
    if (!call.ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {bytes, bytes, bytes}, -1, work);
    const phx::Plan plan = call.plan(work);
    const int32_t algo = phx::choose_all_reduce(plan, bytes, call.options().algo);
    phx::OperationPtr staged = phx::make_all_reduce(plan, call.buffers(), call.reduction(), algo);
    return call.chose(algo).issue(phx::recognise(call, Kind::kSymmAllReduce, bytes, std::move(staged), plan.blocking),
                                  work);
  });
}

phx_status phx_all_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return guarded("all_gather", [&]() -> phx_status {
    Call call(Kind::kAllGather, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, 1, out, n, count, dtype).overlap(count, n * count, call.group().group_rank() * count, true);
    if (!call.ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {bytes, n * bytes, bytes}, -1, work);
    phx::OperationPtr staged = phx::make_all_gather(call.plan(work), call.buffers());
    return call.issue(phx::recognise(call, Kind::kSymmAllGather, bytes, std::move(staged), work == nullptr), work);
  });
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
    phx::OperationPtr staged = phx::make_all_gather_v(call.plan(work), call.buffers(), counts);
    return call.issue(phx::recognise_v(call, Kind::kSymmAllGatherV, bytes, std::move(staged), work == nullptr, counts),
                      work);
  });
}

phx_status phx_reduce_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                              const phx_options *options, phx_work **work) {
  return guarded("reduce_scatter", [&]() -> phx_status {
    Call call(Kind::kReduceScatter, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, n, out, 1, count, dtype)
        .overlap(n * count, count, 0 - call.group().group_rank() * count, true)
        .reduce(op);
    if (!call.ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {n * bytes, bytes, n * bytes}, -1, work);
    phx::OperationPtr staged = phx::make_reduce_scatter(call.plan(work), call.buffers(), call.reduction());
    return call.issue(phx::recognise(call, Kind::kSymmReduceScatter, n * bytes, std::move(staged), work == nullptr),
                      work);
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
    phx::OperationPtr staged = phx::make_reduce_scatter_v(call.plan(work), call.buffers(), call.reduction(), counts);
    return call.issue(
        phx::recognise_v(call, Kind::kSymmReduceScatterV, bytes, std::move(staged), work == nullptr, counts), work);
  });
}

phx_status phx_all_to_all(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                          const phx_options *options, phx_work **work) {
  return guarded("all_to_all", [&]() -> phx_status {
    Call call(Kind::kAllToAll, group, options);
    if (!call.ok()) return call.status();
    const size_t n = call.group_size();
    call.data(in, n, out, n, count, dtype).overlap(n * count, n * count, 0, false);
    if (!call.ok()) return call.status();
    const size_t bytes = n * count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {bytes, bytes, bytes}, -1, work);
    phx::OperationPtr staged = phx::make_all_to_all(call.plan(work), call.buffers());
    return call.issue(phx::recognise(call, Kind::kSymmAllToAll, bytes, std::move(staged), work == nullptr), work);
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
    phx::OperationPtr staged = phx::make_all_to_all_v(call.plan(work), call.buffers(), in_counts, out_counts);
    return call.issue(
        phx::recognise_all_to_all_v(call, bytes, std::move(staged), work == nullptr, in_counts, out_counts), work);
  });
}

phx_status phx_broadcast(phx_group *group, void *buffer, size_t count, int32_t dtype, int32_t root_group_rank,
                         const phx_options *options, phx_work **work) {
  return guarded("broadcast", [&]() -> phx_status {
    Call call(Kind::kBroadcast, group, options);
    if (!call.data(buffer, 1, buffer, 1, count, dtype).root(root_group_rank).ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) {
      const bool root = call.group().group_rank() == root_group_rank;
      return phx::put_on_gpu(call, {root ? bytes : 0, root ? 0 : bytes, bytes}, root_group_rank, work);
    }
    phx::OperationPtr staged = phx::make_broadcast(call.plan(work), call.buffers(), root_group_rank);
    return call.issue(
        phx::recognise_root(call, Kind::kSymmBroadcast, bytes, std::move(staged), work == nullptr, root_group_rank),
        work);
  });
}

phx_status phx_reduce(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op,
                      int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return guarded("reduce", [&]() -> phx_status {
    Call call(Kind::kReduce, group, options);
    if (!call.ok()) return call.status();
    const bool root = call.group().group_rank() == root_group_rank;
    call.data(in, 1, out, root ? 1 : 0, count, dtype).overlap(count, root ? count : 0, 0, true);
    if (!call.reduce(op).root(root_group_rank).ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {bytes, root ? bytes : 0, bytes}, root_group_rank, work);
    phx::OperationPtr staged = phx::make_reduce(call.plan(work), call.buffers(), call.reduction(), root_group_rank);
    return call.issue(
        phx::recognise(call, Kind::kSymmReduce, bytes, std::move(staged), work == nullptr, root_group_rank), work);
  });
}

phx_status phx_gather(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t root_group_rank,
                      const phx_options *options, phx_work **work) {
  return guarded("gather", [&]() -> phx_status {
    Call call(Kind::kGather, group, options);
    if (!call.ok()) return call.status();
    const int self = call.group().group_rank();
    const size_t parts = self == root_group_rank ? call.group_size() : 0;
    call.data(in, 1, out, parts, count, dtype).overlap(count, parts * count, self * count, true).root(root_group_rank);
    if (!call.ok()) return call.status();
    const size_t bytes = count * call.buffers().item;
    if (call.on_gpu()) return phx::put_on_gpu(call, {bytes, parts * bytes, bytes}, root_group_rank, work);
    phx::OperationPtr staged = phx::make_gather(call.plan(work), call.buffers(), root_group_rank);
    return call.issue(
        phx::recognise(call, Kind::kSymmGather, bytes, std::move(staged), work == nullptr, root_group_rank), work);
  });
}

phx_status phx_scatter(phx_group *group, const void *in, void *out, size_t count, int32_t dtype,
                       int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return guarded("scatter", [&]() -> phx_status {
    Call call(Kind::kScatter, group, options);
    if (!call.ok()) return call.status();
    const int self = call.group().group_rank();
    const size_t parts = self == root_group_rank ? call.group_size() : 0;
    call.data(in, parts, out, 1, count, dtype)
        .overlap(parts * count, count, 0 - self * count, true)
        .root(root_group_rank);
    if (!call.ok()) return call.status();
    const size_t part = count * call.buffers().item, bytes = call.group_size() * part;
    if (call.on_gpu()) return phx::put_on_gpu(call, {parts * part, part, bytes}, root_group_rank, work);
    phx::OperationPtr staged = phx::make_scatter(call.plan(work), call.buffers(), root_group_rank);
    return call.issue(
        phx::recognise_root(call, Kind::kSymmScatter, bytes, std::move(staged), work == nullptr, root_group_rank),
        work);
  });
}
}
