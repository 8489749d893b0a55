// Large collectives of groups that span hosts that only move data.
//
// all_gather: a rank sends its block to one rank of every other host, that at its own position there, and the ranks of
// a host pass on through their slots what has come. broadcast: the root puts a chunk into its slot; rank i of its host
// sends part i of it along rail i, and the ranks at the other ends pass the parts on. gather, scatter and all_to_all:
// within a host as in a group of that host alone; between hosts a message for each pair, from and into the callers'
// buffers.

#include "ops/hosts.h"

namespace phx {
namespace {

constexpr int kMostMessages = 1 << 13;  // that are under way for one block

// Window 0 has what this rank sends, and each further one the next `message_` elements of each block that comes.
class HostsAllGather final : public BetweenHosts {
 public:
  HostsAllGather(const Plan &plan, const Buffers &buffers)
      : BetweenHosts(plan, buffers, 0, 1), out_(output_blocks(buffers, all_)) {
    int others = 0;  // blocks that a rank of this host gets at most
    for (int position = 0; position < n_; ++position) {
      const auto blocks = gets(position);
      others = std::max(others, static_cast<int>(blocks.size()));
      gets_.push_back(blocks);
    }
    const size_t line = kLine / b_.item;
    // The ranks of a host may take as many rounds as suits them, but the messages are cut in the same way everywhere.
    const size_t large = all_alone() ? kMessageBytes : std::min(kMessageBytes, out_.largest() * b_.item / 8);
    const size_t cut = std::max(line, elements_in(std::max(large, kSlotBytes / 4), b_.item));
    const size_t room = elements_in(plan.lane.slot_bytes() / (1 + others), b_.item);
    segment_ = n_ == 1 ? std::max(out_.largest(), line) : std::max(line, std::min(cut, room));
    // As many messages as there are numbers for parts of a call, at most.
    message_ = std::max(cut, part_elements(out_.largest(), b_.item, kMostMessages));
    chunks_ = rounds_for(out_.largest(), segment_);
    rounds = n_ == 1 ? 1 : chunks_ + kWindows;
    reach = n_ == 1 ? 0 : (1 + others) * segment_ * b_.item;
    in_bytes_ = out_.count(rank_) * b_.item;
    rows_.resize(all_);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (n_ == 1) return;
    char *const slot = lane.data(self_, epoch);
    const size_t own = round < chunks_ ? length(rank_, round) : 0;
    if (own != 0) put_bytes(slot, b_.in + round * bytes(), own * b_.item);
    if (round < kWindows) return;
    const uint32_t chunk = round - kWindows;
    for (size_t i = 0; i < gets_[self_].size(); ++i) {
      const int rank = gets_[self_][i];
      out_.copy_to(slot + (1 + i) * bytes(), rank, chunk * segment_, length(rank, chunk));
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) {
      begin_heads();
      send();
      receive();
      if (n_ > 1) deliver_own(out_.count(rank_));
    }
    for (int i = 1; i < n_ && round < chunks_; ++i) {
      const int position = (self_ + i) % n_;
      deliver(hosts_.local(position), round, lane.data(position, epoch));
    }
    for (int i = 1; i < n_ && round >= kWindows; ++i) {
      const int position = (self_ + i) % n_;
      const char *from = lane.data(position, epoch);
      for (const int rank : gets_[position]) deliver(rank, round - kWindows, from += bytes());
    }
    return PHX_OK;
  }

 protected:
  // Chunk `round - kWindows` of all blocks that come must be there, and at the end all of them.
  phx_status settle(uint32_t round) override {
    const size_t due = round == rounds ? SIZE_MAX : round < kWindows ? 0 : (round - kWindows + 1) * segment_;
    while (arrived_ < due && 1 + arrived_ / message_ < windows_.size()) {
      Transfers &next = windows_[1 + arrived_ / message_];
      phx_status status = next.poll();
      while (status == PHX_IN_PROGRESS && own_ < out_.count(rank_)) {  // meanwhile
        deliver_own(elements_in(kSlotBytes, b_.item));
        status = next.poll();
      }
      if (status != PHX_OK) return status;
      unpack(arrived_);
      arrived_ += message_;
    }
    if (round == rounds) deliver_own(out_.count(rank_));
    return round == rounds ? window(0).poll() : PHX_OK;
  }

