// The record of a collective call, as peers read it in shared memory and as errors and dumps name it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace phx {

enum class Kind : uint8_t {
  kNone = 0,
  kBarrier,
  kAllReduce,
  kAllGather,
  kAllGatherV,
  kReduceScatter,
  kReduceScatterV,
  kAllToAll,
  kAllToAllV,
  kBroadcast,
  kReduce,
  kGather,
  kScatter,
  kCoalesced,
  kRefused  // in place of a call whose arguments were wrong; the slot has the error
};

// The size of a call's input or output on a rank, in multiples of the call's `count`.
enum class Parts : uint8_t { kNone, kOne, kAll, kOneOnRoot, kAllOnRoot };
// How input and output may be the same memory: never, at the same address, the input at this rank's part of the output,
// or the output at this rank's part of the input.
enum class InPlace : uint8_t { kNever, kSame, kOwnPart, kOwnResult };
enum class Root : uint8_t { kNone, kGives, kTakes };

// The properties of a collective. Code that checks, names, records or dispatches calls derives all from its row.
struct CollectiveTraits {
  const char *symm_name;  // on symmetric memory; on ordinary memory without "symm_"
  Parts in = Parts::kNone, out = Parts::kNone;
  InPlace in_place = InPlace::kNever;
  Root root = Root::kNone;
  bool reduces = false;
};
inline constexpr CollectiveTraits kCollectives[] = {
    // indexed by Kind
    {"symm_nothing"},
    {"symm_barrier"},
    {"symm_all_reduce", Parts::kOne, Parts::kOne, InPlace::kSame, Root::kNone, true},
    {"symm_all_gather", Parts::kOne, Parts::kAll, InPlace::kOwnPart},
    {"symm_all_gather_v", Parts::kOne, Parts::kAll, InPlace::kOwnPart},
    {"symm_reduce_scatter", Parts::kAll, Parts::kOne, InPlace::kOwnResult, Root::kNone, true},
    {"symm_reduce_scatter_v", Parts::kAll, Parts::kOne, InPlace::kOwnResult, Root::kNone, true},
    {"symm_all_to_all", Parts::kAll, Parts::kAll},
    {"symm_all_to_all_v", Parts::kAll, Parts::kAll},
    {"symm_broadcast", Parts::kOne, Parts::kOne, InPlace::kSame, Root::kGives},
    {"symm_reduce", Parts::kOne, Parts::kOneOnRoot, InPlace::kSame, Root::kTakes, true},
    {"symm_gather", Parts::kOne, Parts::kAllOnRoot, InPlace::kOwnPart, Root::kTakes},
    {"symm_scatter", Parts::kAllOnRoot, Parts::kOne, InPlace::kOwnResult, Root::kGives},
    {"symm_coalesced"},
    {"symm_a call that it refused"},
};
static_assert(sizeof kCollectives / sizeof kCollectives[0] == static_cast<size_t>(Kind::kRefused) + 1);
constexpr const CollectiveTraits &traits_of(Kind kind) { return kCollectives[static_cast<size_t>(kind)]; }

// How much a rank reads and writes in a call, in multiples of the call's `count`.
struct Extent {
  size_t in_parts, out_parts;
  size_t in_offset;  // of an in-place input from the output; modulo 2^64
  bool may_be_in_place;
};
constexpr size_t parts_on(Parts parts, size_t group_size, bool is_root) {
  switch (parts) {
    case Parts::kNone: return 0;
    case Parts::kOne: return 1;
    case Parts::kAll: return group_size;
    case Parts::kOneOnRoot: return is_root ? 1 : 0;
    case Parts::kAllOnRoot: return is_root ? group_size : 0;
  }
  return 0;
}
constexpr Extent extent_of(const CollectiveTraits &traits, size_t group_size, size_t group_rank, bool is_root) {
  const size_t offset = traits.in_place == InPlace::kOwnPart     ? group_rank
                        : traits.in_place == InPlace::kOwnResult ? 0 - group_rank
                                                                 : 0;
  return {parts_on(traits.in, group_size, is_root), parts_on(traits.out, group_size, is_root), offset,
          traits.in_place != InPlace::kNever};
}

// The call of a rank. The records of all ranks in an epoch must be equal.
struct CallRecord {
  uint8_t operation = 0;  // a Kind, plus kSymmetric if it is on symmetric memory
  uint8_t dtype = 0;
  uint8_t op = 0;
  uint8_t algo = 0;
  int32_t root = -1;
  uint64_t count = 0;
  uint64_t aux = 0;  // the symmetric allocation and offset, the scale's bits, a hash of counts or of coalesced calls
  bool operator==(const CallRecord &o) const {
    return operation == o.operation && dtype == o.dtype && op == o.op && algo == o.algo && root == o.root &&
           count == o.count && aux == o.aux;
  }
};
static_assert(sizeof(CallRecord) == 24);
inline constexpr uint8_t kSymmetric = 0x80;
inline constexpr uint8_t kComparesGraphs = 0xff;  // in place of `op`, of an all_gather (PHX_OPTION_COMPARES_GRAPHS)
inline Kind kind_of(const CallRecord &record) { return static_cast<Kind>(record.operation & ~kSymmetric); }

// The location of an input that need not be copied into the slot: `offset` bytes into the rank's block of a symmetric
// allocation. `key` identifies the allocation and the preconditions that all ranks must share to use it.
struct InputLocation {
  uint64_t key = 0;  // 0: none; odd: an allocation's, and the slot is empty; even: kReads
  uint64_t offset = 0;
  bool leaves_slot_empty() const { return (key & 1) != 0; }
};
inline constexpr uint64_t kReads = 2;  // the slot has its data, but this rank could also read others' inputs in place

constexpr const char *name_of(Kind kind, bool symmetric = false) {
  return traits_of(kind).symm_name + (symmetric ? 0 : sizeof "symm_" - 1);
}
const char *name_of(const CallRecord &record);        // "all_reduce"
std::string describe_call(const CallRecord &record);  // "all_reduce(float32, 512, sum)"
std::string describe_act(const CallRecord &record);   // "called all_reduce(float32, 512, sum)"

}  // namespace phx
