// all_to_all(_v), reduce_scatter(_v) and scatter on ordinary memory, in their plain form: a slot holds one segment for
// each rank. Chunks move as in gather.cpp.

#include "base/error.h"
#include "ops/areas.h"

namespace phx {
namespace {

// The input has a block for each rank, and a slot has a segment for each block; all segments must fit into the slot.
class Segmented : public Operation {
 public:
  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to)
      if (to != lane.group_rank() || !reads_own_)
        in_.put_to(slot + place(to), to, round * segment_, length(in_.count(to), round));
  }
  void keep_input(const Keeping &keeping) override { in_.keep(keeping, &kept_); }

 protected:
  // `most`: the elements of the largest segment.
  Segmented(const Plan &plan, const Buffers &buffers, size_t most = SIZE_MAX)
      : Operation(buffers, 0),
        in_(input_blocks(buffers, plan.lane.group_size())),
        reads_own_(plan.input_stays),
        segment_(std::max<size_t>(std::min({elements_in(plan.chunk_bytes() / plan.lane.group_size(), b_.item),
                                            part_elements(std::max<size_t>(in_.largest(), 1), b_.item, 1), most}),
                                  kLine / b_.item)) {
    rounds = rounds_for(in_.largest(), segment_);
    reach = place(plan.lane.group_size());
  }

  size_t length(size_t count, uint32_t round) const { return elements_of_round(count, segment_, round); }
  size_t place(int group_rank) const { return group_rank * segment_ * b_.item; }  // bytes into a slot

  Blocks in_;
  bool reads_own_;        // this rank's own block is read from the input itself, and is not in the slot
  const size_t segment_;  // elements
};

class AllToAll : public Segmented {
 public:
  AllToAll(const Plan &plan, const Buffers &buffers)
      : Segmented(plan, buffers), out_(output_blocks(buffers, plan.lane.group_size())) {
    reads_own_ = true;
  }

  void keep_own(const Lane &lane, uint32_t round) override {
    const int self = lane.group_rank();
    out_.copy_from(in_, self, round * segment_, length(out_.count(self), round));
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int n = lane.group_size(), self = lane.group_rank();
    const size_t first = round * segment_, in_slot = place(self);
    for (int i = 1; i < n; ++i) {
      const int from = self + i < n ? self + i : self + i - n;  // so that ranks do not all read from the same one
      out_.fill(from, first, length(out_.count(from), round), lane.data(from, epoch) + in_slot);
    }
    return PHX_OK;
  }

 protected:
  Blocks out_;
};

// Round 0 publishes the counts and, if none is large, the blocks with them. Otherwise the blocks follow: then all
// ranks know how many rounds there are, and whether there is an error.
//
// A rank whose counts are all equal says so in the header of its slot (Operation::even), and does what an all_to_all
// of that count does. If all ranks turn out to have the same count, the call is that all_to_all.
class AllToAllV final : public AllToAll {
 public:
  AllToAllV(Group &group, const Plan &plan, const Buffers &buffers)
      : AllToAll(plan, buffers),
        plan_(plan),
        rounds_evenly_(rounds),
        counts_(group, "all_to_all_v", in_, out_),
        beside_(segment_beside(plan, counts_.bytes(), buffers.item)) {
    rounds = 2;  // at least; round 0 sets it, and later operations must not be published before that
    reach = kWholeSlot;
    const size_t count = in_.largest();
    if (count == 0 || !in_.all_have(count) || !out_.all_have(count)) return;
    even = count + 1;
    if (!exchange_pays(plan, count * buffers.item)) return;
    Buffers evenly = buffers;
    evenly.count = count;
    exchange_ = make_all_to_all(plan, evenly);
  }