 private:
  size_t bytes() const { return segment_ * b_.item; }
  size_t length(int rank, uint32_t chunk) const { return elements_of_round(out_.count(rank), segment_, chunk); }
  // The ranks of other hosts whose blocks that rank of this host gets from them.
  std::vector<int> gets(int position) const {
    std::vector<int> ranks;
    for (int rank = 0; rank < all_; ++rank)
      if (!hosts_.is_here(rank) && hosts_.position(rank) % n_ == position) ranks.push_back(rank);
    return ranks;
  }
  void send() {
    const size_t count = out_.count(rank_);
    for (size_t at = 0; at < count; at += message_)
      for (int i = 1; i < hosts_.count(); ++i) {
        const int host = (hosts_.own() + i) % hosts_.count();
        window(0).send(hosts_.rank(host, self_ % hosts_.size(host)), name(static_cast<uint32_t>(at / message_)),
                       b_.in + at * b_.item, std::min(message_, count - at) * b_.item);
      }
  }
  void receive() {
    size_t most = 0;
    for (const int rank : gets_[self_]) most = std::max(most, out_.count(rank));
    for (size_t at = 0; at < most; at += message_) {
      windows_.emplace_back(net_);
      for (const int rank : gets_[self_]) {
        if (at >= out_.count(rank)) continue;
        const size_t count = std::min(message_, out_.count(rank) - at);
        char *to = out_.dense(rank, at);
        if (to == nullptr) {
          if (rows_[rank].data() == nullptr) rows_[rank] = Scratch(net_, out_.count(rank) * b_.item);
          to = rows_[rank].data() + at * b_.item;
        }
        windows_.back().recv(rank, name(static_cast<uint32_t>(at / message_)), to, count * b_.item);
      }
    }
  }
  void unpack(size_t at) {
    for (const int rank : gets_[self_]) {
      if (rows_[rank].data() == nullptr || at >= out_.count(rank)) continue;
      out_.fill(rank, at, std::min(message_, out_.count(rank) - at), rows_[rank].data() + at * b_.item);
    }
  }
  // Copies this rank's own block, or the next part of it, into the output.
  void deliver_own(size_t most) {
    const size_t count = std::min(most, out_.count(rank_) - own_);
    out_.fill(rank_, own_, count, b_.in + own_ * b_.item);
    own_ += count;
  }
  void deliver(int rank, uint32_t chunk, const char *from) const {
    out_.fill(rank, chunk * segment_, length(rank, chunk), from);
  }

  const Blocks out_;
  std::vector<std::vector<int>> gets_;  // by position
  size_t segment_, message_;            // elements
  size_t arrived_ = 0;                  // elements of each block that comes
  size_t own_ = 0;                      // elements of this rank's block that are in the output
  std::vector<Scratch> rows_;           // by rank: blocks that come and do not lie side by side
};

class HostsBroadcast final : public OnRails {
 public:
  HostsBroadcast(const Plan &plan, const Buffers &buffers, int root)
      : OnRails(plan, buffers, plan.net->group().group_rank() == root ? buffers.count * buffers.item : 0),
        is_root_(rank_ == root),
        root_(root),
        is_here_(hosts_.is_here(root)),
        streaming_(buffers.count * buffers.item >= plan.tuning.streaming_bytes) {
    const size_t room =
        elements_in(all_alone() ? kMessageBytes : std::min(plan.lane.slot_bytes(), kSlotBytes), b_.item);
    cut(room / rails_ * b_.item);
    rounds = n_ == 1 ? chunks_ : chunks_ + (is_here_ ? 1 : kWindows);
    reach = n_ == 1 ? 0 : chunk_ * b_.item;
    if (is_here_ && n_ > 1 && has_part())
      for (uint32_t i = 0; i < kWindows; ++i) memory_.emplace_back(net_, part_ * b_.item);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (n_ == 1) return;
    char *const slot = lane.data(self_, epoch);
    if (is_root_ && round < chunks_) put_bytes(slot, b_.in + round * chunk_ * b_.item, length(round) * b_.item);
    if (is_here_ || !has_part() || round < kWindows) return;
    const Span span = part(round - kWindows, self_);
    put_bytes(slot, at(round - kWindows, span.begin), span.count * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) begin_heads();
    if (round < chunks_ && has_part()) begin(lane, round, epoch);
    if (n_ == 1 || is_root_) return PHX_OK;
    if (is_here_ && round < chunks_) {
      deliver_bytes(at(round, 0), lane.data(hosts_.position(root_), epoch), length(round) * b_.item, streaming_);
    } else if (!is_here_ && round >= kWindows) {
      for (int i = 0; i < rails_; ++i) {
        if (i == self_) continue;
        const Span span = part(round - kWindows, i);
        deliver_bytes(at(round - kWindows, span.begin), lane.data(i, epoch), span.count * b_.item, streaming_);
      }
    }
    return PHX_OK;
  }

