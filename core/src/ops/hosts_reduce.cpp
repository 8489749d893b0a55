// Large reductions of groups that span hosts, chunk by chunk.
//
// all_reduce and reduce: the ranks of a host put a chunk into their slots, and rank i sums part i of it from all slots.
// The ranks of rail i add their sums in the order of the hosts, put the result into their slots, and every rank takes
// the parts from there. While the sums of one chunk travel, the next one is summed. Small parts: each rank of a rail
// sends its sum to the others and adds what comes. Large ones: each adds a part of the part and sends the result, so
// that no more bytes travel than twice the part.
//
// reduce_scatter: rank i of a host sums what is for the ranks at position i of all hosts, and sends it there.
//
// In a group that reduces in the order of its ranks, what travels in place of the sums of a host are its addends: those
// of all its ranks, one after another (TwoSteps). The same ranks add up, and the result goes to the same place.
//
// Results do not depend on time: sums are added in the order of the ranks of a host, and then in that of the hosts; or
// in the order of the ranks.

#include "ops/hosts.h"

namespace phx {
namespace {

// From this part on its sum is divided among the hosts. Between two hosts that moves no fewer bytes, but halves the
// additions, at the price of a second message.
constexpr size_t kSharedBytes = size_t{32} << 10, kSharedByTwoBytes = size_t{512} << 10;

// The sum of one part over the ranks of a rail.
class RailSum {
 public:
  RailSum(Net &net, const Hosts &hosts, const TwoSteps &reduction, int root_host, size_t bytes)
      : hosts_(hosts),
        reduction_(reduction),
        root_host_(root_host),
        own_bytes_(std::max<size_t>(bytes, kLine) * reduction.addends(hosts.own())),
        // A part that is shared comes in smaller pieces.
        bytes_(std::min(std::max<size_t>(bytes, kLine),
                        root_host >= 0 ? bytes : std::max(shared_from(), bytes / hosts.count() + 2 * kLine))),
        memory_(net, own_bytes_ + bytes_ * reduction.before(hosts.count())) {}

  // Where what this host gives may lie, and the result in the same memory. When a share is added up, the addends of
  // this host for it begin exactly where the result of the share goes, or lie behind its end.
  char *own() const { return memory_.data(); }
  // The next part.
  void set(size_t count, size_t item) {
    count_ = count;
    item_ = item;
    shares_ = root_host_ < 0 && count * item >= shared_from();
  }
  // The first step of the reduction, into own(), from the elements of each rank of this host.
  void add_up(const void *const *in) {
    const size_t addends = reduction_.addends(hosts_.own());
    for (int host = 0; host < (shares_ && addends > 1 ? hosts_.count() : 1); ++host) {
      const auto [first, count] = addends > 1 ? share(host) : Span{0, count_};
      const void *from[kMaxGroupSize];
      for (int i = 0; i < hosts_.local_size(); ++i) from[i] = static_cast<const char *>(in[i]) + first * item_;
      if (count != 0) reduction_.on_host(own() + addends * first * item_, from, count);
    }
  }
  // `sum`: what this host gives, which stays until the end; `out`: the result, which may be the same memory.
  void begin(Transfers &transfers, const MessageName &name, const char *sum, char *out) {
    sum_ = sum;
    out_ = out;
    name_ = name;
    step_ = count_ == 0 ? kDone : kSums;
    if (count_ == 0) return;
    const size_t addends = reduction_.addends(hosts_.own());
    for (int i = 1; i < hosts_.count(); ++i) {
      const int host = (hosts_.own() + i) % hosts_.count(), rank = hosts_.rank(host, hosts_.local_rank());
      const Span theirs = share(host), mine = share(hosts_.own());
      if (receives()) transfers.recv(rank, name, at(host), reduction_.addends(host) * mine.count * item_);
      if (root_host_ < 0 || host == root_host_)
        transfers.send(rank, name, sum + addends * theirs.begin * item_, addends * theirs.count * item_);
    }
  }
  phx_status poll(Transfers &transfers) {
    while (step_ != kDone) {
      PHX_TRY(transfers.poll());
      const bool adds = step_ == kSums && receives();
      step_ = adds && shares_ ? kResults : kDone;
      if (!adds) break;
      const Span mine = share(hosts_.own());
      const void *inputs[kMaxGroupSize];
      for (int host = 0; host < hosts_.count(); ++host)
        inputs[host] = host == hosts_.own() ? sum_ + reduction_.addends(host) * mine.begin * item_ : at(host);
      if (mine.count != 0) reduction_.of_hosts(out_ + mine.begin * item_, inputs, mine.count);
      for (int i = 1; i < hosts_.count() && shares_; ++i) {
        const int host = (hosts_.own() + i) % hosts_.count(), rank = hosts_.rank(host, hosts_.local_rank());
        const Span theirs = share(host);
        const MessageName result{name_.channel, name_.call, name_.part + 1};
        transfers.recv(rank, result, out_ + theirs.begin * item_, theirs.count * item_);
        transfers.send(rank, result, out_ + mine.begin * item_, mine.count * item_);
      }
    }
    return PHX_OK;
  }

