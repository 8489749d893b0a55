#include "group/call_record.h"

#include <cinttypes>
#include <cstdio>

#include "phalanx/phalanx.h"

namespace phx {

// The record may come from a peer and hold any bytes.
const char *name_of(const CallRecord &record) {
  if (kind_of(record) > Kind::kRefused) return "an unknown collective";
  return name_of(kind_of(record), (record.operation & kSymmetric) != 0);
}

std::string describe_call(const CallRecord &record) {
  if (kind_of(record) == Kind::kRefused) return name_of(record);
  char text[160];
  int length = std::snprintf(text, sizeof text, "%s(", name_of(record));
  auto add = [&](const char *format, auto value) {
    if (length > 0 && static_cast<size_t>(length) < sizeof text)
      length += std::snprintf(text + length, sizeof text - length, format, value);
  };
  if (kind_of(record) == Kind::kCoalesced) {
    add("%" PRIu64 " calls", record.count);
    add(", key %" PRIx64, record.aux);
  } else if (kind_of(record) != Kind::kBarrier) {
    add("%s, ", phx_dtype_name(record.dtype));
    add("%" PRIu64, record.count);
    if (record.op != 0 && record.op != kComparesGraphs) add(", %s", phx_op_name(record.op));
    if (record.root >= 0) add(", root %d", record.root);
    if (const int algo = record.algo & 15; algo != PHX_ALGO_AUTO) add(", algo %d", algo);
    if (record.aux != 0) add(", key %" PRIx64, record.aux);
  }
  add("%s", ")");
  return text;
}

std::string describe_act(const CallRecord &record) {
  return record.op == kComparesGraphs ? "is checking a newly compiled graph" : "called " + describe_call(record);
}

}  // namespace phx
