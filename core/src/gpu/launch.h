// What one launch of a kernel gets: the host fills it in, the kernel reads it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/portable.h"
#include "phalanx/phalanx.h"

namespace phx::cuda {

// Where what goes to all ranks is stored: the input's place, or where in symmetric memory their results are.
struct Spread {
  phx_team team;
  size_t offset;
  uint64_t place;  // the same on ranks where it is the same; 0: in place, or not in symmetric memory
};

// Where a rank's input is: `offset` bytes into its block of the team, or of other symmetric memory.
struct alignas(16) Where {
  uint64_t memory;  // 0: the team's; else 1 + its ordinal in the group
  uint64_t offset;
};

// For collectives on ordinary memory, whose inputs need not lie at the same place on all ranks: each rank says before
// they meet where its own is.
constexpr int kKnown = 64;
struct Inputs {
  int32_t apart;  // 0: they are all at the same offset, and nothing else here is used
  Where own;
  uint64_t end;                // 1 + the last ordinal of
  void *const *known[kKnown];  // the last ones, by their ordinals: each rank's block; NULL: not here, not any more
  size_t shown;                // in each pad, by block of threads: what it says
  char **found;                // this rank's, by block of threads and rank: where they are, once all have come
};

// One launch on one rank.
struct Launch {
  phx_team team;      // its arrays are in memory that the device reads
  size_t offset;      // of the input, into the block of every rank
  const void *in;     // this rank's own; what others do not read may lie elsewhere
  void *out;          // ordinary memory of the device; not used in place
  size_t count;       // elements, as in the public call
  size_t begin;       // of what is reduced: 0, or of reduce_scatter the own part
  size_t item;        // bytes of an element, for what only moves
  int32_t root = -1;  // of a collective, if it has one; of signals the other rank
  uint32_t channel;   // the first of as many as there are blocks
  int64_t divisor;
  double scale;
  uint64_t timeout_ns;
  uint32_t *taken;   // words as in a pad: signals that this rank has waited for
  uint32_t *failed;  // gets what a wait that failed returned: see phalanx/device.h; or disagrees()
  size_t parts;      // where in each pad the Parts are
  size_t lines;      // and the lines of the LL protocol
  uint32_t *epochs;  // of what this rank has sent by the LL protocol, by block
  Spread spread;     // of the kernels that use multicast
  Inputs inputs;
};

// What goes into Launch::failed where a rank sends something else than this one expects.
PHX_PORTABLE constexpr int32_t disagrees(int32_t group_size, int32_t group_rank) { return group_size + 1 + group_rank; }
// Or where a rank's input lies in symmetric memory that this one has freed.
PHX_PORTABLE constexpr int32_t has_freed(int32_t group_size, int32_t group_rank) {
  return 2 * group_size + 1 + group_rank;
}

// The counts of a call, in elements by group rank. They travel with the launch, as a captured one is replayed.
constexpr int kMostListed = 128;
struct Lists {
  uint64_t in[kMostListed];
  uint64_t out[kMostListed];
};

// What a block of threads tells those of the same number about the part of its input that is theirs, in elements.
struct alignas(16) Part {
  uint64_t start;
  uint64_t count;
};

// 8 bytes of data, each half beside the number of the launch that it is of: whoever sees the number has the data, and
// needs no signal. A pad has a Line for each thread of the first blocks, from each rank, twice: what is sent next must
// not overwrite what may not have been read.
struct alignas(16) Line {
  uint64_t half[2];  // data in the low bits
};
constexpr int kLineRanks = 16;  // larger groups do without
constexpr int kLineBlocks = 8;
constexpr int kLineThreads = 512;
PHX_PORTABLE constexpr size_t line_number(uint32_t epoch, uint32_t block, int group_size, int from, uint32_t thread) {
  return (((epoch & 1) * size_t{kLineBlocks} + block) * group_size + from) * kLineThreads + thread;
}

}  // namespace phx::cuda
