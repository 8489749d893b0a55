// The used and free pieces of a pool's segments. Independent of torch, Python and threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
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
  void *take(size_t nbytes) {
    const size_t size = rounded(nbytes, kAlignment);
    const auto best = holes_.lower_bound({size, 0, 0});
    if (best == holes_.end()) return nullptr;
    const auto [hole_bytes, index, offset] = *best;
    const auto piece = pieces_.find({index, offset});
    holes_.erase(best);
    piece->second = {size, true};
    if (hole_bytes != size) {
      pieces_[{index, offset + size}] = {hole_bytes - size, false};
      holes_.insert({hole_bytes - size, index, offset + size});
    }
    Segment &segment = segments_.at(index);
    segment.used_bytes += size;
    return segment.base + offset;
  }

  // The size of the segment to add when `take` found no hole.
  size_t next_segment(size_t nbytes) const {
    // A piece that would take most of a shared segment gets a segment of its own.
    return nbytes <= shared_bytes_ / 2 ? shared_bytes_ : rounded(nbytes, kGranule);
  }

  Index add(char *base, size_t size_bytes, void *owner) {
    const Index index = next_++;
    segments_[index] = {base, size_bytes, 0, owner};
    pieces_[{index, 0}] = {size_bytes, false};
    holes_.insert({size_bytes, index, 0});
    if (size_bytes == shared_bytes_) shared_bytes_ = std::min(2 * shared_bytes_, kLargestShared);
    return index;
  }

  // Returns false if no piece begins there. `*empty`: the segment has no other piece now.
  bool put_back(Index index, const void *pointer, bool *empty) {
    Segment &segment = segments_.at(index);
    auto piece = pieces_.find({index, static_cast<size_t>(static_cast<const char *>(pointer) - segment.base)});
    if (piece == pieces_.end() || !piece->second.used) return false;
    segment.used_bytes -= piece->second.size_bytes;
    piece->second.used = false;
    const auto is_hole = [&](Pieces::iterator at) {
      return at != pieces_.end() && at->first.first == index && !at->second.used;
    };
    const auto join_next = [&](Pieces::iterator at) {
      const auto next = std::next(at);
      holes_.erase({next->second.size_bytes, index, next->first.second});
      at->second.size_bytes += next->second.size_bytes;
      pieces_.erase(next);
    };
    if (is_hole(std::next(piece))) join_next(piece);
    if (piece != pieces_.begin() && is_hole(std::prev(piece))) {
      piece = std::prev(piece);
      holes_.erase({piece->second.size_bytes, index, piece->first.second});
      join_next(piece);
    }
    holes_.insert({piece->second.size_bytes, index, piece->first.second});
    *empty = segment.used_bytes == 0;
    return true;
  }

  // Takes an empty segment out, and returns its owner.
  void *remove(Index index) {
    const auto segment = segments_.find(index);
    void *const owner = segment->second.owner;
    holes_.erase({segment->second.size_bytes, index, 0});
    pieces_.erase({index, 0});
    segments_.erase(segment);
    return owner;
  }

  std::vector<Index> empty_segments() const {
    std::vector<Index> found;
    for (const auto &[index, segment] : segments_)
      if (segment.used_bytes == 0) found.push_back(index);
    return found;
  }

  const std::map<Index, Segment> &segments() const { return segments_; }

  // Equal on ranks whose pieces lie at the same places, and whose next ones will.
  uint64_t layout() const {
    uint64_t hash = 14695981039346656037u;  // FNV-1a, 64 bits
    const auto mix = [&](uint64_t value) {
      for (int shift = 0; shift < 64; shift += 8) hash = (hash ^ ((value >> shift) & 0xff)) * 1099511628211u;
    };
    mix(next_);
    mix(shared_bytes_);
    for (const auto &[index, segment] : segments_) {
      mix(index);
      mix(segment.size_bytes);
    }
    for (const auto &[place, piece] : pieces_) {
      if (!piece.used) continue;
      mix(place.first);
      mix(place.second);
      mix(piece.size_bytes);
    }
    return hash;
  }

 private:
  static constexpr size_t kAlignment = 64;                    // c10::gAlignment
  static constexpr size_t kGranule = size_t{64} << 10;        // of a segment: a multiple of every usual page
  static constexpr size_t kLargestShared = size_t{32} << 20;  // the core touches all pages of a segment at once: 30 ms

  struct Piece {
    size_t size_bytes;
    bool used;
  };
  using Hole = std::tuple<size_t, Index, size_t>;            // size, segment, offset: in the order of fit
  using Pieces = std::map<std::pair<Index, size_t>, Piece>;  // by segment and offset; without gaps

  static size_t rounded(size_t nbytes, size_t unit) {
    // No request is that large: torch's sizes are below 2^63.
    return nbytes == 0 ? unit : (nbytes + unit - 1) / unit * unit;
  }

  std::map<Index, Segment> segments_;
  Pieces pieces_;
  std::set<Hole> holes_;
  Index next_ = 0;
  size_t shared_bytes_ = size_t{2} << 20;  // size of the next segment for small pieces
};

}  // namespace phalanx_pool
