// The used and free pieces of a pool's segments. Independent of torch, Python and threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <tuple>
#include <utility>
#include <vector>

namespace phalanx_pool {

// Best fit over the holes of all segments; neighbouring holes become one. Where a piece lies follows from the requests
// alone, never from addresses, so ranks that ask for the same sizes in the same order get the same places.
class Heap {
 public:
  struct Segment {
    char *base = nullptr;
    size_t size_bytes = 0;
    size_t used_bytes = 0;
    void *owner = nullptr;  // belongs to the caller
  };
  using Index = uint64_t;  // number of a segment, in the order of `add`; never used again

  // A piece of at least `nbytes`, aligned as torch's are. NULL: no hole is large enough.
  void *take(size_t nbytes);
  // The size of the segment to add when `take` found no hole.
  size_t next_segment(size_t nbytes) const;
  Index add(char *base, size_t size_bytes, void *owner);
  // Returns false if no piece begins there. `*empty`: the segment has no other piece now.
  bool put_back(Index index, const void *pointer, bool *empty);
  // Takes an empty segment out, and returns its owner.
  void *remove(Index index);
  std::vector<Index> empty_segments() const;

  const std::map<Index, Segment> &segments() const { return segments_; }
  // Equal on ranks whose pieces lie at the same places, and whose next ones will.
  uint64_t layout() const;

 private:
  struct Piece {
    size_t size_bytes;
    bool used;
  };
  using Hole = std::tuple<size_t, Index, size_t>;            // size, segment, offset: in the order of fit
  using Pieces = std::map<std::pair<Index, size_t>, Piece>;  // by segment and offset; without gaps

  std::map<Index, Segment> segments_;
  Pieces pieces_;
  std::set<Hole> holes_;
  Index next_ = 0;
  size_t shared_bytes_ = size_t{2} << 20;  // size of the next segment for small pieces
};

}  // namespace phalanx_pool
