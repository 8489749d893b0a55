// The signal pads of a group's symmetric allocations. Each rank has segments of pads for the group, which its peers map
// once, and assigns one of these pads to each allocation. So an allocation needs only the descriptor and mapping of its
// block.
//
// A pad belongs to one allocation of one group, and is zero when the peers learn of it. A rank may free its part of an
// allocation at any time. It sends no message, but notes it in its pad (PadHeader::freed). At a later rendezvous each
// rank reads the pads of the allocations that it has freed. When every rank has freed an allocation, no rank can write
// to its pads any more, and each rank may use its own pad again.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "base/shared_memory.h"
#include "base/wait.h"
#include "group/control.h"

namespace phx {

// A pad consists of this header, one cache line for each channel's barrier, and the public pad.
struct alignas(kLine) PadHeader {
  SharedWord sleepers;  // ranks that sleep on words of this pad
  SharedWord met;       // whether the owner's part of the rendezvous succeeded; see met_ok
  // The number of the last allocation with this pad of which the owner freed its part. It never decreases.
  std::atomic<uint64_t> freed;
};
struct alignas(kLine) BarrierLine {
  SharedWord epoch;  // how many barriers of this channel the owner has arrived at
};

// The value of `met` after the owner's part of the rendezvous of allocation `number` succeeded. It is 1 less before,
// and 1 more if that part failed.
inline uint32_t met_ok(uint64_t number) { return static_cast<uint32_t>(2 * number); }

// Words between the signals of one writer and those of the next: whole cache lines, so that no two writers share one.
constexpr uint32_t pad_stride_of(uint32_t channels) { return (channels + 15) / 16 * 16; }

// The size of a pad: whole pages.
inline size_t pad_bytes_of(uint32_t channels, int group_size) {
  return round_up(sizeof(PadHeader) + channels * sizeof(BarrierLine) +
                      static_cast<size_t>(pad_stride_of(channels)) * static_cast<size_t>(group_size) * sizeof(uint32_t),
                  page_bytes());
}

class Pads {
 public:
  // The location of a rank's pad, as sent to its peers.
  struct Location {
    uint32_t segment;  // the rank's segments in order of creation
    uint32_t index;    // of the pad in the segment
    uint32_t made;     // pads in the segment if it is new, so that its descriptor is sent too; else 0
  };

  // A rank's pad and the reference that keeps it mapped.
  struct Pad {
    Location place;
    SharedMappingRef segment;
    char *begin = nullptr;
    PadHeader &header() const { return *reinterpret_cast<PadHeader *>(begin); }
  };

  // `pad_bytes`: see pad_bytes_of.
  Pads(int group_size, int self, size_t pad_bytes) : pad_bytes_(pad_bytes), self_(self), segments_(group_size) {}

  // Takes a zeroed pad of this rank for allocation `number` of the group. *fd becomes valid if its segment is new.
  phx_status take(const char *operation, uint64_t number, Pad *pad, Fd *fd);
  // Finds the pad of rank i, and maps its segment if that is new.
  phx_status find(const char *operation, int i, const Location &place, int fd, Pad *out);
  // After a rendezvous that succeeded on all ranks, `keep` keeps new segments; otherwise `give_back` frees the pad.
  void keep(const std::vector<Pad> &pads);
  void give_back(const Location &place);
  // To be called when this rank has freed its part of the allocation.
  void retire(uint64_t number, std::vector<Pad> pads);

 private:
  struct Retired {
    uint64_t number;
    std::vector<Pad> pads;
  };
  static constexpr uint32_t kInSegment = 16;

  Pad at(int i, const Location &place) const;
  void collect();

  const size_t pad_bytes_;
  const int self_;
  std::mutex mutex_;
  std::vector<std::vector<SharedMappingRef>> segments_;  // by group rank
  std::vector<Location> free_;                           // of this rank
  std::vector<Retired> retired_;                         // freed by this rank, perhaps not yet by all
};

}  // namespace phx
