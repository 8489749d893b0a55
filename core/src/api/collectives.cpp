// The public collectives on ordinary memory.
#include <numeric>

#include "api/entry.h"
#include "ops/enqueue.h"

using namespace phx;

namespace {

// Checks, creates and issues a collective with one count for all ranks, as its row in kCollectives says.
template <Kind kKind>
phx_status issue(phx_group *group, const void *in, void *out, size_t count, int32_t dtype, int32_t op, int32_t root,
                 const phx_options *options, phx_work **work) {
  return guarded(name_of(kKind), [&]() -> phx_status {
    constexpr const CollectiveTraits &kTraits = traits_of(kKind);
    Call call(kKind, group, options);
    Extent extent;
    if (!call.check(kTraits, in, out, count, dtype, op, root, &extent).ok()) return call.status();
    if (call.on_gpu()) return put_on_gpu(call, call.volume(extent), work);
    const Plan plan = call.plan(work);
    const size_t bytes = count * call.buffers().item;
    const size_t in_bytes = parts_on(kTraits.in, call.group_size(), true) * bytes;  // of a rank that has an input
    int32_t algo = PHX_ALGO_AUTO;
    if constexpr (kKind == Kind::kAllReduce) {
      algo = choose_all_reduce(plan, bytes, call.options().algo);
      call.chose(algo);
    }
    OperationPtr staged = make_operation(kKind, plan, call.buffers(), call.reduction(), root, algo);
    return call.issue(with_zero_copy(call, plan, in_bytes, std::move(staged)), work);
  });
}

// Issues a checked call whose blocks `lists` describes. `volume.in`: the size of the input on a rank that has one.
phx_status issue_lists(Call &call, const Lists &lists, const Volume &volume, phx_work **work) {
  call.listed(&lists);
  if (call.on_gpu()) return put_on_gpu(call, volume, work);
  const Plan plan = call.plan(work);
  OperationPtr staged = call.kind() == Kind::kAllToAllV && plan.net == nullptr
                            ? make_all_to_all_v(call.group(), plan, call.buffers())
                            : make_operation(call.kind(), plan, call.buffers(), call.reduction(), call.root());
  return call.issue(with_zero_copy(call, plan, volume.in, std::move(staged)), work);
}

// Checks and issues all_gather_v or reduce_scatter_v: `counts` are those of the output or of the input.
template <Kind kKind>
phx_status issue_v(phx_group *group, const void *in, void *out, const size_t *counts, int32_t dtype, int32_t op,
                   const phx_options *options, phx_work **work) {
  return guarded(name_of(kKind), [&]() -> phx_status {
    constexpr bool kGathers = kKind == Kind::kAllGatherV;
    Call call(kKind, group, options);
    size_t total = 0;
    if (!call.own_counts(counts, &total).ok()) return call.status();
    const int self = call.group().group_rank();
    const size_t before = std::accumulate(counts, counts + self, size_t{0});
    const size_t ins = kGathers ? counts[self] : total, outs = kGathers ? total : counts[self];
    // The buffer of all blocks alone, and then that of this rank's block.
    void *const all = kGathers ? out : const_cast<void *>(in);
    call.data(all, 1, all, 1, total, dtype);
    call.data(in, kGathers ? 1 : 0, out, kGathers ? 0 : 1, counts[self], dtype);
    call.overlap(ins, outs, kGathers ? before : 0 - before, true);
    if (!kGathers) call.reduce(op);
    if (!call.counts(counts, &total).ok()) return call.status();
    const size_t item = call.buffers().item;
    Lists lists;
    (kGathers ? lists.out_counts : lists.in_counts) = counts;
    return issue_lists(call, lists, {ins * item, outs * item, ins * item}, work);
  });
}

// Whether all blocks of a list have one count. A list that cannot be read counts as such, and is refused later.
bool even(const phx_group *group, const phx_block *blocks) {
  const int n = group == nullptr || blocks == nullptr ? 0 : group->ptr->size();
  for (int i = 1; i < n; ++i)
    if (blocks[i].count != blocks[0].count) return false;
  return true;
}

// An input or output of a collective on blocks: a list with a block for each rank, or one buffer.
struct Side {
  const phx_block *list;
  const void *buffer;
};

// Checks and issues a collective on blocks. `count`: the elements of every block, if there is a root.
template <Kind kind>
phx_status issue_blocks(phx_group *group, Side in, Side out, size_t count, int32_t dtype, int32_t op, int32_t root,
                        const phx_options *options, phx_work **work) {
  return guarded(name_of(kind), [&]() -> phx_status {
    constexpr const CollectiveTraits &traits = traits_of(kind);
    Call call(kind, group, options);
    if (!call.ok()) return call.status();
    if (call.on_gpu())
      return call.refuse(fail(PHX_ERR_UNSUPPORTED, call.name(),
                              "lists of blocks must be in host memory, but options.gpu names a GPU; copy them to "
                              "the host, or use a collective without blocks"));
    if (traits.root != Root::kNone && !call.root(root).ok()) return call.status();
    const int self = call.group().group_rank();
    const size_t n = call.group_size(), ins = parts_on(traits.in, n, self == root),
                 outs = parts_on(traits.out, n, self == root);
    const bool in_is_list = traits.in != Parts::kOne, out_is_list = traits.out != Parts::kOne;
    const size_t item = phx_dtype_size(dtype);
    BlocksFound ins_found, outs_found;
    if (in_is_list && ins != 0) call.blocks(in.list, item, &ins_found);
    if (out_is_list && outs != 0) call.blocks(out.list, item, &outs_found);
    if (!call.ok()) return call.status();
    const phx_block *const list = in_is_list ? in.list : out.list;
    if (traits.root == Root::kNone)
      count = list[self].count;
    else if (self == root && !((in_is_list ? ins_found : outs_found).even && list[0].count == count))
      return call.refuse(fail(PHX_ERR_INVALID, call.name(),
                              "count is %zu, but a block of the list has a different number of elements; give "
                              "every block `count` elements",
                              count));
    const phx_block buffer{const_cast<void *>(in_is_list ? out.buffer : in.buffer), count, 0, 0};
    const phx_block *const from = in_is_list ? in.list : &buffer, *const to = out_is_list ? out.list : &buffer;

    const bool uneven = kind == Kind::kAllGatherV || kind == Kind::kReduceScatterV;
    const size_t recorded = kind == Kind::kAllToAllV ? 0 : uneven ? 1 : count;
    void *const in_at = in_is_list ? ins_found.at : buffer.data;
    void *const out_at = out_is_list ? outs_found.at : buffer.data;
    call.data(in_at, in_is_list || count == 0 ? 0 : 1, out_at, out_is_list || count == 0 ? 0 : 1, recorded, dtype);
    if (uneven) {
      std::vector<size_t> counts(n);
      for (size_t i = 0; i < n; ++i) counts[i] = list[i].count;
      call.counts(counts.data(), &count);
    }
    call.apart(from, ins, to, outs, traits.in_place != InPlace::kNever);
    if (traits.reduces) call.reduce(op);
    if (!call.ok()) return call.status();
    // Blocks that lie like those of the plain form need no list.
    const bool plain = traits.in_place != InPlace::kNever && !uneven;
    Lists lists;
    if (in_is_list && ins != 0 && !(plain && in_at != nullptr)) lists.in = from;
    if (out_is_list && outs != 0 && !(plain && out_at != nullptr)) lists.out = to;
    const size_t in_bytes = !in_is_list                  ? count * item
                            : traits.root == Root::kNone ? ins_found.total * item
                                                         : n * count * item;
    return issue_lists(call, lists, {in_bytes, 0, 0}, work);
  });
}

}  // namespace

