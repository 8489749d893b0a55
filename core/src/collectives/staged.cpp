// all_gather, reduce_scatter, all_to_all and broadcast on ordinary memory.
//
// All have one shape: chunk by chunk, put into the own slot what the others need, arrive, take from their slots. One
// barrier per chunk; chunk k+1 is offered while peers still read chunk k.
#include <algorithm>
#include <cstring>

#include "collectives/operation.h"
#include "group/lane.h"

namespace phx {
namespace {

uint32_t rounds_for(size_t count, size_t chunk) {
  return std::max<uint32_t>(1, static_cast<uint32_t>((count + chunk - 1) / chunk));
}

// Elements of whole cache lines that fit in `bytes`.
size_t elements_in(size_t bytes, size_t item) { return bytes / kLine * (kLine / item); }

class AllGather final : public Operation {
 public:
  AllGather(const Lane &lane, const Buffers &buffers) : b_(buffers), chunk_(elements_in(lane.slot_bytes(), b_.item)) {
    rounds = rounds_for(b_.count, chunk_);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const size_t bytes = length(round) * b_.item;
    const size_t at = round * chunk_ * b_.item;
    copy_bytes(lane.data(lane.group_rank(), epoch), b_.in + at, bytes);
    deliver_bytes(b_.out + lane.group_rank() * b_.count * b_.item + at, b_.in + at, bytes,
                  b_.count * b_.item * lane.group_size());
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    for (int i = 1; i < lane.group_size(); ++i) {
      const int from = (lane.group_rank() + i) % lane.group_size();
      copy_bytes(b_.out + (from * b_.count + round * chunk_) * b_.item, lane.data(from, epoch),
                 length(round) * b_.item);
    }
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }

  const Buffers b_;
  const size_t chunk_;
};

// What reduce_scatter and all_to_all share: a slot holds one segment for each rank.
class Segmented : public Operation {
 protected:
  Segmented(const Lane &lane, const Buffers &buffers)
      : b_(buffers),
        segment_(std::min(elements_in(lane.slot_bytes() / lane.group_size(), b_.item),
                          part_elements(std::max<size_t>(b_.count, 1), b_.item, 1))) {
    rounds = rounds_for(b_.count, segment_);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(lane.group_rank(), epoch);
    for (int to = 0; to < lane.group_size(); ++to) {
      if (to == lane.group_rank() && blocking) continue;  // read from the input itself
      copy_bytes(slot + segment(to), input(round, to), length(round) * b_.item);
    }
  }

  size_t length(uint32_t round) const { return std::min(segment_, b_.count - round * segment_); }
  size_t segment(int group_rank) const { return group_rank * segment_ * b_.item; }
  const char *input(uint32_t round, int to) const { return b_.in + (to * b_.count + round * segment_) * b_.item; }

  const Buffers b_;
  const size_t segment_;  // elements
};

class ReduceScatter final : public Segmented {
 public:
  ReduceScatter(const Lane &lane, const Buffers &buffers, const Reduction &reduction)
      : Segmented(lane, buffers), reduction_(reduction) {}

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int n = lane.group_size();
    const int self = lane.group_rank();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch) + segment(self);
    if (blocking) inputs[self] = input(round, self);
    reduction_.fn(b_.out + round * segment_ * b_.item, inputs, n, length(round), n, reduction_.scale);
    return PHX_OK;
  }

 private:
  const Reduction reduction_;
};

class AllToAll final : public Segmented {
 public:
  AllToAll(const Lane &lane, const Buffers &buffers) : Segmented(lane, buffers) {}

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    const size_t bytes = length(round) * b_.item;
    for (int i = 0; i < lane.group_size(); ++i) {
      const int from = (self + i) % lane.group_size();
      const char *source = from == self && blocking ? input(round, self) : lane.data(from, epoch) + segment(self);
      deliver_bytes(b_.out + (from * b_.count + round * segment_) * b_.item, source, bytes,
                    b_.count * b_.item * lane.group_size());
    }
    return PHX_OK;
  }
};

class Broadcast final : public Operation {
 public:
  Broadcast(const Lane &lane, const Buffers &buffers, int root)
      : b_(buffers), root_(root), chunk_(elements_in(lane.slot_bytes(), b_.item)) {
    rounds = rounds_for(b_.count, chunk_);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() == root_)
      copy_bytes(lane.data(root_, epoch), b_.out + round * chunk_ * b_.item, length(round) * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (lane.group_rank() != root_)
      deliver_bytes(b_.out + round * chunk_ * b_.item, lane.data(root_, epoch), length(round) * b_.item,
                    b_.count * b_.item);
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return std::min(chunk_, b_.count - round * chunk_); }

  const Buffers b_;
  const int root_;
  const size_t chunk_;
};

}  // namespace

std::unique_ptr<Operation> make_all_gather(const Lane &lane, const Buffers &buffers) {
  return std::make_unique<AllGather>(lane, buffers);
}

std::unique_ptr<Operation> make_reduce_scatter(const Lane &lane, const Buffers &buffers, const Reduction &reduction) {
  return std::make_unique<ReduceScatter>(lane, buffers, reduction);
}

std::unique_ptr<Operation> make_all_to_all(const Lane &lane, const Buffers &buffers) {
  return std::make_unique<AllToAll>(lane, buffers);
}

std::unique_ptr<Operation> make_broadcast(const Lane &lane, const Buffers &buffers, int root) {
  return std::make_unique<Broadcast>(lane, buffers, root);
}

}  // namespace phx
