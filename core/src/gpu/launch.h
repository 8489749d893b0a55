// The parameters of a launch: the host fills them in, and the kernel reads them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portable.h"
#include "phalanx/phalanx.h"

namespace phx::cuda {

// Where data for all ranks is stored: in place of the input, or where the results lie in symmetric memory.
struct Spread {
  phx_team team;
  size_t offset;
  uint64_t place;  // equal on ranks whose results lie at the same place; 0: in place, or not in symmetric memory
};

// Where a rank's input lies: `offset` bytes into its block of the team, or of other symmetric memory.
struct alignas(16) Where {
  uint64_t memory;  // 0: the team's; else 1 + the ordinal of the allocation in the group
  uint64_t offset;
};

// For collectives on ordinary memory, whose inputs need not lie at the same place on all ranks: each rank publishes
// before the first barrier where its own input lies.
constexpr int kKnown = 64;
struct Inputs {
  int32_t apart;  // 0: all inputs lie at the same offset, and nothing else here is used
  Where own;
  uint64_t end;                // 1 + the last ordinal
  void *const *known[kKnown];  // all ranks' blocks of the last allocations, by ordinal; NULL: none on a GPU, or freed
  size_t shown;                // offset in each pad of where the input of its rank lies, by block of threads
  char **found;                // of this rank, by block of threads and rank: the inputs, after the first barrier
};

// The parameters of one launch on one rank.
struct Launch {
  phx_team team;      // its arrays are in memory that the device reads
  size_t offset;      // of the input, into the block of every rank
  const void *in;     // this rank's own input, which may lie elsewhere if others do not read it
  void *out;          // ordinary memory of the device; not used in place
  size_t count;       // elements, as in the public call
  size_t begin;       // the first element to reduce: 0, or the beginning of this rank's part in reduce_scatter
  size_t item;        // bytes of an element, for kernels that do not reduce
  int32_t root = -1;  // of a collective with a root; for signals, the peer
  uint32_t channel;   // the channel of the first block; the next blocks use the next channels
  int64_t divisor;
  double scale;
  uint64_t timeout_ns;
  uint32_t *taken;   // words as in a pad: signals that this rank has waited for
  uint32_t *failed;  // gets the result of a wait that failed (see phalanx/device.h), or a report
  size_t parts;      // offset of the Parts in each pad
  size_t lines;      // offset of the Lines of the LL protocol in each pad
  uint32_t *epochs;  // the last epoch that this rank has sent by the LL protocol, by block
  Spread spread;     // for kernels that use multicast
  Inputs inputs;
};

// What a kernel reports about a rank in the word of failures. Its value is `report`.
enum class Report : int32_t {
  kTimedOut,       // the rank did not come in time: the results of phx_team_wait
  kDisagrees,      // it sends another number of elements than this rank expects
  kFreed,          // its input lies in symmetric memory that this rank has freed
  kSendsOther,     // it sends another message than this rank expects
  kReceivesOther,  // it expects another message than this rank sends
  kGone,           // it has left before a message was complete
};
PHX_PORTABLE constexpr int32_t report(Report what, int32_t group_size, int32_t group_rank) {
  return static_cast<int32_t>(what) * group_size + 1 + group_rank;
}

// The counts of a call, in elements by group rank. They are launch parameters, because a captured launch is replayed.
constexpr int kMostListed = 128;
struct Lists {
  uint64_t in[kMostListed];
  uint64_t out[kMostListed];
};

// What a block of threads publishes for the block of the same number on another rank: which part of its input is for
// that rank, in elements.
struct alignas(16) Part {
  uint64_t start;
  uint64_t count;
};

// A packet of the LL protocol: 8 bytes of data, each half next to the epoch of its launch. A thread that sees the epoch
// has the data, and needs no signal. A pad has two Lines for each thread of the first blocks from each rank, because
// the next launch must not overwrite a Line that may not have been read.
struct alignas(16) Line {
  uint64_t half[2];  // data in the low 32 bits, the epoch in the high ones
};
constexpr int kLineRanks = 16;  // larger groups do not use the LL protocol
constexpr int kLineBlocks = 8;
constexpr int kLineThreads = 512;
PHX_PORTABLE constexpr size_t line_number(uint32_t epoch, uint32_t block, int group_size, int from, uint32_t thread) {
  return (((epoch & 1) * size_t{kLineBlocks} + block) * group_size + from) * kLineThreads + thread;
}

}  // namespace phx::cuda
