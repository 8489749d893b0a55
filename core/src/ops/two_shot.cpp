// Two-shot reductions. In each chunk, rank p sums part p from all slots and writes the sum back into the cache lines
// that it has just read, from where their owners fetch it.
//
// The cost is moving cache lines between cores, so each line moves only twice per chunk: to the rank that sums it, and
// back. While the owner of a line fetches the sum, it leaves the chunk after the next one in the same line (see
// kernels/copy.cpp), for which two areas of the slots alternate. There is one barrier per chunk and one more: the
// arrival that says that the sums of chunk k are ready also says that chunk k+1 is in the slots. A chunk stays in the
// second-level cache.
#include "ops/areas.h"

#include <algorithm>

#include "group/lane.h"
#include "ops/bypass.h"

namespace phx {
namespace {

class TwoShot final : public ThroughAreas {
 public:
  TwoShot(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root)
      : ThroughAreas(plan, buffers, buffers.count, buffers.count * buffers.item, plan.lane.group_size()),
        reduction_(reduction),
        root_(root),
        blocking_(plan.blocking),
        bypass_(BypassUse::kTwoShot, buffers.count * buffers.item, plan.tuning.streaming_bytes,
                buffers.in != buffers.out && (root < 0 || root == plan.lane.group_rank())),
        chunk_(part_ * n_) {}

  // In round r: offers chunk r, unless `fetch` of an earlier round has done so.
  void put(const Lane &lane, uint32_t round, uint64_t) override {
    const Bypass::Clock clock(bypass_);
    if (round < chunks_ && (round < 2 || !same_length(round - 2, round))) offer(lane, round);
  }

  // In round r: fetches the sums of chunk r-1, leaving chunk r+1 in their place, and sums this rank's part of chunk r.
  phx_status take(const Lane &lane, uint32_t round, uint64_t) override {
    const Bypass::Clock clock(bypass_);
    if (round > 0) fetch(lane, round - 1);
    if (round < chunks_) reduce(lane, round);
    return PHX_OK;
  }

  bool takes_input_at_once() const override { return chunks_ == 1; }

 private:
  struct Span {
    size_t begin;  // elements into the chunk
    size_t count;
  };

  size_t length(uint32_t chunk) const { return std::min(chunk_, b_.count - chunk * chunk_); }
  bool same_length(uint32_t a, uint32_t b) const { return b < chunks_ && length(a) == length(b); }
  Span part(uint32_t chunk, int group_rank) const {
    const size_t all = length(chunk);
    const size_t begin = std::min(all, part_ * group_rank);
    return {begin, std::min(all, begin + part_) - begin};
  }
  const char *input(uint32_t chunk, size_t element) const { return b_.in + (chunk * chunk_ + element) * b_.item; }
  char *output(uint32_t chunk, size_t element) const { return b_.out + (chunk * chunk_ + element) * b_.item; }

  // Puts a chunk into the slot, without this rank's own part if the call blocks: that part is read from the input
  // itself, which cannot change before.
  void offer(const Lane &lane, uint32_t chunk) const {
    char *slot = area(lane, lane.group_rank(), chunk);
    const size_t all = length(chunk);
    const Span mine = blocking_ ? part(chunk, lane.group_rank()) : Span{all, 0};
    const size_t after = mine.begin + mine.count;
    put_bytes(slot, input(chunk, 0), mine.begin * b_.item);
    put_bytes(slot + after * b_.item, input(chunk, after), (all - after) * b_.item);
  }

  bool wants(const Lane &lane, int group_rank) const {
    return group_rank != lane.group_rank() && (root_ < 0 || group_rank == root_);
  }

  void reduce(const Lane &lane, uint32_t chunk) const {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const Span mine = part(chunk, self);
    const bool keep = root_ < 0 || root_ == self;
    // In pieces that stay in the first-level cache until they are delivered.
    const size_t piece = kPieceBytes / b_.item;
    for (size_t begin = mine.begin, end = mine.begin + mine.count; begin < end; begin += piece) {
      const size_t count = std::min(piece, end - begin);
      const auto at = [&](int i) { return area(lane, i, chunk) + begin * b_.item; };
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n; ++i) inputs[i] = at(i);
      if (blocking_) inputs[self] = input(chunk, begin);
      int first = 0;  // the first peer that receives the sum; without one (this rank is the root) its own slot is used
      while (first < n && !wants(lane, first)) ++first;
      char *sums = at(first < n ? first : self);
      reduction_.fn(sums, inputs, n, count, n, reduction_.scale);
      for (int i = first + 1; i < n; ++i)
        if (wants(lane, i)) copy_bytes(at(i), sums, count * b_.item);
      if (keep) deliver_bytes(output(chunk, begin), sums, count * b_.item, bypass_.copy());
    }
  }

  void fetch(const Lane &lane, uint32_t chunk) const {
    const Span mine = part(chunk, lane.group_rank());
    const size_t after = mine.begin + mine.count;
    const bool more = same_length(chunk, chunk + 2);
    if (root_ >= 0 && root_ != lane.group_rank()) {  // this rank receives no sum
      if (more) offer(lane, chunk + 2);
      return;
    }
    exchange(lane, chunk, 0, mine.begin, more);
    if (more && !blocking_)
      copy_bytes(area(lane, lane.group_rank(), chunk) + mine.begin * b_.item, input(chunk + 2, mine.begin),
                 mine.count * b_.item);
    exchange(lane, chunk, after, length(chunk) - after, more);
  }

  void exchange(const Lane &lane, uint32_t chunk, size_t begin, size_t count, bool more) const {
    if (count == 0) return;
    kernels::exchange(output(chunk, begin), area(lane, lane.group_rank(), chunk) + begin * b_.item,
                      more ? input(chunk + 2, begin) : nullptr, count * b_.item, bypass_.copy());
  }

  const Reduction reduction_;
  const int root_;
  const bool blocking_;
  Bypass bypass_;
  const size_t chunk_;  // elements
};

}  // namespace

OperationPtr make_two_shot(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root) {
  return std::make_unique<TwoShot>(plan, buffers, reduction, root);
}

}  // namespace phx
