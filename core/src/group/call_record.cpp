#include "group/call_record.h"

#include <cinttypes>
#include <cstdio>

#include "phalanx/phalanx.h"

namespace phx {

const char *kind_name(Kind kind) {
  switch (kind) {
    case Kind::kNone: return "nothing";
    case Kind::kBarrier: return "barrier";
    case Kind::kAllReduce: return "all_reduce";
    case Kind::kAllGather: return "all_gather";
    case Kind::kAllGatherV: return "all_gather_v";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kReduceScatterV: return "reduce_scatter_v";
    case Kind::kAllToAll: return "all_to_all";
    case Kind::kAllToAllV: return "all_to_all_v";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kReduce: return "reduce";
    case Kind::kGather: return "gather";
    case Kind::kScatter: return "scatter";
    case Kind::kCoalesced: return "coalesced";
    case Kind::kSymmAllReduce: return "symm_all_reduce";
    case Kind::kSymmAllGather: return "symm_all_gather";
    case Kind::kSymmAllGatherV: return "symm_all_gather_v";
    case Kind::kSymmReduceScatter: return "symm_reduce_scatter";
    case Kind::kSymmReduceScatterV: return "symm_reduce_scatter_v";
    case Kind::kSymmAllToAll: return "symm_all_to_all";
    case Kind::kSymmAllToAllV: return "symm_all_to_all_v";
    case Kind::kSymmBroadcast: return "symm_broadcast";
    case Kind::kSymmReduce: return "symm_reduce";
    case Kind::kSymmGather: return "symm_gather";
    case Kind::kSymmScatter: return "symm_scatter";
    case Kind::kRefused: return "a call that it refused";
  }
  return "an unknown collective";
}

std::string describe_call(const CallRecord &record) {
  if (record.operation == static_cast<uint8_t>(Kind::kRefused)) return kind_name(Kind::kRefused);
  char text[160];
  int length = std::snprintf(text, sizeof text, "%s(", kind_name(static_cast<Kind>(record.operation)));
  auto add = [&](const char *format, auto value) {
    if (length > 0 && static_cast<size_t>(length) < sizeof text)
      length += std::snprintf(text + length, sizeof text - length, format, value);
  };
  if (record.operation == static_cast<uint8_t>(Kind::kCoalesced)) {
    add("%" PRIu64 " calls", record.count);
    add(", key %" PRIx64, record.aux);
  } else if (record.operation != static_cast<uint8_t>(Kind::kBarrier)) {
    add("%s, ", phx_dtype_name(record.dtype));
    add("%" PRIu64, record.count);
    if (record.op != 0) add(", %s", phx_op_name(record.op));
    if (record.root >= 0) add(", root %d", record.root);
    if (const int algo = record.algo & 15; algo != PHX_ALGO_AUTO) add(", algo %d", algo);
    if (record.aux != 0) add(", key %" PRIx64, record.aux);
  }
  add("%s", ")");
  return text;
}

}  // namespace phx
