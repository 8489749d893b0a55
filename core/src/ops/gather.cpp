// all_gather(_v), gather and broadcast on ordinary memory: one or several ranks read the blocks of others unchanged.
//
// For each chunk, a rank puts what the others need into its slot, arrives, and takes from the others' slots. There is
// one barrier per chunk, and chunk k+1 is put while peers still read chunk k.

#include "ops/areas.h"
#include "ops/bypass.h"

namespace phx {
namespace {

// Delivers the blocks of all ranks to all ranks or to one reader.
class Gather final : public Operation {
 public:
  // reader: the group rank that receives the blocks; -1: all ranks do.
  Gather(const Plan &plan, const Buffers &buffers, size_t chunk, int reader)
      : Operation(buffers, 0),
        out_(output_blocks(buffers, plan.lane.group_size())),
        reader_(reader),
        chunk_(chunk),
        bypass_(BypassUse::kGather, out_.total() * buffers.item, plan.tuning.streaming_bytes,
                reads(plan.lane.group_rank())) {
    const size_t own = out_.count(plan.lane.group_rank());
    in_bytes_ = own * b_.item;
    rounds = rounds_for(out_.largest(), chunk_);
    reach = std::min(own, chunk_) * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    const int self = lane.group_rank();
    const size_t bytes = length(self, round) * b_.item;
    if (bytes == 0) return;
    const Bypass::Clock clock(bypass_);
    const char *from = b_.in + round * chunk_ * b_.item;
    if (reader_ < 0)
      put_bytes(lane.data(self, epoch), from, bytes);
    else if (reader_ != self)
      put_one_way(lane.data(self, epoch), from, bytes);
  }

  void keep_own(const Lane &lane, uint32_t round) override {
    const int self = lane.group_rank();
    if (!reads(self) || length(self, round) == 0) return;
    const Bypass::Clock clock(bypass_);
    deliver(self, round, b_.in + round * chunk_ * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (!reads(lane.group_rank())) return PHX_OK;
    const Bypass::Clock clock(bypass_);
    for (int i = 1; i < lane.group_size(); ++i) {
      const int from = (lane.group_rank() + i) % lane.group_size();  // so that ranks do not all read from the same one
      deliver(from, round, lane.data(from, epoch));
    }
    return PHX_OK;
  }

 private:
  bool reads(int group_rank) const { return reader_ < 0 || reader_ == group_rank; }
  size_t length(int of, uint32_t round) const { return elements_of_round(out_.count(of), chunk_, round); }
  void deliver(int of, uint32_t round, const char *from) const {
    out_.fill(of, round * chunk_, length(of, round), from, bypass_.copy());
  }

  const Blocks out_;
  const int reader_;
  const size_t chunk_;
  Bypass bypass_;
};

class Broadcast final : public Operation {
 public:
  Broadcast(const Plan &plan, const Buffers &buffers, int root)
      : Operation(buffers, plan.lane.group_rank() == root ? buffers.count * buffers.item : 0),
        root_(root),
        chunk_(plan.pipelined_elements(buffers.count * buffers.item, buffers.item)),
        bypass_(BypassUse::kBroadcast, buffers.count * buffers.item, plan.tuning.streaming_bytes,
                plan.lane.group_rank() != root),
        one_way_(reads_one_way(buffers.count * buffers.item, bool{bypass_}, plan.lane.ranks_share_cores())) {
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
    const Bypass::Clock clock(bypass_);
    if (one_way_)
      kernels::copy_for(kernels::CopyUse::kReadOneWay, to, lane.data(root_, epoch), bytes);
    else
      deliver_bytes(to, lane.data(root_, epoch), bytes, bypass_.copy());
    return PHX_OK;
  }

 private:
  size_t length(uint32_t round) const { return elements_of_round(b_.count, chunk_, round); }

  const int root_;
  const size_t chunk_;
  Bypass bypass_;
  const bool one_way_;
};

}  // namespace

OperationPtr make_all_gather(const Plan &plan, const Buffers &buffers) {
  if (plan.lane.group_size() == 2) {  // they send each other one block, which is an exchange
    Blocks out = output_blocks(buffers, 2);
    const size_t largest = out.largest();
    if (exchange_pays(plan, largest * buffers.item)) {
      Blocks in = Blocks::shared(buffers.in, out.count(plan.lane.group_rank()), buffers.item);
      return make_exchange(plan, buffers, largest, std::move(in), std::move(out));
    }
  }
  return plan.make<Gather>(plan, buffers, plan.chunk_elements(buffers.item), -1);
}

OperationPtr make_gather(const Plan &plan, const Buffers &buffers, int root) {
  const size_t chunk = plan.pipelined_elements(buffers.count * buffers.item, buffers.item);
  return plan.make<Gather>(plan, buffers, chunk, root);
}

OperationPtr make_broadcast(const Plan &plan, const Buffers &buffers, int root) {
  return plan.make<Broadcast>(plan, buffers, root);
}

}  // namespace phx
