// all_reduce and reduce on ordinary memory.
//
// One-shot: every rank copies its input into its slot, and each rank that receives the result reduces the slots of all
// ranks. There is one barrier per chunk, and an all_reduce has one chunk; each receiver reads (n-1) times the input.
//
// Two-shot: in each chunk, rank p sums part p from all slots and writes the sum back into the cache lines that it has
// just read, from where their owners fetch it.
//
// The cost is moving cache lines between cores, so each line moves only twice per chunk: to the rank that sums it, and
// back. While the owner of a line fetches the sum, it leaves the chunk after the next one in the same line (see
// kernels/copy.cpp), for which two areas of the slots alternate. There is one barrier per chunk and one more: the
// arrival that says that the sums of chunk k are ready also says that chunk k+1 is in the slots. A chunk stays in the
// second-level cache.

#include "ops/areas.h"
#include "ops/bypass.h"

namespace phx {
namespace {

class OneShot final : public Operation {
 public:
  // root: the group rank that receives the result; -1: all ranks do.
  OneShot(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root, size_t chunk)
      : Operation(buffers, buffers.count * buffers.item),
        reduction_(reduction),
        root_(root),
        input_stays_(plan.input_stays),
        chunk_(chunk) {
    rounds = rounds_for(b_.count, chunk_);
    reach = std::min(b_.count, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_ || !input_stays_)
      put_bytes(lane.data(lane.group_rank(), epoch), input(round), length(round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (root_ >= 0 && lane.group_rank() != root_) return PHX_OK;
    const int n = lane.group_size();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch);
    if (input_stays_) inputs[lane.group_rank()] = input(round);  // nearer than the slot: see put_bytes
    reduction_.fn(b_.out + round * chunk_ * b_.item, inputs, n, length(round), n, reduction_.scale);
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return elements_of_round(b_.count, chunk_, round); }
  const char *input(uint32_t round) const { return b_.in + round * chunk_ * b_.item; }

  const Reduction reduction_;
  const int root_;
  const bool input_stays_;
  const size_t chunk_;  // elements
};

class TwoShot final : public ThroughAreas {
 public:
  // root: as for OneShot.
  TwoShot(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root)
      : ThroughAreas(plan, buffers, buffers.count, buffers.count, buffers.count * buffers.item, plan.lane.group_size()),
        reduction_(reduction),
        root_(root),
        input_stays_(plan.input_stays),
        bypass_(BypassUse::kTwoShot, buffers.count * buffers.item, plan.tuning.streaming_bytes,
                buffers.in != buffers.out && receives(self_)),
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
  size_t length(uint32_t chunk) const { return std::min(chunk_, b_.count - chunk * chunk_); }
  bool same_length(uint32_t a, uint32_t b) const { return b < chunks_ && length(a) == length(b); }
  // The elements of a chunk that a rank sums.
  Span part(uint32_t chunk, int group_rank) const { return clip(length(chunk), part_ * group_rank, part_); }
  const char *input(uint32_t chunk, size_t element) const { return b_.in + (chunk * chunk_ + element) * b_.item; }
  char *output(uint32_t chunk, size_t element) const { return b_.out + (chunk * chunk_ + element) * b_.item; }

  // Puts a chunk into the slot, without this rank's own part if the input stays: that part is read from the
  // input itself.
  void offer(const Lane &lane, uint32_t chunk) const {
    char *slot = area(lane, self_, chunk);
    const size_t all = length(chunk);
    const Span mine = input_stays_ ? part(chunk, self_) : Span{all, 0};
    const size_t after = mine.begin + mine.count;
    put_to_swap(slot, input(chunk, 0), mine.begin * b_.item);
    put_to_swap(slot + after * b_.item, input(chunk, after), (all - after) * b_.item);
  }

  bool receives(int group_rank) const { return root_ < 0 || group_rank == root_; }
  // Whether a rank fetches the sums of this one.
  bool fetches(int group_rank) const { return group_rank != self_ && receives(group_rank); }

