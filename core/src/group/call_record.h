// Which collective a rank calls, as its peers see it in shared memory and as errors and dumps name it.
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
  kRefused  // in the place of a call whose arguments were wrong; the slot says why
};

// How many times the `count` of a call its input or output holds on a rank.
enum class Parts : uint8_t { kNone, kOne, kAll, kOneOnRoot, kAllOnRoot };
// How input and output may be the same memory: not at all, both at one place, the input at this rank's part of the
// output, or the output at this rank's part of the input.
enum class InPlace : uint8_t { kNever, kSame, kOwnPart, kOwnResult };
enum class Root : uint8_t { kNone, kGives, kTakes };

// What is to be known of a collective. Everything that checks, names, records or distributes calls derives from its row
// in kCollectives.
struct CollectiveTraits {
  const char *symm_name;  // on symmetric memory; on ordinary memory without "symm_"
  Parts in = Parts::kNone, out = Parts::kNone;
  InPlace in_place = InPlace::kNever;
  Root root = Root::kNone;
  bool reduces = false;
};
inline constexpr CollectiveTraits kCollectives[] = {
    // by Kind
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

// What a rank with these numbers reads and writes in a call, in times of its `count`.
struct Extent {
  size_t in_parts, out_parts;
  size_t in_offset;  // of an input in place from the output; modulo 2^64
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

// What a rank calls. Two ranks that meet in one epoch must have equal ones.
struct CallRecord {
  uint8_t operation = 0;  // a Kind, and kSymmetric where it is on symmetric memory
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
inline Kind kind_of(const CallRecord &record) { return static_cast<Kind>(record.operation & ~kSymmetric); }

// Where a rank's input lies if it need not be copied into the slot: `offset` bytes into its block of a symmetric
// allocation, which is named by `key`, with all that the ranks must have in common to use it.
struct InputLocation {
  uint64_t key = 0;  // 0: nowhere; odd: there, and the slot is empty; even: kReads
  uint64_t offset = 0;
  bool leaves_slot_empty() const { return (key & 1) != 0; }
};
inline constexpr uint64_t kReads = 2;  // the slot has what it must, but the rank would also read from others' places

constexpr const char *name_of(Kind kind, bool symmetric = false) {
  return traits_of(kind).symm_name + (symmetric ? 0 : sizeof "symm_" - 1);
}
const char *name_of(const CallRecord &record);        // "all_reduce"
std::string describe_call(const CallRecord &record);  // "all_reduce(float32, 512, sum)"

}  // namespace phx
