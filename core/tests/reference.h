// What ranks contribute to collectives in tests, and what must come out, without a line of the code under test.
//
// Element i of a rank's input is element i modulo a prime of a table of random ones, so that tables are small, sums of
// them are computed once, and any amount of data is filled and checked by copying and comparing. As the prime divides
// no chunk, line or page, data that lands in a wrong place differs. The arithmetic is that of kernel_reference.h.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <vector>

#include "kernel_reference.h"

namespace reference {

using kernel_test::Bytes;
using kernel_test::is_defined;
using kernel_test::kScale;

constexpr size_t kPeriod = 1021;
constexpr int32_t kLastDtype = PHX_DTYPE_F8E5M2;
constexpr int32_t kLastOp = PHX_OP_PREMUL_SUM;

// A quarter any bits, a quarter small numbers, and half numbers of full precision, the sums of which depend on their
// order.
inline Bytes make_elements(int rank, int32_t dtype) {
  std::mt19937_64 random(static_cast<uint64_t>(rank) * 1000 + static_cast<uint64_t>(dtype));
  Bytes bytes = kernel_test::random_elements(random, dtype, kPeriod);
  const bool narrow = dtype == PHX_DTYPE_F16 || dtype == PHX_DTYPE_BF16 || kernel_test::is_f8(dtype);
  for (size_t i = 0; i < kPeriod; i += 2) {
    double parts[2];
    for (double &part : parts)
      part = std::ldexp(static_cast<double>(static_cast<int64_t>(random())), static_cast<int>(random() % 5) - 64);
    if (narrow) {
      const kernel_test::Format format = kernel_test::format_of(dtype);
      kernel_test::put_narrow(bytes, i, dtype, kernel_test::encode(format, static_cast<float>(parts[0])));
    }
    if (dtype == PHX_DTYPE_F32) kernel_test::put(bytes, i, static_cast<float>(parts[0]));
    if (dtype == PHX_DTYPE_F64) kernel_test::put(bytes, i, parts[0]);
    for (size_t part = 0; part < 2; ++part) {
      if (dtype == PHX_DTYPE_C64) kernel_test::put(bytes, 2 * i + part, static_cast<float>(parts[part]));
      if (dtype == PHX_DTYPE_C128) kernel_test::put(bytes, 2 * i + part, parts[part]);
    }
  }
  return bytes;
}

// The table of what a rank contributes. Safe from any thread; valid for ever.
inline const Bytes &elements(int rank, int32_t dtype) {
  static std::mutex mutex;
  static std::map<std::pair<int, int32_t>, Bytes> known;
  std::lock_guard<std::mutex> lock(mutex);
  Bytes &table = known[{rank, dtype}];
  if (table.empty()) table = make_elements(rank, dtype);
  return table;
}

// The host of each rank, for programs whose ranks are on several: those of a host are reduced first, and then these
// results in the order of the hosts. Empty: the ranks are on one host, or the group reduces in the order of the ranks.
inline std::vector<int> host_of;

// Empty if each host has one rank: then the order is that of the ranks.
inline Bytes reduced_by_hosts(const std::vector<int> &ranks, int32_t dtype, int32_t op) {
  std::vector<int> hosts;
  std::vector<std::vector<Bytes>> inputs;
  for (const int rank : ranks) {
    const auto at = static_cast<size_t>(std::find(hosts.begin(), hosts.end(), host_of[rank]) - hosts.begin());
    if (at == hosts.size()) {
      hosts.push_back(host_of[rank]);
      inputs.emplace_back();
    }
    inputs[at].push_back(elements(rank, dtype));
  }
  if (hosts.size() == ranks.size()) return {};
  const int32_t first = op == PHX_OP_AVG ? PHX_OP_SUM : op, last = op == PHX_OP_PREMUL_SUM ? PHX_OP_SUM : op;
  std::vector<Bytes> sums;
  for (const std::vector<Bytes> &local : inputs)  // a single input is passed on as it is
    sums.push_back(local.size() == 1 && op != PHX_OP_PREMUL_SUM
                       ? local[0]
                       : kernel_test::reference(local, kPeriod, dtype, first, 1, kScale));
  return kernel_test::reference(sums, kPeriod, dtype, last, static_cast<int64_t>(ranks.size()), kScale);
}

// The table of what these ranks, in this order, reduce to. premul_sum is by kScale.
inline const Bytes &reduced(const std::vector<int> &ranks, int32_t dtype, int32_t op) {
  static std::mutex mutex;
  static std::map<std::tuple<std::vector<int>, std::vector<int>, int32_t, int32_t>, Bytes> known;
  std::lock_guard<std::mutex> lock(mutex);
  Bytes &table = known[{ranks, host_of, dtype, op}];
  if (table.empty() && !host_of.empty()) table = reduced_by_hosts(ranks, dtype, op);
  if (table.empty()) {
    std::vector<Bytes> inputs;
    for (const int rank : ranks) inputs.push_back(elements(rank, dtype));
    table = kernel_test::reference(inputs, kPeriod, dtype, op, static_cast<int64_t>(ranks.size()), kScale);
  }
  return table;
}

// Calls body(offset, piece, bytes) for the pieces of which elements first .. first + count of a table are made.
template <class Body>
inline void for_each_piece(const Bytes &table, size_t item, size_t first, size_t count, Body &&body) {
  size_t at = first % kPeriod;
  for (size_t done = 0; done < count;) {
    const size_t some = std::min(kPeriod - at, count - done);
    body(done * item, table.data() + at * item, some * item);
    done += some;
    at = 0;
  }
}

inline void fill(void *to, const Bytes &table, size_t item, size_t first, size_t count) {
  for_each_piece(table, item, first, count, [&](size_t offset, const unsigned char *piece, size_t bytes) {
    std::memcpy(static_cast<char *>(to) + offset, piece, bytes);
  });
}

// Bytes that are right before the first wrong one; count * item when all are.
inline size_t matching_bytes(const void *got, const Bytes &table, size_t item, size_t first, size_t count) {
  size_t right = 0;
  for_each_piece(table, item, first, count, [&](size_t offset, const unsigned char *piece, size_t bytes) {
    if (right != offset) return;  // found
    const char *at = static_cast<const char *>(got) + offset;
    if (std::memcmp(at, piece, bytes) == 0) {
      right += bytes;
      return;
    }
    while (static_cast<unsigned char>(at[right - offset]) == piece[right - offset]) ++right;
  });
  return right;
}
inline bool matches(const void *got, const Bytes &table, size_t item, size_t first, size_t count) {
  return matching_bytes(got, table, item, first, count) == count * item;
}

// A number that looks random, the same everywhere.
inline uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15ull;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

// Whether the environment asks for this.
inline bool asked(const char *variable) {
  const char *value = std::getenv(variable);
  return value != nullptr && *value != '\0' && std::strcmp(value, "0") != 0;
}

}  // namespace reference
