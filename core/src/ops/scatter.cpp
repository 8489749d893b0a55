// all_to_all(_v), reduce_scatter(_v) and scatter on ordinary memory, in their plain form: a slot holds one segment for
// each rank. Also reduce for few ranks, in which the root reads the slots of all ranks.
//
// For each chunk, a rank puts what the others need into its slot, arrives, and takes from the others' slots. There is
// one barrier per chunk.
#include <algorithm>
#include <cstdint>

#include "base/error.h"
#include "group/lane.h"
#include "ops/areas.h"
#include "ops/blocks.h"
#include "ops/operation.h"

namespace phx {
namespace {

// The elements of a segment. The input has a block for each rank, and a slot has a segment for each block; all segments
// must fit into the slot.
size_t segment_for(const Plan &plan, const Buffers &buffers, const Blocks &blocks, size_t most = SIZE_MAX) {
  const size_t item = buffers.item;
  return std::max<size_t>(std::min({elements_in(plan.chunk_bytes() / plan.lane.group_size(), item),
                                    part_elements(std::max<size_t>(blocks.largest(), 1), item, 1), most}),
                          kLine / item);
}

class Segmented : public Operation {
 public:
  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to)
      if (to != lane.group_rank() || !blocking_) put_bytes(slot + place(to), input(round, to), bytes(round, to));
  }

 protected:
  Segmented(const Plan &plan, const Buffers &buffers, Blocks blocks, size_t segment, bool has_input = true)
      : Operation(buffers, has_input ? blocks.total() * buffers.item : 0),
        blocks_(std::move(blocks)),
        blocking_(plan.blocking),
        segment_(segment) {
    rounds = rounds_for(blocks_.largest(), segment_);
    reach = place(plan.lane.group_size());
  }

  size_t clip(size_t count, uint32_t round) const { return elements_of_round(count, segment_, round); }
  size_t place(int group_rank) const { return group_rank * segment_ * b_.item; }  // bytes into a slot
  const char *input(uint32_t round, int to) const { return b_.in + (blocks_.start(to) + round * segment_) * b_.item; }
  size_t bytes(uint32_t round, int to) const { return clip(blocks_.count(to), round) * b_.item; }

  const Blocks blocks_;
  const bool blocking_;   // this rank's own block is read from the input itself
  const size_t segment_;  // elements
};

class AllToAll : public Segmented {
 public:
  // out: the blocks of the output; NULL: the same as those of the input.
  AllToAll(const Plan &plan, const Buffers &buffers, Blocks in, const Blocks *out, size_t segment)
      : Segmented(plan, buffers, std::move(in), segment), out_(out != nullptr ? *out : blocks_) {}

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    for (int i = 0; i < lane.group_size(); ++i) {
      const int from = (self + i) % lane.group_size();  // so that ranks do not all read from the same one
      const char *source = from == self && blocking_ ? input(round, self) : lane.data(from, epoch) + place(self);
      copy_bytes(b_.out + (out_.start(from) + round * segment_) * b_.item, source,
                 clip(out_.count(from), round) * b_.item);
    }
    return PHX_OK;
  }

 private:
  const Blocks &out_;
};

// Round 0 publishes the counts; then all ranks know how many rounds of data follow, and whether there is an error.
class AllToAllV final : public AllToAll {
 public:
  AllToAllV(Group &group, const Plan &plan, const Buffers &buffers, Blocks in, Blocks out)
      : AllToAll(plan, buffers, std::move(in), &expected_,
                 elements_in(plan.lane.slot_bytes() / plan.lane.group_size(), buffers.item)),
        expected_(std::move(out)),
        counts_(group, "all_to_all_v", blocks_, expected_) {
    rounds = 2;  // at least; round 0 sets it, and later operations must not be published before that
  }

  bool takes_input_at_once() const override { return false; }  // data moves only after round 0

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0)
      counts_.put(lane, epoch);
    else
      AllToAll::put(lane, round - 1, epoch);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round != 0) return AllToAll::take(lane, round - 1, epoch);
    if (const phx_status status = counts_.read(lane, epoch); status != PHX_OK) return status;
    const size_t most = counts_.most_sent();
    if (most / segment_ >= UINT32_MAX)
      return fail(PHX_ERR_MISMATCH, "all_to_all_v", "all_to_all_v: a count of %zu is more than memory can hold", most);
    rounds = 1 + static_cast<uint32_t>((most + segment_ - 1) / segment_);
    return PHX_OK;
  }

 private:
  const Blocks expected_;
  CountMatrix counts_;
};