 private:
  char *at(uint32_t chunk, size_t element) const { return b_.out + (chunk * chunk_ + element) * b_.item; }

  void begin(const Lane &lane, uint32_t chunk, uint64_t epoch) {
    const Span span = part(chunk, self_);
    const size_t bytes = span.count * b_.item;
    if (bytes == 0) return;
    if (!is_here_)
      return window(chunk).recv(hosts_.rank(hosts_.of(root_), self_), name(chunk), at(chunk, span.begin), bytes);
    const char *from = b_.in + (chunk * chunk_ + span.begin) * b_.item;
    if (n_ > 1) {  // the slots are filled again before the data is sent
      char *const copy = memory_[chunk % kWindows].data();
      copy_bytes(copy, lane.data(hosts_.position(root_), epoch) + span.begin * b_.item, bytes);
      from = copy;
    }
    for (int i = 1; i < hosts_.count(); ++i)
      window(chunk).send(hosts_.rank((hosts_.own() + i) % hosts_.count(), self_), name(chunk), from, bytes);
  }

  const bool is_root_;
  const int root_;
  const bool is_here_;  // whether the root is on this host
  const bool streaming_;
  std::vector<Scratch> memory_;
};

// gather, scatter and all_to_all.
class HostsPairs final : public BetweenHosts {
 public:
  HostsPairs(Kind kind, const Plan &plan, const Buffers &buffers, int root)
      : BetweenHosts(plan, buffers, 0, 1),
        kind_(kind),
        root_(root),
        in_(gives() ? input_blocks(buffers, all_) : Blocks::shared(buffers.in, buffers.count, buffers.item)),
        out_(gets() ? output_blocks(buffers, all_) : Blocks::shared(buffers.out, buffers.count, buffers.item)),
        memory_(all_ * 2) {
    inner_ = make_inner(plan);
    rounds = inner_->rounds + more();
    reach = inner_->reach;
    even = inner_->even;
  }

