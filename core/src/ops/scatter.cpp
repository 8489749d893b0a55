// all_to_all, reduce_scatter(_v) and scatter on ordinary memory, in their plain form: a slot holds one segment for each
// rank. And reduce for few ranks, where the root reads everything.
//
// Chunk by chunk, put into the own slot what the others need, arrive, take from their slots. One barrier per chunk.
#include <algorithm>
#include <cstdint>
#include <vector>

#include "group/lane.h"
#include "ops/exchange.h"
#include "ops/operation.h"
#include "ops/two_shot.h"

namespace phx {
namespace {

class Segmented : public Operation {
 protected:
  // count: the most elements of one block; most: what a segment may have at all.
  Segmented(const Plan &plan, const Buffers &buffers, size_t in_bytes, size_t count, size_t most = SIZE_MAX)
      : Operation(buffers, in_bytes),
        blocking_(plan.blocking),
        segment_(std::max<size_t>(std::min({elements_in(plan.chunk_bytes() / plan.lane.group_size(), buffers.item),
                                            part_elements(std::max<size_t>(count, 1), buffers.item, 1), most}),
                                  kLine / buffers.item)) {
    rounds = rounds_for(count, segment_);
    reach = place(plan.lane.group_size());
  }

  size_t clip(size_t count, uint32_t round) const {
    const size_t done = round * segment_;
    return count > done ? std::min(segment_, count - done) : 0;
  }
  size_t place(int group_rank) const { return group_rank * segment_ * b_.item; }  // in a slot

  const bool blocking_;   // the own block is read from the input itself
  const size_t segment_;  // elements
};

class AllToAll final : public Segmented {
 public:
  AllToAll(const Plan &plan, const Buffers &buffers)
      : Segmented(plan, buffers, buffers.count * buffers.item * plan.lane.group_size(), buffers.count) {}

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to)
      if (to != lane.group_rank() || !blocking_)
        put_bytes(slot + place(to), input(round, to), clip(b_.count, round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    for (int i = 0; i < lane.group_size(); ++i) {
      const int from = (self + i) % lane.group_size();  // not all at the same rank at once
      const char *source = from == self && blocking_ ? input(round, self) : lane.data(from, epoch) + place(self);
      copy_bytes(b_.out + (from * b_.count + round * segment_) * b_.item, source, clip(b_.count, round) * b_.item);
    }
    return PHX_OK;
  }

 private:
  const char *input(uint32_t round, int to) const { return b_.in + (to * b_.count + round * segment_) * b_.item; }
};

class ReduceScatter final : public Segmented {
 public:
  ReduceScatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction, std::vector<size_t> counts)
      : Segmented(plan, buffers, sum(counts) * buffers.item, *std::max_element(counts.begin(), counts.end())),
        reduction_(reduction),
        counts_(std::move(counts)) {
    size_t total = 0;
    for (const size_t count : counts_) {
      starts_.push_back(total);
      total += count;
    }
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to)
      if (to != lane.group_rank() || !blocking_)
        put_bytes(slot + place(to), input(round, to), clip(counts_[to], round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const size_t count = clip(counts_[self], round);
    if (count == 0) return PHX_OK;
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + place(self);
    if (blocking_) inputs[self] = input(round, self);
    reduction_.fn(b_.out + round * segment_ * b_.item, inputs, n, count, n, reduction_.scale);
    return PHX_OK;
  }

 private:
  static size_t sum(const std::vector<size_t> &counts) {
    size_t total = 0;
    for (const size_t count : counts) total += count;
    return total;
  }
  const char *input(uint32_t round, int to) const { return b_.in + (starts_[to] + round * segment_) * b_.item; }

  const Reduction reduction_;
  const std::vector<size_t> counts_;
  std::vector<size_t> starts_;
};

class Scatter final : public Segmented {
 public:
  Scatter(const Plan &plan, const Buffers &buffers, int root)
      : Segmented(plan, buffers,
                  plan.lane.group_rank() == root ? buffers.count * buffers.item * plan.lane.group_size() : 0,
                  buffers.count, plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
        root_(root) {}

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_) return;
    const size_t bytes = clip(b_.count, round) * b_.item;
    for (int to = 0; to < lane.group_size(); ++to) {
      const char *from = b_.in + (to * b_.count + round * segment_) * b_.item;
      if (to == root_)
        copy_bytes(output(round), from, bytes);
      else
        put_one_way(lane.data(root_, epoch) + place(to), from, bytes);
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_)
      copy_bytes(output(round), lane.data(root_, epoch) + place(lane.group_rank()), clip(b_.count, round) * b_.item);
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
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }
  const char *input(uint32_t round) const { return b_.in + round * chunk_ * b_.item; }

  const Reduction reduction_;
  const int root_;
  const bool blocking_;
  const size_t chunk_;
};

}  // namespace

OperationPtr make_all_to_all(const Plan &plan, const Buffers &buffers) {
  if (exchange_pays(plan, buffers.count * buffers.item)) return make_exchange(plan, buffers);
  return std::make_unique<AllToAll>(plan, buffers);
}

OperationPtr make_reduce_scatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction) {
  if (exchange_pays(plan, buffers.count * buffers.item)) return make_exchange_reduce(plan, buffers, reduction);
  return std::make_unique<ReduceScatter>(plan, buffers, reduction,
                                         std::vector<size_t>(plan.lane.group_size(), buffers.count));
}

OperationPtr make_reduce_scatter_v(const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                                   const size_t *counts) {
  return std::make_unique<ReduceScatter>(plan, buffers, reduction,
                                         std::vector<size_t>(counts, counts + plan.lane.group_size()));
}

OperationPtr make_scatter(const Plan &plan, const Buffers &buffers, int root) {
  return std::make_unique<Scatter>(plan, buffers, root);
}

OperationPtr make_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root) {
  // The root of many would read from all of them while they wait: there the sums are shared out.
  const bool share = plan.lane.group_size() >= 4 && buffers.count * buffers.item > plan.tuning.one_shot_bytes;
  if (share) return make_two_shot(plan, buffers, reduction, root);
  return std::make_unique<Reduce>(plan, buffers, reduction, root);
}

}  // namespace phx
