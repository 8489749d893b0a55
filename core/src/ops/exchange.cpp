// all_to_all, reduce_scatter, and all_gather of two ranks, for large inputs.
//
// Every pair of ranks swaps blocks through cache lines that both write. Rank i puts the first half of its chunk for j
// into its own slot. Rank j takes it and leaves the second half of its chunk for i in the same lines. Rank i takes that
// and leaves the first half of the chunk after the next one. So a line is fetched once for every half that it carries,
// and never only to gain the right to write it (see kernels/exchange.cpp). The other halves pass through the slot of j
// in the same way at the same time. As in two_shot.cpp, there is one barrier more than chunks, and two areas alternate.
#include "ops/areas.h"

#include <algorithm>

#include "group/lane.h"

namespace phx {
namespace {

class Exchange : public ThroughAreas {
 public:
  // in_stride, out_stride: elements from one rank's block to the next; 0 if all ranks share one block.
  Exchange(const Plan &plan, const Buffers &buffers, size_t in_bytes, size_t in_stride, size_t out_stride)
      : ThroughAreas(plan, buffers, in_bytes, 2), in_stride_(in_stride), out_stride_(out_stride) {}

  void put(const Lane &lane, uint32_t round, uint64_t) override {
    if (round >= std::min<uint32_t>(chunks_, 2)) return;  // `swap` of an earlier round has left this chunk
    for (int peer = 0; peer < n_; ++peer)
      if (peer != self_) leave(place(lane, round, true, peer), input(peer, first(round)), first(round));
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t) override {
    if (round == 0) keep_own();
    if (round > 0) swap_own(lane, round - 1);
    if (round < chunks_) swap_theirs(lane, round);
    return PHX_OK;
  }

  bool takes_input_at_once() const override { return false; }

 protected:
  struct Span {
    size_t begin;  // elements into a block
    size_t count;
  };

  // Copies the block that this rank has for itself.
  virtual void keep_own() = 0;
  // Takes `span` of the blocks of the peers, and leaves `next` of this rank's blocks in its place.
  virtual void swap(const Lane &lane, uint32_t area, bool in_own_slot, Span span, Span next) = 0;

  // The lines that are shared with `peer`, in this rank's slot or in the peer's.
  char *place(const Lane &lane, uint32_t chunk, bool in_own_slot, int peer) const {
    return in_own_slot ? area(lane, self_, chunk, peer) : area(lane, peer, chunk, self_);
  }
  const char *input(int peer, Span span) const { return b_.in + (peer * in_stride_ + span.begin) * b_.item; }
  char *output(int peer, Span span) const { return b_.out + (peer * out_stride_ + span.begin) * b_.item; }
  void leave(char *at, const char *from, Span span) const { put_bytes(at, from, span.count * b_.item); }

 private:
  Span clip(size_t begin) const {
    const size_t from = std::min(begin, b_.count);
    return {from, std::min(part_, b_.count - from)};
  }
  Span first(uint32_t chunk) const { return chunk < chunks_ ? clip(2 * part_ * chunk) : Span{b_.count, 0}; }
  Span second(uint32_t chunk) const { return clip(2 * part_ * chunk + part_); }

  void swap_own(const Lane &lane, uint32_t chunk) { swap(lane, chunk, true, second(chunk), first(chunk + 2)); }
  void swap_theirs(const Lane &lane, uint32_t chunk) { swap(lane, chunk, false, first(chunk), second(chunk)); }

  const size_t in_stride_, out_stride_;
};

// all_to_all, and all_gather of two ranks.
class ExchangeCopy final : public Exchange {
 public:
  ExchangeCopy(const Plan &plan, const Buffers &buffers, size_t in_bytes, size_t in_stride)
      : Exchange(plan, buffers, in_bytes, in_stride, buffers.count),
        streaming_(buffers.count * buffers.item * plan.lane.group_size() >= plan.tuning.streaming_bytes) {}

 private:
  void keep_own() override {
    const Span all{0, b_.count};
    deliver_bytes(output(self_, all), input(self_, all), b_.count * b_.item, streaming_);
  }

  void swap(const Lane &lane, uint32_t area, bool in_own_slot, Span span, Span next) override {
    const size_t both = std::min(span.count, next.count);
    for (int i = 1; i < n_; ++i) {
      const int peer = (self_ + i) % n_;
      char *at = place(lane, area, in_own_slot, peer);
      kernels::exchange(output(peer, span), at, input(peer, next), both * b_.item, streaming_);
      const size_t rest = both * b_.item;  // where the rest of the longer span begins
      if (span.count > both)
        kernels::exchange(output(peer, span) + rest, at + rest, nullptr, (span.count - both) * b_.item, streaming_);
      if (next.count > both) copy_bytes(at + rest, input(peer, next) + rest, (next.count - both) * b_.item);
    }
  }

  const bool streaming_;
};

class ExchangeReduce final : public Exchange {
 public:
  ExchangeReduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction)
      : Exchange(plan, buffers, buffers.count * buffers.item * plan.lane.group_size(), buffers.count, 0),
        streaming_(buffers.count * buffers.item * plan.lane.group_size() >= plan.tuning.streaming_bytes),
        reduce_(streaming_ ? reduction.streaming : reduction.fn),
        scale_(reduction.scale),
        piece_bytes_(streaming_ ? kPieceBytes : kPieceBytes / n_) {}

 private:
  void keep_own() override {}

  void swap(const Lane &lane, uint32_t area, bool in_own_slot, Span span, Span next) override {
    // In pieces, so that the lines read for the sum are still in the first-level cache when they are overwritten.
    const size_t piece = std::max<size_t>(elements_in(piece_bytes_, b_.item), kLine / b_.item);
    for (size_t at = 0; at < std::max(span.count, next.count); at += piece) {
      const size_t taken = at < span.count ? std::min(piece, span.count - at) : 0;
      const size_t left = at < next.count ? std::min(piece, next.count - at) : 0;
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n_; ++i) inputs[i] = place(lane, area, in_own_slot, i) + at * b_.item;
      inputs[self_] = input(self_, span) + at * b_.item;
      if (taken != 0) reduce_(output(0, span) + at * b_.item, inputs, n_, taken, n_, scale_);
      for (int peer = 0; peer < n_; ++peer)
        if (peer != self_ && left != 0)
          copy_bytes(place(lane, area, in_own_slot, peer) + at * b_.item, input(peer, next) + at * b_.item,
                     left * b_.item);
    }
  }

  const bool streaming_;
  const kernels::ReduceFn reduce_;
  const double scale_;
  const size_t piece_bytes_;
};

}  // namespace

bool exchange_pays(const Plan &plan, size_t bytes) {
  // If each rank has its own core, 4 KiB blocks of two ranks take 0.36 us without an exchange and 0.41 us with it.
  const size_t least = plan.tuning.one_shot_bytes * (plan.lane.ranks_share_cores() ? 1 : 2);
  return plan.lane.group_size() > 1 && bytes > least;
}

OperationPtr make_exchange(const Plan &plan, const Buffers &buffers) {
  return std::make_unique<ExchangeCopy>(plan, buffers, buffers.count * buffers.item * plan.lane.group_size(),
                                        buffers.count);
}

OperationPtr make_exchange_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction) {
  return std::make_unique<ExchangeReduce>(plan, buffers, reduction);
}

OperationPtr make_exchange_of_two(const Plan &plan, const Buffers &buffers) {
  return std::make_unique<ExchangeCopy>(plan, buffers, buffers.count * buffers.item, 0);
}

}  // namespace phx
