// Implements phx_coalesced.
#include <algorithm>
#include <cstring>
#include <iterator>

#include "api/entry.h"
#include "ops/enqueue.h"

using namespace phx;

namespace {

constexpr const char *kName = "coalesced";
constexpr size_t kMostCalls = size_t{1} << 20;

// The collectives of a list, by PHX_CALL_*.
constexpr Kind kKinds[] = {Kind::kNone,      Kind::kAllReduce, Kind::kAllGather, Kind::kReduceScatter, Kind::kAllToAll,
                           Kind::kBroadcast, Kind::kReduce,    Kind::kGather,    Kind::kScatter};
static_assert(std::size(kKinds) == PHX_CALL_SCATTER + 1);

struct Range {
  const char *begin;
  const char *end;
  bool written;
  size_t call;
};

phx_status check_call(phx_group *group, const phx_options *options, const phx_call &request, size_t index,
                      CoalescedCall *out, std::vector<Range> *ranges) {
  const bool is_known = request.kind > 0 && request.kind <= PHX_CALL_SCATTER;
  const Kind kind = kKinds[is_known ? request.kind : 0];
  if (kind == Kind::kNone || request.flags != 0)
    return fail(PHX_ERR_INVALID, kName, "call %zu has kind %d and flags %u; expected a PHX_CALL_* constant and flags 0",
                index, request.kind, request.flags);
  Call call(kind, group, options, true);
  if (!call.ok()) return call.status();
  const void *in = kind == Kind::kBroadcast ? request.out : request.in;
  if (kind == Kind::kBroadcast && request.in != request.out)
    return fail(PHX_ERR_INVALID, kName,
                "call %zu is a broadcast with different in and out; set both to the same buffer", index);
  Extent extent;
  call.check(traits_of(kind), in, request.out, request.count, request.dtype, request.op, request.root_group_rank,
             &extent);
  if (!call.ok()) return call.status();
  const size_t bytes = request.count * call.buffers().item;
  const auto add = [&](const char *begin, size_t parts, bool written) {
    if (bytes * parts != 0) ranges->push_back({begin, begin + bytes * parts, written, index});
  };
  add(call.buffers().in, extent.in_parts, false);
  add(call.buffers().out, extent.out_parts, true);
  *out = {call.buffers(), call.reduction(), call.record(), call.volume(extent)};
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
      return fail(
          PHX_ERR_INVALID, kName,
          "calls %zu and %zu use the same memory and one of them writes to it; give each call memory of its own",
          std::min(other->call, range.call), std::max(other->call, range.call));
    if (range.written && (written == nullptr || range.end > written->end)) written = &range;
    if (any == nullptr || range.end > any->end) any = &range;
  }
  return PHX_OK;
}

phx_status check_calls(phx_group *group, const phx_options *options, const phx_call *calls,
                       std::vector<CoalescedCall> *checked) {
  if (calls == nullptr || checked->empty()) return PHX_OK;
  std::vector<Range> ranges;
  ranges.reserve(2 * checked->size());
  const char *at = reinterpret_cast<const char *>(calls);
  uint32_t stride = 0;
  std::memcpy(&stride, at, sizeof stride);
  for (size_t i = 0; i < checked->size(); ++i, at += stride) {
    phx_call request = PHX_CALL_INIT;
    PHX_TRY(read_in(reinterpret_cast<const phx_call *>(at), &request, kName));
    if (request.struct_size != stride)
      return fail(PHX_ERR_ABI, kName,
                  "call %zu has a different struct_size than call 0; initialize every call with PHX_CALL_INIT", i);
    PHX_TRY(check_call(group, options, request, i, &(*checked)[i], &ranges));
  }
  return check_overlaps(&ranges);
}

}  // namespace

extern "C" phx_status phx_coalesced(phx_group *group, const phx_call *calls, size_t count, const phx_options *options,
                                    phx_work **work) {
  return guarded(kName, [&]() -> phx_status {
    Call all(Kind::kCoalesced, group, options);
    if (!all.ok()) return all.status();
    if ((calls == nullptr && count != 0) || count > kMostCalls)
      return all.refuse(fail(PHX_ERR_INVALID, kName,
                             "calls is NULL or count is too large; at most %zu calls are allowed", kMostCalls));
    std::vector<CoalescedCall> checked(count);
    if (const phx_status status = check_calls(group, options, calls, &checked); status != PHX_OK)
      return all.refuse(status);
    all.coalesces(checked);
    if (all.on_gpu()) return put_on_gpu(all, checked, work);
    return all.issue(coalesced_with_zero_copy(all, all.plan(work), checked), work);
  });
}