class ReduceScatter final : public Segmented {
 public:
  ReduceScatter(const Plan &plan, const Buffers &buffers, const Blocks &blocks, const Reduction &reduction)
      : Segmented(plan, buffers, blocks, segment_for(plan, buffers, blocks)), reduction_(reduction) {}

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const size_t count = clip(blocks_.count(self), round);
    if (count == 0) return PHX_OK;
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + place(self);
    if (blocking_) inputs[self] = input(round, self);
    reduction_.fn(b_.out + round * segment_ * b_.item, inputs, n, count, n, reduction_.scale);
    return PHX_OK;
  }

 private:
  const Reduction reduction_;
};

class Scatter final : public Segmented {
 public:
  Scatter(const Plan &plan, const Buffers &buffers, const Blocks &blocks, int root)
      : Segmented(
            plan, buffers, blocks,
            segment_for(plan, buffers, blocks, plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
            plan.lane.group_rank() == root),
        root_(root) {}

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_) return;
    for (int to = 0; to < lane.group_size(); ++to)
      if (to == root_)
        copy_bytes(output(round), input(round, to), bytes(round, to));
      else
        put_one_way(lane.data(root_, epoch) + place(to), input(round, to), bytes(round, to));
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    if (self != root_) copy_bytes(output(round), lane.data(root_, epoch) + place(self), bytes(round, self));
    return PHX_OK;
  }

 private:
  char *output(uint32_t round) const { return b_.out + round * segment_ * b_.item; }

  const int root_;
};

class Reduce final : public Operation {
 public:
  Reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root)
      : Operation(buffers, buffers.count * buffers.item),
        reduction_(reduction),
        root_(root),
        blocking_(plan.blocking),
        chunk_(plan.chunk_elements(buffers.item)) {
    rounds = rounds_for(b_.count, chunk_);
    reach = std::min(b_.count, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_ || !blocking_)
      put_bytes(lane.data(lane.group_rank(), epoch), input(round), length(round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_) return PHX_OK;
    const int n = lane.group_size();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch);
    if (blocking_) inputs[root_] = input(round);
    reduction_.fn(b_.out + round * chunk_ * b_.item, inputs, n, length(round), n, reduction_.scale);
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return elements_of_round(b_.count, chunk_, round); }
  const char *input(uint32_t round) const { return b_.in + round * chunk_ * b_.item; }

  const Reduction reduction_;
  const int root_;
  const bool blocking_;
  const size_t chunk_;
};

}  // namespace

OperationPtr make_all_to_all(const Plan &plan, const Buffers &buffers) {
  if (exchange_pays(plan, buffers.count * buffers.item)) return make_exchange(plan, buffers);
  const Blocks blocks(buffers, plan.lane.group_size());
  return std::make_unique<AllToAll>(plan, buffers, blocks, nullptr, segment_for(plan, buffers, blocks));
}

OperationPtr make_all_to_all_v(Group &group, const Plan &plan, const Buffers &buffers, const size_t *in_counts,
                               const size_t *out_counts) {
  const int n = plan.lane.group_size();
  return std::make_unique<AllToAllV>(group, plan, buffers, Blocks(in_counts, n), Blocks(out_counts, n));
}

OperationPtr make_reduce_scatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction) {
  if (buffers.counts == nullptr && exchange_pays(plan, buffers.count * buffers.item))
    return make_exchange_reduce(plan, buffers, reduction);
  return std::make_unique<ReduceScatter>(plan, buffers, Blocks(buffers, plan.lane.group_size()), reduction);
}

OperationPtr make_scatter(const Plan &plan, const Buffers &buffers, int root) {
  return std::make_unique<Scatter>(plan, buffers, Blocks(buffers, plan.lane.group_size()), root);
}

OperationPtr make_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root) {
  // In a large group the root would read all inputs while the others wait; there all ranks share the work.
  const bool share = plan.lane.group_size() >= 4 && buffers.count * buffers.item > plan.tuning.one_shot_bytes;
  if (share) return make_two_shot(plan, buffers, reduction, root);
  return std::make_unique<Reduce>(plan, buffers, reduction, root);
}

}  // namespace phx