  void keep_input(const Keeping &keeping) override {
    inner_->keep_input(keeping);
    if (kind_ != Kind::kScatter || rank_ == root_) in_.keep(keeping, &kept_);
  }
  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    inner_->first_epoch = first_epoch;
    if (round < inner_->rounds) inner_->put(lane, round, epoch);
  }
  void keep_own(const Lane &lane, uint32_t round) override {
    if (round < inner_->rounds) inner_->keep_own(lane, round);
  }
  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) {
      begin_heads();
      begin();
    }
    if (round >= inner_->rounds) return PHX_OK;
    const phx_status status = inner_->take(lane, round, epoch);
    rounds = inner_->rounds + more();
    // Counts that differ within a host are an error of all its ranks. The other hosts know nothing of it.
    return status == PHX_OK ? PHX_OK : net_.group().fail_with(last_error(), true);
  }
  bool exclusive() const override { return inner_->exclusive(); }

 protected:
  phx_status settle(uint32_t round) override { return round == rounds ? BetweenHosts::settle(round) : PHX_OK; }
  void finish(uint32_t) override {
    for (int rank = 0; rank < all_; ++rank)
      if (const char *const from = memory_[all_ + rank].data(); from != nullptr)
        out_.fill(rank, 0, out_.count(rank), from);
  }

 private:
  uint32_t more() const { return n_ > 1 ? 1 : 0; }  // rounds after those of the inner operation
  // Whether this rank has a block for every rank, and gets one from every rank.
  bool gives() const { return kind_ != Kind::kGather && (kind_ != Kind::kScatter || rank_ == root_); }
  bool gets() const { return kind_ != Kind::kScatter && (kind_ != Kind::kGather || rank_ == root_); }
  bool sends_to(int rank) const { return kind_ == Kind::kGather ? rank == root_ : gives(); }
  bool receives_from(int rank) const { return kind_ == Kind::kScatter ? rank == root_ : gets(); }

  // The collective of the ranks of this host, with their blocks. Where the root is on another host, it moves nothing.
  OperationPtr make_inner(const Plan &plan) const {
    if (kind_ != Kind::kAllToAll && kind_ != Kind::kAllToAllV && !hosts_.is_here(root_)) return make_barrier(plan);
    std::vector<phx_block> in, out;
    for (const int rank : hosts_.local_ranks()) {
      if (gives()) in.push_back(in_.block(rank));
      if (gets()) out.push_back(out_.block(rank));
    }
    const Lists lists{nullptr, nullptr, gives() ? in.data() : nullptr, gets() ? out.data() : nullptr};
    Buffers buffers = b_;
    buffers.lists = &lists;
    Plan local = plan;
    local.net = nullptr;
    // The blocks of this host do not lie one after another, whatever those of all ranks do.
    if (gives()) buffers.in = nullptr;
    if (gets()) buffers.out = nullptr;
    if (kind_ == Kind::kAllToAllV) return make_all_to_all_v(net_.group(), local, buffers);
    return make_operation(kind_, local, buffers, {}, root_ < 0 ? -1 : hosts_.position(root_));
  }

  void begin() {
    Transfers &transfers = window(0);
    for (int i = 1; i < all_; ++i) {
      const int from = (rank_ + i) % all_;
      if (hosts_.is_here(from) || !receives_from(from) || skips(out_.count(from))) continue;
      char *to = out_.dense(from, 0);
      if (to == nullptr) {
        memory_[all_ + from] = Scratch(net_, out_.count(from) * b_.item);
        to = memory_[all_ + from].data();
      }
      transfers.recv(from, name(0), to, out_.count(from) * b_.item);
    }
    for (int i = 1; i < all_; ++i) {
      const int to = (rank_ + i) % all_;
      if (hosts_.is_here(to) || !sends_to(to) || skips(in_.count(to))) continue;
      const char *from = in_.dense(to, 0);
      if (from == nullptr) {
        memory_[to] = Scratch(net_, in_.count(to) * b_.item);
        in_.copy_to(memory_[to].data(), to, 0, in_.count(to));
        from = memory_[to].data();
      }
      transfers.send(to, name(0), from, in_.count(to) * b_.item);
    }
  }
  // Nothing is sent for empty blocks, unless the receiver must hear that the sender has none.
  bool skips(size_t count) const { return count == 0 && kind_ != Kind::kAllToAllV; }

  const Kind kind_;
  const int root_;
  Blocks in_;
  const Blocks out_;
  OperationPtr inner_;
  std::vector<Scratch> memory_;  // by rank, for blocks in rows: what is sent, and then what comes
};

}  // namespace

OperationPtr make_hosts_move(Kind kind, const Plan &plan, const Buffers &buffers, int root) {
  if (kind == Kind::kBroadcast) return plan.make<HostsBroadcast>(plan, buffers, root);
  if (in_pairs(kind)) return plan.make<HostsPairs>(kind, plan, buffers, root);
  return plan.make<HostsAllGather>(plan, buffers);
}

}  // namespace phx
