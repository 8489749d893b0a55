// all_reduce on ordinary memory: one-shot for what is small, chunked two-shot for the rest.
//
// One-shot: every rank copies its input into its slot and reduces everybody's slots. One barrier; each rank reads (n-1)
// x the input. Two-shot: chunk by chunk, rank p reduces part p of the chunk from all slots and writes the sum over its
// own input of that part, in its own slot, where the others fetch it. One barrier per chunk and one more: the arrival
// that offers chunk k+1 also says that the sums of chunk k are ready. A chunk fits a slot and so stays in the cache.
#include <algorithm>

#include "collectives/operation.h"
#include "group/lane.h"

namespace phx {
namespace {

// Beyond this many bytes per rank two-shot wins (two ranks; less with more ranks, as one-shot reads from each of them).
constexpr size_t kOneShotBytes = 16 << 10;

class OneShotAllReduce final : public Operation {
 public:
  OneShotAllReduce(const Buffers &buffers, const Reduction &reduction) : b_(buffers), reduction_(reduction) {}

  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    copy_bytes(lane.data(lane.group_rank(), epoch), b_.in, b_.count * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t, uint64_t epoch) override {
    const int n = lane.group_size();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch);
    reduction_.fn(b_.out, inputs, n, b_.count, n, reduction_.scale);
    return PHX_OK;
  }

 private:
  const Buffers b_;
  const Reduction reduction_;
};

constexpr size_t kPieceBytes = 8 << 10;

class TwoShotAllReduce final : public Operation {
 public:
  TwoShotAllReduce(const Lane &lane, const Buffers &buffers, const Reduction &reduction)
      : b_(buffers), reduction_(reduction) {
    const int n = lane.group_size();
    // A chunk is n parts of whole cache lines.
    const size_t most = lane.slot_bytes() / b_.item / n / (kLine / b_.item) * (kLine / b_.item) * n;
    const size_t chunks = (b_.count + most - 1) / most;
    chunk_ = std::min(most, part_elements((b_.count + chunks - 1) / chunks, b_.item, n) * n);
    part_ = chunk_ / n;
    chunks_ = static_cast<uint32_t>((b_.count + chunk_ - 1) / chunk_);
    rounds = chunks_ + 1;
  }

  // In round r: offers chunk r.
  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round >= chunks_) return;
    char *slot = lane.data(lane.group_rank(), epoch);
    const Span mine = blocking ? part(round, lane.group_rank()) : Span{0, 0};
    const Span all{0, length(round)};
    // Its own part of a blocking call is read from the input itself.
    copy_bytes(slot, input(round, 0), mine.count != 0 ? mine.begin * b_.item : all.count * b_.item);
    if (mine.count == 0) return;
    const size_t after = mine.begin + mine.count;
    copy_bytes(slot + after * b_.item, input(round, after), (all.count - after) * b_.item);
  }

  // In round r: fetches the sums of chunk r-1 and reduces the own part of chunk r.
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round > 0) fetch(lane, round - 1, epoch - 1);
    if (round < chunks_) reduce(lane, round, epoch);
    return PHX_OK;
  }

  // The sums of the chunk in `epoch` are fetched from its slots one round later.
  uint64_t done_after(uint64_t epoch) const override { return epoch - 1; }

 private:
  struct Span {
    size_t begin;  // elements into the chunk
    size_t count;
  };

  size_t length(uint32_t chunk) const { return std::min(chunk_, b_.count - chunk * chunk_); }
  Span part(uint32_t chunk, int group_rank) const {
    const size_t all = length(chunk);
    const size_t begin = std::min(all, part_ * group_rank);
    return {begin, std::min(all, begin + part_) - begin};
  }
  const char *input(uint32_t chunk, size_t element) const { return b_.in + (chunk * chunk_ + element) * b_.item; }
  char *output(uint32_t chunk, size_t element) const { return b_.out + (chunk * chunk_ + element) * b_.item; }

  void reduce(const Lane &lane, uint32_t chunk, uint64_t epoch) const {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const Span mine = part(chunk, self);
    if (mine.count == 0) return;
    // In pieces that stay in the first-level cache until they are delivered.
    const size_t piece = std::max<size_t>(kPieceBytes / b_.item, 1);
    for (size_t begin = mine.begin, end = mine.begin + mine.count; begin < end; begin += piece) {
      const size_t count = std::min(piece, end - begin);
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + begin * b_.item;
      char *sums = lane.data(self, epoch) + begin * b_.item;
      if (blocking) inputs[self] = input(chunk, begin);
      reduction_.fn(sums, inputs, n, count, n, reduction_.scale);
      deliver_bytes(output(chunk, begin), sums, count * b_.item, b_.count * b_.item);
    }
  }

  void fetch(const Lane &lane, uint32_t chunk, uint64_t epoch) const {
    for (int i = 1; i < lane.group_size(); ++i) {
      const int from = (lane.group_rank() + i) % lane.group_size();  // not all at the same rank at once
      const Span theirs = part(chunk, from);
      deliver_bytes(output(chunk, theirs.begin), lane.data(from, epoch) + theirs.begin * b_.item,
                    theirs.count * b_.item, b_.count * b_.item);
    }
  }

  const Buffers b_;
  const Reduction reduction_;
  size_t chunk_ = 0;  // elements
  size_t part_ = 0;
  uint32_t chunks_ = 0;
};

}  // namespace

std::unique_ptr<Operation> make_all_reduce(const Lane &lane, const Buffers &buffers, const Reduction &reduction,
                                           int32_t algo) {
  const size_t bytes = buffers.count * buffers.item;
  const size_t limit = algo == PHX_ALGO_ONE_SHOT   ? lane.slot_bytes()
                       : algo == PHX_ALGO_TWO_SHOT ? 0
                                                   : std::min(kOneShotBytes, lane.slot_bytes());
  if (bytes <= limit) return std::make_unique<OneShotAllReduce>(buffers, reduction);
  return std::make_unique<TwoShotAllReduce>(lane, buffers, reduction);
}

}  // namespace phx