  bool takes_input_at_once() const override { return false; }
  void keep_input(const Keeping &keeping) override {
    AllToAll::keep_input(keeping);
    if (exchange_ != nullptr) exchange_->keep_input(keeping);
  }
  bool exclusive() const override {
    const Operation *const inner = is_even_ ? exchange_.get() : rest_.get();
    return inner != nullptr && inner->exclusive();
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0 ? even != 0 : is_even_) return put_evenly(lane, round, epoch);
    if (round != 0) return rest_->put(lane, round - 1, epoch);
    counts_.put(lane, epoch);
    if (std::max(in_.largest(), out_.largest()) > beside_) return;
    char *const slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to) in_.put_to(slot + place_beside(to), to, 0, in_.count(to));
  }

  void keep_own(const Lane &lane, uint32_t round) override {
    if (round == 0 ? even == 0 : !is_even_) {
      if (round != 0) rest_->keep_own(lane, round - 1);
    } else if (exchange_ != nullptr) {
      exchange_->keep_own(lane, round);
    } else {
      AllToAll::keep_own(lane, round);
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) {
      PHX_TRY(compare(lane, epoch));
      if (!is_even_) return PHX_OK;
    }
    if (!is_even_) return rest_->take(lane, round - 1, epoch);
    rounds = exchange_ != nullptr ? exchange_->rounds : rounds_evenly_;
    return exchange_ != nullptr ? exchange_->take(lane, round, epoch) : AllToAll::take(lane, round, epoch);
  }

 private:
  // Elements of a segment for each rank, next to the counts in a slot. Larger blocks are exchanged.
  static size_t segment_beside(const Plan &plan, size_t counts_bytes, size_t item) {
    const size_t room = (plan.lane.slot_bytes() - counts_bytes) / plan.lane.group_size();
    return elements_in(std::min<size_t>(room, plan.tuning.one_shot_bytes), item);
  }
  size_t place_beside(int group_rank) const { return counts_.bytes() + group_rank * beside_ * b_.item; }

  void put_evenly(const Lane &lane, uint32_t round, uint64_t epoch) {
    if (exchange_ == nullptr) return AllToAll::put(lane, round, epoch);
    if (round == 0) exchange_->first_epoch = epoch;
    exchange_->put(lane, round, epoch);
  }

  // Finds out what all ranks send, and takes the blocks of this round if it has them.
  phx_status compare(const Lane &lane, uint64_t epoch) {
    const int n = lane.group_size(), self = lane.group_rank();
    uint64_t evens[kMaxGroupSize];
    bool all_even = true, any_even = false;
    for (int i = 0; i < n; ++i) {
      evens[i] = i == self ? even : lane.even(i, epoch);
      all_even = all_even && evens[i] == even;
      any_even = any_even || evens[i] != 0;
    }
    is_even_ = all_even && even != 0;
    if (is_even_) return PHX_OK;
    PHX_TRY(counts_.read(lane, epoch, nullptr, evens));
    const size_t most = counts_.most_sent();
    rounds = 1;
    if (any_even || most > beside_) {
      if (most / (2 * largest_part(plan_, b_.item, SIZE_MAX)) >= UINT32_MAX - 1)
        return fail(PHX_ERR_MISMATCH, "all_to_all_v", "a count of %zu is more than memory can hold", most);
      rest_ = make_exchange(plan_, b_, most, std::move(in_), std::move(out_));
      rest_->first_epoch = first_epoch + 1;
      rounds = 1 + rest_->rounds;
      return PHX_OK;
    }
    for (int i = 0; i < n; ++i) {
      const int from = (self + i) % n;
      out_.fill(from, 0, out_.count(from), lane.data(from, epoch) + place_beside(self));
    }
    return PHX_OK;
  }

  const Plan plan_;
  const uint32_t rounds_evenly_;
  CountMatrix counts_;
  const size_t beside_;    // elements of a segment
  OperationPtr exchange_;  // if the counts of this rank are all equal, and so large
  bool is_even_ = false;   // those of all ranks are equal
  OperationPtr rest_;      // it has in_ and out_ then
};

class ReduceScatter final : public Segmented {
 public:
  ReduceScatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction)
      : Segmented(plan, buffers), reduction_(reduction) {
    reads_own_ = reads_own_ && in_.dense(plan.lane.group_rank(), 0) != nullptr;
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const size_t count = length(in_.count(self), round);
    if (count == 0) return PHX_OK;
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + place(self);
    if (reads_own_) inputs[self] = in_.dense(self, round * segment_);
    reduction_.fn(b_.out + round * segment_ * b_.item, inputs, n, count, n, reduction_.scale);
    return PHX_OK;
  }

 private:
  const Reduction reduction_;
};

class Scatter final : public Segmented {
 public:
  Scatter(const Plan &plan, const Buffers &buffers, int root)
      : Segmented(plan, buffers, plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
        root_(root),
        is_root_(plan.lane.group_rank() == root) {}

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (!is_root_) return;
    for (int to = 0; to < lane.group_size(); ++to) {
      char *const slot = lane.data(root_, epoch) + place(to);
      if (to != root_)
        in_.each(to, round * segment_, length(in_.count(to), round),
                 [&](const char *from, size_t done, size_t bytes) { put_one_way(slot + done, from, bytes); });
    }
  }

  void keep_own(const Lane &, uint32_t round) override {
    if (is_root_) in_.copy_to(output(round), root_, round * segment_, length(in_.count(root_), round));
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    if (!is_root_)
      copy_bytes(output(round), lane.data(root_, epoch) + place(self), length(in_.count(self), round) * b_.item);
    return PHX_OK;
  }
  void keep_input(const Keeping &keeping) override {
    if (is_root_) Segmented::keep_input(keeping);
  }

 private:
  char *output(uint32_t round) const { return b_.out + round * segment_ * b_.item; }

  const int root_;
  const bool is_root_;
};

}  // namespace

OperationPtr make_all_to_all(const Plan &plan, const Buffers &buffers) {
  const int n = plan.lane.group_size();
  if (exchange_pays(plan, buffers.count * buffers.item))
    return make_exchange(plan, buffers, buffers.count, input_blocks(buffers, n), output_blocks(buffers, n));
  return plan.make<AllToAll>(plan, buffers);
}

OperationPtr make_all_to_all_v(Group &group, const Plan &plan, const Buffers &buffers) {
  return plan.make<AllToAllV>(group, plan, buffers);
}

OperationPtr make_reduce_scatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction) {
  Blocks in = input_blocks(buffers, plan.lane.group_size());
  if (exchange_pays(plan, in.largest() * buffers.item))
    return make_exchange_reduce(plan, buffers, std::move(in), reduction);
  return plan.make<ReduceScatter>(plan, buffers, reduction);
}

OperationPtr make_scatter(const Plan &plan, const Buffers &buffers, int root) {
  return plan.make<Scatter>(plan, buffers, root);
}

}  // namespace phx
