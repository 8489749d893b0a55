// The signal pads of a group's symmetric allocations. Each rank has segments of pads for the group, which its peers map
// once, and gives a pad of them to each allocation: so an allocation costs no descriptor and no mapping beside its
// block.
//
// A pad is private to one (allocation, group), and zero when the peers learn of it. A rank frees its part of an
// allocation whenever it likes, without a word to the others; only its owner's pad says so (PadHeader::freed). At a
// later rendezvous each rank looks at the pads of what it has freed itself, and where every rank has freed that
// allocation nobody can write to its pads any more: then its own one is free again.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fd.h"
#include "base/shared_memory.h"
#include "base/wait.h"
#include "group/control.h"
#include "phalanx/phalanx.h"

namespace phx {

// A pad: this head, one line for each channel's barrier, then the public pad.
struct alignas(kLine) PadHeader {
  SharedWord sleepers;  // ranks that sleep on words of this pad
  SharedWord met;       // at a rendezvous: whether the owner has all that it needs; see met_ok
  // How many allocations the group had made with the last one of which the owner freed its part; never goes back.
  std::atomic<uint64_t> freed;
};
struct alignas(kLine) BarrierLine {
  SharedWord epoch;  // barriers of this channel at which the owner has arrived
};

// What a rank leaves in `met` of the n-th allocation of the group. One more: it could not.
inline uint32_t met_ok(uint64_t number) { return static_cast<uint32_t>(2 * number); }

// Words of a pad from those of one writer to those of the next: whole cache lines, so that no two writers share one.
constexpr uint32_t pad_stride_of(uint32_t channels) { return (channels + 15) / 16 * 16; }

// Whole pages.
inline size_t pad_bytes_of(uint32_t channels, int group_size) {
  return round_up(sizeof(PadHeader) + channels * sizeof(BarrierLine) +
                      static_cast<size_t>(pad_stride_of(channels)) * static_cast<size_t>(group_size) * sizeof(uint32_t),
                  page_bytes());
}

class Pads {
 public:
  // Where a rank's pad is, as it tells its peers.
  struct Location {
    uint32_t segment;  // of that rank, in the order in which they were made; kOwn: of this allocation alone
    uint32_t index;    // of the pad in it
    uint32_t made;     // pads of the segment if it is a new one, whose descriptor goes along; else 0
  };
  static constexpr uint32_t kOwn = UINT32_MAX;

  // A rank's pad and what keeps it mapped.
  struct Pad {
    SharedMappingRef segment;
    char *begin = nullptr;
    PadHeader &header() const { return *reinterpret_cast<PadHeader *>(begin); }
  };

  // `pad_bytes`: whole pages.
  Pads(int group_size, int self, size_t pad_bytes) : pad_bytes_(pad_bytes), self_(self), segments_(group_size) {}

  // A pad of this rank, zero, for the group's allocation of that number. *fd is valid for a new segment.
  phx_status take(const char *operation, uint64_t number, Location *place, Pad *pad, Fd *fd);
  // Rank i's.
  phx_status find(const char *operation, int i, const Location &place, int fd, Pad *out);
  // The rendezvous went well on all ranks: the new segments stay. Otherwise this rank's pad is free again.
  void keep(const std::vector<Location> &places, const std::vector<Pad> &pads);
  void give_back(const Location &place);
  // This rank has freed its part of the allocation.
  void retire(uint64_t number, std::vector<Location> places);

 private:
  struct Retired {
    uint64_t number;
    std::vector<Location> places;
  };
  static constexpr uint32_t kInSegment = 16;

  Pad at(int i, const Location &place) const;
  void collect();

  const size_t pad_bytes_;
  const int self_;
  std::mutex mutex_;
  std::vector<std::vector<SharedMappingRef>> segments_;  // by group rank
  std::vector<Location> free_;                           // of this rank
  std::vector<Retired> retired_;                         // freed here; perhaps not by all
};

}  // namespace phx
