// Implements phx_coalesced.
#include <algorithm>
#include <cstring>

#include "api/entry.h"
#include "ops/on_gpu.h"
#include "ops/zero_copy.h"

using phx::Call;
using phx::CoalescedCall;
using phx::Kind;

namespace {

constexpr const char *kName = "coalesced";
constexpr size_t kMostCalls = size_t{1} << 20;

Kind kind_of(int32_t kind) {
  switch (kind) {
    case PHX_CALL_ALL_REDUCE: return Kind::kAllReduce;
    case PHX_CALL_ALL_GATHER: return Kind::kAllGather;
    case PHX_CALL_REDUCE_SCATTER: return Kind::kReduceScatter;
    case PHX_CALL_ALL_TO_ALL: return Kind::kAllToAll;
    case PHX_CALL_BROADCAST: return Kind::kBroadcast;
    case PHX_CALL_REDUCE: return Kind::kReduce;
    case PHX_CALL_GATHER: return Kind::kGather;
    case PHX_CALL_SCATTER: return Kind::kScatter;
    default: return Kind::kNone;
  }
}

struct Range {
  const char *begin;
  const char *end;
  bool written;
  size_t call;
};

phx_status check_call(phx_group *group, const phx_options *options, const phx_call &request, size_t index,
                      CoalescedCall *out, phx::Volume *volume, std::vector<Range> *ranges) {
  const Kind kind = kind_of(request.kind);
  if (kind == Kind::kNone || request.flags != 0)
    return phx::fail(PHX_ERR_INVALID, kName,
                     "call %zu has kind %d and flags %u; expected a PHX_CALL_* constant and flags 0", index,
                     request.kind, request.flags);
  Call call(kind, group, options, true);
  if (!call.ok()) return call.status();
  const int self = call.group().group_rank();
  const void *in = kind == Kind::kBroadcast ? request.out : request.in;
  if (kind == Kind::kBroadcast && request.in != request.out)
    return phx::fail(PHX_ERR_INVALID, kName,
                     "call %zu is a broadcast with different in and out; set both to the same buffer", index);
  phx::Extent extent;
  call.check(phx::traits_of(kind), in, request.out, request.count, request.dtype, request.op, request.root_group_rank,
             &extent);
  if (!call.ok()) return call.status();
  const size_t bytes = request.count * call.buffers().item;
  const auto add = [&](const char *begin, size_t parts, bool written) {
    if (bytes * parts != 0) ranges->push_back({begin, begin + bytes * parts, written, index});
  };
  add(call.buffers().in, extent.in_parts, false);
  add(call.buffers().out, extent.out_parts, true);
  *volume = phx::volume_of(kind, extent, call.group_size(), self == request.root_group_rank, bytes);
  const bool rooted = phx::traits_of(kind).root != phx::Root::kNone;
  *out = {kind, call.buffers(), call.reduction(), rooted ? request.root_group_rank : -1, call.record()};
  return PHX_OK;
}

// No call may write memory that another one reads or writes, because the order of the calls is not defined.
phx_status check_overlaps(std::vector<Range> *ranges) {
  std::sort(ranges->begin(), ranges->end(), [](const Range &a, const Range &b) { return a.begin < b.begin; });
  const Range *written = nullptr, *any = nullptr;  // those that end last so far
  for (const Range &range : *ranges) {
    const Range *other = written != nullptr && written->end > range.begin && written->call != range.call ? written
                         : range.written && any != nullptr && any->end > range.begin && any->call != range.call
                             ? any
                             : nullptr;
    if (other != nullptr)
      return phx::fail(
          PHX_ERR_INVALID, kName,
          "calls %zu and %zu use the same memory and one of them writes to it; give each call memory of its own",
          std::min(other->call, range.call), std::max(other->call, range.call));
    if (range.written && (written == nullptr || range.end > written->end)) written = &range;
    if (any == nullptr || range.end > any->end) any = &range;
  }
  return PHX_OK;
}

}  // namespace

extern "C" phx_status phx_coalesced(phx_group *group, const phx_call *calls, size_t count, const phx_options *options,
                                    phx_work **work) {
  return phx::guarded(kName, [&]() -> phx_status {
    Call all(Kind::kCoalesced, group, options);
    if (!all.ok()) return all.status();
    if ((calls == nullptr && count != 0) || count > kMostCalls)
      return all
          .refuse(phx::fail(PHX_ERR_INVALID, kName,
                            "calls is NULL or count is too large; at most %zu calls are allowed", kMostCalls))
          .status();
    std::vector<CoalescedCall> checked(count);
    std::vector<phx::Volume> volumes(count);
    std::vector<Range> ranges;
    ranges.reserve(2 * count);
    const char *at = reinterpret_cast<const char *>(calls);
    uint32_t stride = 0;
    if (count != 0) std::memcpy(&stride, at, sizeof stride);
    for (size_t i = 0; i < count; ++i, at += stride) {
      phx_call request = PHX_CALL_INIT;
      phx_status status = phx::read_in(reinterpret_cast<const phx_call *>(at), &request, kName);
      if (status == PHX_OK && request.struct_size != stride)
        status =
            phx::fail(PHX_ERR_ABI, kName,
                      "call %zu has a different struct_size than call 0; initialize every call with PHX_CALL_INIT", i);
      if (status == PHX_OK) status = check_call(group, options, request, i, &checked[i], &volumes[i], &ranges);
      if (status != PHX_OK) return all.refuse(status).status();
    }
    if (const phx_status status = check_overlaps(&ranges); status != PHX_OK) return all.refuse(status).status();
    if (all.on_gpu()) return phx::put_on_gpu(all.coalesces(checked), checked, volumes, work);
    return all.coalesces(checked).issue(phx::coalesced_with_zero_copy(all, all.plan(work), checked), work);
  });
}