 private:
  enum Step { kDone, kSums, kResults };
  bool receives() const { return root_host_ < 0 || root_host_ == hosts_.own(); }
  size_t shared_from() const {
    const size_t hosts = hosts_.count(), addends = reduction_.before(hosts_.count());
    if (addends > hosts) return kSharedBytes * hosts / addends;  // sums travel once and addends not at all
    return hosts > 2 ? kSharedBytes : kSharedByTwoBytes;
  }
  char *at(int host) const { return memory_.data() + own_bytes_ + reduction_.before(host) * bytes_; }
  // Which elements of the part a host adds: the first of them, and how many.
  Span share(int host) const {
    if (!shares_) return {0, count_};
    const size_t each = part_elements(count_, item_, hosts_.count());
    return clip(count_, host * each, each);
  }

  const Hosts &hosts_;
  const TwoSteps &reduction_;
  const int root_host_;
  const size_t own_bytes_, bytes_;  // of what this host gives, and of each addend that comes from another one
  const Scratch memory_;
  const char *sum_ = nullptr;
  char *out_ = nullptr;
  size_t count_ = 0, item_ = 1;
  MessageName name_{};
  bool shares_ = false;
  Step step_ = kDone;
};

class HostsReduce final : public OnRails {
 public:
  HostsReduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root)
      : OnRails(plan, buffers, buffers.count * buffers.item),
        reduction_(reduction, plan.net->group()),
        gets_(root < 0 || root == rank_),
        streaming_(buffers.count * buffers.item >= plan.tuning.streaming_bytes && buffers.in != buffers.out) {
    // The same on all hosts, whatever their number of ranks: a slot holds a chunk and one part of another.
    cut(all_alone() ? 2 * kMessageBytes : std::min(plan.lane.slot_bytes(), kSlotBytes) / (rails_ + 1));
    rounds = n_ == 1 ? chunks_ : chunks_ + kWindows;
    reach = n_ == 1 ? 0 : (chunk_ + part_) * b_.item;
    const int root_host = root < 0 ? -1 : hosts_.of(root);
    if (has_part())
      for (uint32_t i = 0; i < kWindows; ++i)
        sums_.emplace_back(net_, hosts_, reduction_, root_host, std::min(part_, b_.count) * b_.item);
    passes_on_ = root_host < 0 || root_host == hosts_.own();
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (n_ == 1) return;
    char *const slot = lane.data(self_, epoch);
    if (round < chunks_) put_bytes(slot, b_.in + round * chunk_ * b_.item, length(round) * b_.item);
    if (round < kWindows || !has_part() || !passes_on_) return;
    put_bytes(slot + chunk_ * b_.item, sums_[round % kWindows].own(), part(round - kWindows, self_).count * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) begin_heads();
    if (round < chunks_ && has_part()) begin(lane, round, epoch);
    if (n_ == 1 || round < kWindows || !passes_on_ || !gets_) return PHX_OK;
    for (int i = 0; i < rails_; ++i) {
      const Span span = part(round - kWindows, i);
      deliver_bytes(b_.out + ((round - kWindows) * chunk_ + span.begin) * b_.item,
                    lane.data(i, epoch) + chunk_ * b_.item, span.count * b_.item, streaming_);
    }
    return PHX_OK;
  }

 protected:
  phx_status settle(uint32_t round) override {
    if (!has_part()) return PHX_OK;
    // All of them go on; the oldest must be complete, and at the end all must be.
    const uint32_t begun = std::min(round, chunks_), due = round == rounds    ? begun
                                                           : round < kWindows ? 0
                                                                              : round - kWindows + 1;
    for (uint32_t chunk = begun < kWindows ? 0 : begun - kWindows; chunk < begun; ++chunk) {
      const phx_status status = sums_[chunk % kWindows].poll(window(chunk));
      if (status != PHX_OK && (status != PHX_IN_PROGRESS || chunk < due)) return status;
    }
    return PHX_OK;
  }

 private:
  void begin(const Lane &lane, uint32_t chunk, uint64_t epoch) {
    RailSum &sums = sums_[chunk % kWindows];
    const Span span = part(chunk, self_);
    const size_t before = (chunk * chunk_ + span.begin) * b_.item;
    const char *sum = b_.in + before;
    char *out = n_ == 1 && gets_ ? b_.out + before : sums.own();
    sums.set(span.count, b_.item);
    if (n_ > 1 || !reduction_.keeps_one()) {
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n_; ++i) inputs[i] = n_ == 1 ? sum : lane.data(i, epoch) + span.begin * b_.item;
      sums.add_up(inputs);
      sum = sums.own();
    }
    sums.begin(window(chunk), name(chunk), sum, out);
  }

