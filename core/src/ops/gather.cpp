// all_gather(_v), gather and broadcast on ordinary memory: blocks that several ranks, or one, read as they are.
//
// Chunk by chunk, put into the own slot what the others need, arrive, take from their slots. One barrier per chunk;
// chunk k+1 is offered while peers still read chunk k.
#include <algorithm>
#include <vector>

#include "group/lane.h"
#include "ops/exchange.h"
#include "ops/operation.h"

namespace phx {
namespace {

class AllGather final : public Operation {
 public:
  AllGather(const Plan &plan, const Buffers &buffers)
      : Operation(buffers, buffers.count * buffers.item),
        chunk_(plan.chunk_elements(buffers.item)),
        streaming_(buffers.count * buffers.item * plan.lane.group_size() >= plan.tuning.streaming_bytes) {
    rounds = rounds_for(b_.count, chunk_);
    reach = std::min(b_.count, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const size_t bytes = length(round) * b_.item;
    const char *from = b_.in + round * chunk_ * b_.item;
    put_bytes(lane.data(lane.group_rank(), epoch), from, bytes);
    deliver_bytes(output(lane.group_rank(), round), from, bytes, streaming_);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    for (int i = 1; i < lane.group_size(); ++i) {
      const int from = (lane.group_rank() + i) % lane.group_size();  // not all at the same rank at once
      deliver_bytes(output(from, round), lane.data(from, epoch), length(round) * b_.item, streaming_);
    }
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }
  char *output(int of, uint32_t round) const { return b_.out + (of * b_.count + round * chunk_) * b_.item; }

  const size_t chunk_;
  const bool streaming_;
};

class AllGatherV final : public Operation {
 public:
  AllGatherV(const Plan &plan, const Buffers &buffers, const size_t *counts)
      : Operation(buffers, counts[plan.lane.group_rank()] * buffers.item),
        counts_(counts, counts + plan.lane.group_size()),
        chunk_(plan.chunk_elements(buffers.item)) {
    size_t total = 0;
    for (const size_t count : counts_) {
      starts_.push_back(total);
      total += count;
    }
    rounds = rounds_for(*std::max_element(counts_.begin(), counts_.end()), chunk_);
    streaming_ = total * b_.item >= plan.tuning.streaming_bytes;
    reach = std::min(counts_[plan.lane.group_rank()], chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    const size_t bytes = length(self, round) * b_.item;
    if (bytes == 0) return;
    const char *from = b_.in + round * chunk_ * b_.item;
    put_bytes(lane.data(self, epoch), from, bytes);
    deliver_bytes(output(self, round), from, bytes, streaming_);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    for (int i = 1; i < lane.group_size(); ++i) {
      const int from = (lane.group_rank() + i) % lane.group_size();
      const size_t bytes = length(from, round) * b_.item;
      if (bytes != 0) deliver_bytes(output(from, round), lane.data(from, epoch), bytes, streaming_);
    }
    return PHX_OK;
  }

 private:
  size_t length(int of, uint32_t round) const {
    const size_t done = round * chunk_;
    return counts_[of] > done ? std::min(chunk_, counts_[of] - done) : 0;
  }
  char *output(int of, uint32_t round) const { return b_.out + (starts_[of] + round * chunk_) * b_.item; }

  const std::vector<size_t> counts_;
  std::vector<size_t> starts_;
  const size_t chunk_;
  bool streaming_ = false;
};

class Gather final : public Operation {
 public:
  Gather(const Plan &plan, const Buffers &buffers, int root)
      : Operation(buffers, buffers.count * buffers.item),
        root_(root),
        chunk_(plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
        streaming_(buffers.count * buffers.item * plan.lane.group_size() >= plan.tuning.streaming_bytes) {
    rounds = rounds_for(b_.count, chunk_);
    reach = std::min(b_.count, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    const char *from = b_.in + round * chunk_ * b_.item;
    if (self == root_)
      deliver_bytes(output(self, round), from, length(round) * b_.item, streaming_);
    else
      put_one_way(lane.data(self, epoch), from, length(round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_) return PHX_OK;
    for (int i = 0; i < lane.group_size(); ++i)
      if (i != root_) deliver_bytes(output(i, round), lane.data(i, epoch), length(round) * b_.item, streaming_);
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }
  char *output(int of, uint32_t round) const { return b_.out + (of * b_.count + round * chunk_) * b_.item; }

  const int root_;
  const size_t chunk_;
  const bool streaming_;
};

class Broadcast final : public Operation {
 public:
  Broadcast(const Plan &plan, const Buffers &buffers, int root)
      : Operation(buffers, plan.lane.group_rank() == root ? buffers.count * buffers.item : 0),
        root_(root),
        chunk_(plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
        streaming_(buffers.count * buffers.item >= plan.tuning.streaming_bytes),
        one_way_(reads_one_way(buffers.count * buffers.item, streaming_)) {
    rounds = rounds_for(b_.count, chunk_);
    reach = std::min(b_.count, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() == root_)
      put_one_way(lane.data(root_, epoch), b_.in + round * chunk_ * b_.item, length(round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() == root_) return PHX_OK;
    char *const to = b_.out + round * chunk_ * b_.item;
    const size_t bytes = length(round) * b_.item;
    if (one_way_)
      kernels::copy_one_way(to, lane.data(root_, epoch), bytes);
    else
      deliver_bytes(to, lane.data(root_, epoch), bytes, streaming_);
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }

  const int root_;
  const size_t chunk_;
  const bool streaming_, one_way_;
};

}  // namespace

OperationPtr make_all_gather(const Plan &plan, const Buffers &buffers) {
  // Of two ranks each sends the other one block: an exchange.
  if (plan.lane.group_size() == 2 && exchange_pays(plan, buffers.count * buffers.item))
    return make_exchange_of_two(plan, buffers);
  return std::make_unique<AllGather>(plan, buffers);
}

OperationPtr make_all_gather_v(const Plan &plan, const Buffers &buffers, const size_t *counts) {
  return std::make_unique<AllGatherV>(plan, buffers, counts);
}

OperationPtr make_gather(const Plan &plan, const Buffers &buffers, int root) {
  return std::make_unique<Gather>(plan, buffers, root);
}

OperationPtr make_broadcast(const Plan &plan, const Buffers &buffers, int root) {
  return std::make_unique<Broadcast>(plan, buffers, root);
}

}  // namespace phx