extern "C" {

phx_status phx_barrier(phx_group *group, const phx_options *options, phx_work **work) {
  return guarded("barrier", [&]() -> phx_status {
    Call call(Kind::kBarrier, group, options);
    if (!call.ok()) return call.status();
    if (call.on_gpu()) return put_on_gpu(call, Volume(), work);
    return call.issue(make_operation(Kind::kBarrier, call.plan(work), {}, {}, -1), work);
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
  return issue_v<Kind::kAllGatherV>(group, in, out, counts, dtype, 0, options, work);
}

phx_status phx_reduce_scatter_v(phx_group *group, const void *in, void *out, const size_t *counts, int32_t dtype,
                                int32_t op, const phx_options *options, phx_work **work) {
  return issue_v<Kind::kReduceScatterV>(group, in, out, counts, dtype, op, options, work);
}

phx_status phx_all_to_all_v(phx_group *group, const void *in, const size_t *in_counts, void *out,
                            const size_t *out_counts, int32_t dtype, const phx_options *options, phx_work **work) {
  return guarded("all_to_all_v", [&]() -> phx_status {
    Call call(Kind::kAllToAllV, group, options);
    size_t ins = 0, outs = 0;
    if (!call.own_counts(in_counts, &ins).own_counts(out_counts, &outs).ok()) return call.status();
    if ((ins != 0 && in == nullptr) || (outs != 0 && out == nullptr))
      return call.refuse(fail(PHX_ERR_INVALID, call.name(), "in or out is NULL, but the counts are not all 0"));
    // The counts differ from rank to rank, so they are compared in the first round and not in the record.
    if (!call.data(in, 0, out, 0, 0, dtype).overlap(ins, outs, 0, false).ok()) return call.status();
    const size_t item = call.buffers().item;
    return issue_lists(call, {in_counts, out_counts, nullptr, nullptr}, {ins * item, outs * item, 0}, work);
  });
}

phx_status phx_all_gather_blocks(phx_group *group, const void *in, const phx_block *out, int32_t dtype,
                                 const phx_options *options, phx_work **work) {
  const auto issue = even(group, out) ? issue_blocks<Kind::kAllGather> : issue_blocks<Kind::kAllGatherV>;
  return issue(group, {nullptr, in}, {out, nullptr}, 0, dtype, 0, -1, options, work);
}

phx_status phx_reduce_scatter_blocks(phx_group *group, const phx_block *in, void *out, int32_t dtype, int32_t op,
                                     const phx_options *options, phx_work **work) {
  const auto issue = even(group, in) ? issue_blocks<Kind::kReduceScatter> : issue_blocks<Kind::kReduceScatterV>;
  return issue(group, {in, nullptr}, {nullptr, out}, 0, dtype, op, -1, options, work);
}

phx_status phx_all_to_all_blocks(phx_group *group, const phx_block *in, const phx_block *out, int32_t dtype,
                                 const phx_options *options, phx_work **work) {
  return issue_blocks<Kind::kAllToAllV>(group, {in, nullptr}, {out, nullptr}, 0, dtype, 0, -1, options, work);
}

phx_status phx_gather_blocks(phx_group *group, const void *in, const phx_block *out, size_t count, int32_t dtype,
                             int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue_blocks<Kind::kGather>(group, {nullptr, in}, {out, nullptr}, count, dtype, 0, root_group_rank, options,
                                     work);
}

phx_status phx_scatter_blocks(phx_group *group, const phx_block *in, void *out, size_t count, int32_t dtype,
                              int32_t root_group_rank, const phx_options *options, phx_work **work) {
  return issue_blocks<Kind::kScatter>(group, {in, nullptr}, {nullptr, out}, count, dtype, 0, root_group_rank, options,
                                      work);
}
}