  const TwoSteps reduction_;
  const bool gets_;
  const bool streaming_;
  bool passes_on_ = true;  // whether ranks of this host get results
  std::deque<RailSum> sums_;
};

class HostsReduceScatter final : public BetweenHosts {
 public:
  HostsReduceScatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction)
      : BetweenHosts(plan, buffers, 0, kWindows),
        reduction_(reduction, plan.net->group()),
        in_(input_blocks(buffers, all_)) {
    const size_t line = kLine / b_.item;
    const size_t room = std::min(plan.lane.slot_bytes(), kSlotBytes) / all_;
    segment_ = std::max(line, elements_in(all_alone() ? 2 * kMessageBytes / all_ : room, b_.item));
    segment_ = std::min(segment_, rounds_for(in_.largest(), line) * line);
    chunks_ = rounds_for(in_.largest(), segment_);
    rounds = n_ == 1 ? chunks_ : chunks_ + 1;
    reach = n_ == 1 ? 0 : all_ * segment_ * b_.item;
    for (int rank = 0; rank < all_; ++rank)
      if (hosts_.position(rank) % n_ == self_ && (!hosts_.is_here(rank) || rank == rank_)) served_.push_back(rank);
    gives_ = reduction_.addends(hosts_.own());
    for (uint32_t i = 0; i < kWindows; ++i)
      memory_.emplace_back(net_, (served_.size() * gives_ + reduction_.before(hosts_.count())) * bytes());
  }

  void keep_input(const Keeping &keeping) override { in_.keep(keeping, &kept_); }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (n_ == 1 || round == chunks_) return;
    char *const slot = lane.data(self_, epoch);
    for (int rank = 0; rank < all_; ++rank)
      in_.put_to(slot + rank * bytes(), rank, round * segment_, length(rank, round));
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) begin_heads();
    if (round == chunks_) return PHX_OK;
    Transfers &transfers = window(round);
    char *sum = memory_[round % kWindows].data();
    for (const int rank : served_) {
      const size_t count = length(rank, round);
      const char *from = alone(rank, round);
      if (from == nullptr && count != 0) {
        const void *inputs[kMaxGroupSize] = {sum};
        if (n_ == 1) in_.copy_to(sum, rank, round * segment_, count);
        for (int i = 0; n_ > 1 && i < n_; ++i) inputs[i] = lane.data(i, epoch) + rank * bytes();
        if (n_ > 1 || !reduction_.keeps_one()) reduction_.on_host(sum, inputs, count);
      }
      if (rank != rank_ && count != 0)
        transfers.send(rank, name(round), from != nullptr ? from : sum, gives_ * count * b_.item);
      sum += gives_ * bytes();
    }
    const size_t mine = length(rank_, round);
    for (int host = 0; host < hosts_.count(); ++host)
      if (host != hosts_.own() && mine != 0)
        transfers.recv(hosts_.rank(host, self_ % hosts_.size(host)), name(round), theirs(round, host),
                       reduction_.addends(host) * mine * b_.item);
    return PHX_OK;
  }

 protected:
  void finish(uint32_t round) override {
    const size_t count = length(rank_, round);
    if (count == 0) return;
    const size_t own = std::find(served_.begin(), served_.end(), rank_) - served_.begin();
    const void *inputs[kMaxGroupSize];
    for (int host = 0; host < hosts_.count(); ++host) inputs[host] = theirs(round, host);
    const char *const direct = alone(rank_, round);
    inputs[hosts_.own()] = direct != nullptr ? direct : memory_[round % kWindows].data() + own * gives_ * bytes();
    reduction_.of_hosts(b_.out + round * bytes(), inputs, count);
  }

 private:
  size_t bytes() const { return segment_ * b_.item; }
  size_t length(int rank, uint32_t round) const { return elements_of_round(in_.count(rank), segment_, round); }
  // The input, if it is this host's sum and lies side by side.
  const char *alone(int rank, uint32_t round) const {
    if (n_ != 1 || !reduction_.keeps_one() || length(rank, round) == 0) return nullptr;
    return in_.dense(rank, round * segment_);
  }
  char *theirs(uint32_t round, int host) const {
    return memory_[round % kWindows].data() + (served_.size() * gives_ + reduction_.before(host)) * bytes();
  }
  const TwoSteps reduction_;
  Blocks in_;
  size_t segment_;               // elements
  size_t gives_;                 // addends of this host for each rank
  std::vector<int> served_;      // the ranks to which this rank sends what this host gives
  std::vector<Scratch> memory_;  // by window: that, and what the other hosts give to this rank
};

}  // namespace

OperationPtr make_hosts_reduce(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                               int root) {
  if (traits_of(kind).in == Parts::kAll) return plan.make<HostsReduceScatter>(plan, buffers, reduction);
  return plan.make<HostsReduce>(plan, buffers, reduction, root);
}

}  // namespace phx