  void reduce(const Lane &lane, uint32_t chunk) const {
    const Span mine = part(chunk, self_);
    // In pieces that stay in the first-level cache until they are delivered.
    const size_t piece = kPieceBytes / b_.item;
    for (size_t begin = mine.begin, end = mine.begin + mine.count; begin < end; begin += piece) {
      const size_t count = std::min(piece, end - begin);
      const auto at = [&](int i) { return area(lane, i, chunk) + begin * b_.item; };
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n_; ++i) inputs[i] = at(i);
      if (input_stays_) inputs[self_] = input(chunk, begin);
      int first = 0;  // the first peer that receives the sum; without one (this rank is the root) its own slot is used
      while (first < n_ && !fetches(first)) ++first;
      char *sums = at(first < n_ ? first : self_);
      reduction_.fn(sums, inputs, n_, count, n_, reduction_.scale);
      for (int i = first + 1; i < n_; ++i)
        if (fetches(i)) copy_bytes(at(i), sums, count * b_.item);
      if (receives(self_)) deliver_bytes(output(chunk, begin), sums, count * b_.item, bypass_.copy());
    }
  }

  void fetch(const Lane &lane, uint32_t chunk) const {
    const Span mine = part(chunk, self_);
    const size_t after = mine.begin + mine.count;
    const bool more = same_length(chunk, chunk + 2);
    if (!receives(self_)) {
      if (more) offer(lane, chunk + 2);
      return;
    }
    exchange(lane, chunk, 0, mine.begin, more);
    if (more && !input_stays_)
      copy_bytes(area(lane, self_, chunk) + mine.begin * b_.item, input(chunk + 2, mine.begin), mine.count * b_.item);
    exchange(lane, chunk, after, length(chunk) - after, more);
  }

  void exchange(const Lane &lane, uint32_t chunk, size_t begin, size_t count, bool more) const {
    if (count == 0) return;
    char *const to = output(chunk, begin), *const slot = area(lane, self_, chunk) + begin * b_.item;
    const char *const next = more ? input(chunk + 2, begin) : nullptr;
    // Few sums are taken in one pass that owns the slot's lines afterwards: the next call fills them sooner.
    if (!more && !bypass_ && count * b_.item < kernels::kSmallCopyBytes)
      kernels::exchange_lines(to, slot, next, count * b_.item);
    else
      kernels::exchange(to, slot, next, count * b_.item, bypass_.copy());
  }

  const Reduction reduction_;
  const int root_;
  const bool input_stays_;
  Bypass bypass_;
  const size_t chunk_;  // elements
};

}  // namespace

int32_t choose_all_reduce(const Plan &plan, size_t bytes, int32_t algo) {
  const size_t limit = algo == PHX_ALGO_ONE_SHOT ? plan.lane.slot_bytes()
                       : algo == PHX_ALGO_TWO_SHOT
                           ? 0
                           : std::min<size_t>(plan.tuning.one_shot_bytes, plan.lane.slot_bytes());
  return bytes <= limit ? PHX_ALGO_ONE_SHOT : PHX_ALGO_TWO_SHOT;
}

OperationPtr make_all_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int32_t algo) {
  if (choose_all_reduce(plan, buffers.count * buffers.item, algo) == PHX_ALGO_ONE_SHOT)
    return plan.make<OneShot>(plan, buffers, reduction, -1, buffers.count);
  return plan.make<TwoShot>(plan, buffers, reduction, -1);
}

OperationPtr make_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root) {
  // In a large group the root would read all inputs while the others wait; there all ranks share the work.
  if (plan.lane.group_size() >= 4 && buffers.count * buffers.item > plan.tuning.one_shot_bytes)
    return plan.make<TwoShot>(plan, buffers, reduction, root);
  return plan.make<OneShot>(plan, buffers, reduction, root, plan.chunk_elements(buffers.item));
}

}  // namespace phx
