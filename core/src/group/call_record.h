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
  kSymmAllReduce,
  kSymmAllGather,
  kSymmAllGatherV,
  kSymmReduceScatter,
  kSymmReduceScatterV,
  kSymmAllToAll,
  kSymmAllToAllV,
  kSymmBroadcast,
  kSymmReduce,
  kSymmGather,
  kSymmScatter,
  kRefused  // in the place of a call whose arguments were wrong; the slot says why
};

// What a rank calls. Two ranks that meet in one epoch must have equal ones.
struct CallRecord {
  uint8_t operation = 0;  // a Kind
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

// Where a rank's input lies if it need not be copied into the slot: `offset` bytes into its block of a symmetric
// allocation, which is named by `key`, with all that the ranks must have in common to use it.
struct Place {
  uint64_t key = 0;  // 0: nowhere; odd: there, and the slot is empty; even: kReads
  uint64_t offset = 0;
  bool leaves_slot_empty() const { return (key & 1) != 0; }
};
inline constexpr uint64_t kReads = 2;  // the slot has what it must, but the rank would also read from others' places

const char *kind_name(Kind kind);                     // the public name: "all_reduce"
std::string describe_call(const CallRecord &record);  // "all_reduce(float32, 512, sum)"

}  // namespace phx
