// A collective as a sequence of rounds. In each, every rank puts something into its slot, all arrive, and every rank
// takes from everybody's slots. The engine does the waiting; operations only move and reduce data.
#pragma once

#include <cstring>
#include <memory>
#include <string>

#include "group/control.h"
#include "kernels/kernels.h"
#include "phalanx/phalanx.h"

namespace phx {

class Lane;
class Symm;

enum class Kind : uint8_t {
  kNone = 0,
  kBarrier,
  kAllReduce,
  kAllGather,
  kReduceScatter,
  kAllToAll,
  kAllToAllV,
  kBroadcast,
  kSymmAllReduce,
  kSymmAllGather,
  kSymmReduceScatter,
  kSymmAllToAll,
  kSymmBroadcast
};
const char *kind_name(Kind kind);                     // the public name: "all_reduce"
std::string describe_call(const CallRecord &record);  // "all_reduce(float32, 512, sum)"

class Operation {
 public:
  virtual ~Operation() = default;
  // Fills this rank's slot of `epoch` (that of `round`).
  virtual void put(const Lane &lane, uint32_t round, uint64_t epoch) = 0;
  // Everybody has arrived at `epoch`. May change `rounds`, alike on all ranks. An error must be one that every rank
  // finds.
  virtual phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) = 0;
  // Up to which epoch this rank reads no slot any more once it has taken `epoch` of a round that is not the last.
  virtual uint64_t done_after(uint64_t epoch) const { return epoch; }

  CallRecord record;
  uint32_t rounds = 1;
  // The caller waits inside the call, so its input stays valid and need not be copied as a whole.
  bool blocking = true;
  std::shared_ptr<Symm> symm;  // kept for operations on symmetric memory

  // Of the engine.
  uint64_t sequence = 0;
  uint64_t first_epoch = 0;
  uint32_t published = 0;
  uint32_t taken = 0;
};

// ---- arguments that several operations share

struct Buffers {
  const char *in = nullptr;
  char *out = nullptr;
  size_t count = 0;  // elements, as in the public call
  size_t item = 0;   // bytes of one
};

inline constexpr int kMaxGroupSize = 1024;  // ranks of one host; bounds arrays on the stack

inline constexpr size_t kWideBytes = size_t{32} << 10;

inline void copy_bytes(void *to, const void *from, size_t size) {
  if (size == 0 || to == from) return;  // memcpy with NULL is undefined even for nothing
  if (size >= kWideBytes)
    kernels::copy_wide(to, from, size);
  else
    std::memcpy(to, from, size);
}

// Results from this size on leave the second-level cache before anybody reads them.
inline constexpr size_t kStreamingBytes = size_t{4} << 20;

// Delivers part of a result whose whole has `total` bytes.
inline void deliver_bytes(void *to, const void *from, size_t size, size_t total) {
  if (total >= kStreamingBytes && to != from)
    kernels::copy_streaming(to, from, size);
  else
    copy_bytes(to, from, size);
}

// Elements per part when `count` elements are dealt to `parts`: whole cache lines, so that no line has two owners.
size_t part_elements(size_t count, size_t item, int parts);

struct Reduction {
  kernels::ReduceFn fn = nullptr;
  double scale = 1.0;
};

std::unique_ptr<Operation> make_barrier();
std::unique_ptr<Operation> make_all_reduce(const Lane &lane, const Buffers &buffers, const Reduction &reduction,
                                           int32_t algo);
std::unique_ptr<Operation> make_all_gather(const Lane &lane, const Buffers &buffers);
std::unique_ptr<Operation> make_reduce_scatter(const Lane &lane, const Buffers &buffers, const Reduction &reduction);
std::unique_ptr<Operation> make_all_to_all(const Lane &lane, const Buffers &buffers);
std::unique_ptr<Operation> make_all_to_all_v(const Lane &lane, const Buffers &buffers, const size_t *in_counts,
                                             const size_t *out_counts, bool keep_input);
std::unique_ptr<Operation> make_broadcast(const Lane &lane, const Buffers &buffers, int root);

// On symmetric memory: `offset` bytes into every rank's block. buffers.in is this rank's own.
std::unique_ptr<Operation> make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                                     const Reduction &reduction, int root);

}  // namespace phx
