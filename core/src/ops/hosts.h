// Collectives of groups that span hosts. Their lanes join the ranks of one host; what crosses goes through room net/.
//
// The first rank of each host sends a head to those of the other hosts with every call, by which they compare their
// calls, as lanes compare those of the ranks of one host. Small data travels with the head.
#pragma once

#include <deque>

#include "net/net.h"
#include "ops/blocks.h"

namespace phx {

// Whether these are two hosts with one rank each, which work from and into the buffers of their callers.
inline bool is_pair(const Hosts &hosts) { return hosts.count() == 2 && hosts.size(0) + hosts.size(1) == 2; }
// The most data that travels with a head, from one host. It is copied more often than data in a message of its own.
inline size_t head_room(const Hosts &hosts) { return size_t{is_pair(hosts) ? 64u : 16u} << 10; }
// Larger data moves in chunks, several of which may travel at the same time.
inline constexpr uint32_t kWindows = 2;
inline constexpr size_t kSlotBytes = size_t{256} << 10;  // of a slot that a chunk uses at most
// A message of 512 KiB goes through TCP with less work for each byte than smaller ones. If there are several ranks on a
// host, chunks are smaller, because they also pass through slots, and cores work on several at a time.
inline constexpr size_t kMessageBytes = size_t{512} << 10;

// The heads of one call. Only the first rank of each host has any.
class Heads {
 public:
  explicit Heads(const Plan &plan);
  bool leads() const { return hosts_.local_rank() == 0; }
  // Room for this host's data, at most head_room bytes; and that of another host, once `poll` has returned PHX_OK.
  char *own() { return data(hosts_.own()); }
  char *data(int host) { return memory_.data() + bytes_ * static_cast<size_t>(host) + sizeof(Head); }
  // `bytes`: of data, for each host; none if the list is empty.
  void begin(const Operation &operation, const MessageName &name, const std::vector<size_t> &bytes);
  // PHX_OK once the calls of all hosts were compared. An error is that of this thread and has failed the group.
  phx_status poll(const Operation &operation);
  std::vector<int> late() const { return transfers_.late(); }

 private:
  struct Head {
    CallRecord record;
    uint32_t bytes;  // of data behind it
    uint32_t reserved[9];
  };
  static_assert(sizeof(Head) == kLine);
  phx_status compare(const Operation &operation);

  Net &net_;
  const Hosts &hosts_;
  const size_t bytes_;  // of a head and its room
  Scratch memory_;
  std::vector<size_t> expected_;
  bool begun_ = false, compared_ = false;
  Transfers transfers_;
};

// An operation whose data does not go with the heads. With several ranks on this host it has at least two rounds.
class BetweenHosts : public Operation {
 public:
  phx_status go_on(const Lane &lane, uint32_t round) final;
  phx_status compare() final { return heads_.poll(*this); }
  std::vector<int> late() const final;
  bool takes_input_at_once() const override { return false; }

 protected:
  BetweenHosts(const Plan &plan, const Buffers &buffers, size_t in_bytes, size_t windows);
  // The part of go_on that concerns the data. PHX_IN_PROGRESS: some of it has not come that `round` needs. Any other
  // error is that of a transfer. Unless overridden: chunk `round - kWindows` must have come, and at the end all chunks.
  virtual phx_status settle(uint32_t round);
  // Called when the transfers of a chunk are complete.
  virtual void finish(uint32_t /*chunk*/) {}
  // The name of a message of a chunk. The next number is free for a second one. None of them is 0 modulo 2^16, which is
  // the number of the head.
  MessageName name(uint32_t chunk) const { return {channel_, first_call, 1 + chunk * 4}; }
  // Whether every rank is alone on its host; the same on all ranks. Then nothing goes through slots.
  bool all_alone() const { return hosts_.count() == net_.group().size(); }
  void begin_heads() { heads_.begin(*this, {channel_, first_call, 0}, {}); }
  Transfers &window(uint32_t chunk) { return windows_[chunk % windows_.size()]; }

  Net &net_;
  const Hosts &hosts_;
  const int n_, self_;    // on this host
  const int all_, rank_;  // of the group
  uint32_t chunks_ = 1, settled_ = 0;
  std::deque<Transfers> windows_;

 private:
  const uint32_t channel_;
  Heads heads_;
};

// Moves chunks of one buffer, of each of which a part goes along each rail.
class OnRails : public BetweenHosts {
 protected:
  OnRails(const Plan &plan, const Buffers &buffers, size_t in_bytes)
      : BetweenHosts(plan, buffers, in_bytes, kWindows), rails_(hosts_.rails()) {}
  // `bytes`: of a part at most.
  void cut(size_t bytes) {
    part_ = std::max(kLine / b_.item, elements_in(bytes, b_.item));
    chunk_ = part_ * rails_;
    chunks_ = rounds_for(b_.count, chunk_);
  }
  bool has_part() const { return self_ < rails_; }
  size_t length(uint32_t chunk) const { return elements_of_round(b_.count, chunk_, chunk); }
  Span part(uint32_t chunk, int rail) const {
    const size_t all = length(chunk), each = part_elements(all, b_.item, rails_);
    return clip(all, rail * each, each);
  }

  const int rails_;
  size_t part_ = 0, chunk_ = 0;  // elements
};

// Large collectives: those that reduce, with root -1 if all ranks receive the result, and the others.
OperationPtr make_hosts_reduce(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                               int root);
OperationPtr make_hosts_move(Kind kind, const Plan &plan, const Buffers &buffers, int root);
// Whether a collective is a message for each pair of ranks, whatever its size: gather, scatter and all_to_all(_v).
constexpr bool in_pairs(Kind kind) {
  const CollectiveTraits &traits = traits_of(kind);
  return !traits.reduces && (has_blocks(traits.in) || traits.out == Parts::kAllOnRoot);
}

// A reduction in two steps: what each host gives, and then the reduction of what all have given. A host gives the
// reduction of its ranks' inputs, and the second step goes in the order of the hosts. Where the group reduces in the
// order of its ranks, a host gives the inputs themselves, one after another.
class TwoSteps {
 public:
  TwoSteps(const Reduction &whole, const Group &group);
  // How many addends a host gives, and all hosts before it do. `host` may be the number of hosts.
  size_t addends(int host) const { return before_[host + 1] - before_[host]; }
  size_t before(int host) const { return before_[host]; }
  // The first step, from the `count` elements of each rank of this host. `out` has as many for each addend.
  void on_host(void *out, const void *const *in, size_t count) const;
  // in[host]: what that host has given.
  void of_hosts(void *out, const void *const *in, size_t count) const;
  // Whether the first step of a single input is that input.
  bool keeps_one() const { return keeps_one_; }

 private:
  const Hosts &hosts_;
  const bool by_ranks_;
  std::vector<size_t> before_ = {0};
  kernels::ReduceFn local_, last_;
  double scale_;
  size_t item_;
  bool keeps_one_ = true;
};

}  // namespace phx
