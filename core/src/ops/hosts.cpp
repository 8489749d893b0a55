#include "ops/hosts.h"

#include <numeric>

namespace phx {

// ---- heads

Heads::Heads(const Plan &plan)
    : net_(*plan.net),
      hosts_(plan.net->group().hosts()),
      bytes_(sizeof(Head) + head_room(hosts_)),
      transfers_(*plan.net) {
  if (leads()) memory_ = Scratch(net_, bytes_ * static_cast<size_t>(hosts_.count()));
}

void Heads::begin(const Operation &operation, const MessageName &name, const std::vector<size_t> &bytes) {
  if (begun_ || !leads()) return;
  begun_ = true;
  expected_ = bytes;
  expected_.resize(hosts_.count(), 0);
  const size_t own = expected_[hosts_.own()];
  const Head head{operation.record, static_cast<uint32_t>(own), {}};
  const auto place = [&](int host) { return data(host) - sizeof head; };
  std::memcpy(place(hosts_.own()), &head, sizeof head);
  for (int i = 1; i < hosts_.count(); ++i) {
    const int host = (hosts_.own() + i) % hosts_.count(), rank = hosts_.rank(host, 0);
    transfers_.recv_some(rank, name, place(host), bytes_);
    transfers_.send(rank, name, place(hosts_.own()), sizeof head + own);
  }
}

phx_status Heads::poll(const Operation &operation) {
  if (!begun_ || compared_) return PHX_OK;
  const phx_status status = transfers_.poll();
  if (status == PHX_IN_PROGRESS) return status;
  if (status != PHX_OK) return net_.raise(name_of(operation.record), operation.sequence, transfers_.failed_peer());
  compared_ = true;
  return compare(operation);
}

phx_status Heads::compare(const Operation &operation) {
  for (int host = 0; host < hosts_.count(); ++host) {
    if (host == hosts_.own()) continue;
    Head head;
    std::memcpy(&head, data(host) - sizeof head, sizeof head);
    const bool same = head.record == operation.record;
    const bool refused = kind_of(head.record) == Kind::kRefused || kind_of(operation.record) == Kind::kRefused;
    if (same && (refused || head.bytes == expected_[host])) continue;
    const int rank = hosts_.rank(host, 0);
    if (!refused)
      return net_.group().raise_mismatch(name_of(operation.record), operation.sequence, rank, head.record,
                                         operation.record);
    if (kind_of(head.record) != Kind::kRefused) continue;  // the other host tells why this one refused
    const std::string why(data(host), strnlen(data(host), std::min<size_t>(head.bytes, head_room(hosts_))));
    return net_.group().raise_refusal(name_of(operation.record), operation.sequence, rank, net_.group().group_rank(),
                                      operation.record, why);
  }
  return PHX_OK;
}

namespace {

// Small collectives, a barrier and a refused call. The first rank of a host packs what its ranks have in their slots
// and sends it with the head; it puts what has come from all hosts into its slot, from where every rank takes its
// result. So there are two arrivals on each host and one message between two hosts. With one rank on this host there is
// no arrival to wait for.
class WithHeads final : public Operation {
 public:
  WithHeads(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root, const char *why)
      : Operation(buffers, 0),
        kind_(kind),
        traits_(traits_of(kind)),
        group_(plan.net->group()),
        hosts_(group_.hosts()),
        channel_(plan.channel),
        root_(root),
        reduction_(reduction, group_),
        heads_(plan),
        in_(input_blocks(buffers, group_.size())),
        out_(output_blocks(buffers, group_.size())),
        bytes_(hosts_.count(), 0),
        why_(why != nullptr ? why : "") {
    net = plan.net;
    rounds = hosts_.local_size() > 1 ? 2 : 1;
    in_bytes_ = own_bytes(group_.group_rank());
    for (int rank = 0; rank < group_.size(); ++rank) {
      size_t &all = bytes_[hosts_.of(rank)];
      all = traits_.reduces ? in_bytes_ * reduction_.addends(hosts_.of(rank)) : all + own_bytes(rank);
    }
    if (kind == Kind::kRefused) bytes_[hosts_.own()] = std::min(why_.size() + 1, head_room(hosts_));
    const size_t total = std::accumulate(bytes_.begin(), bytes_.end(), size_t{0});
    reach = rounds == 1 ? 0 : traits_.reduces ? in_bytes_ : std::max(in_bytes_, total);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (rounds == 1) return;
    char *const slot = lane.data(lane.group_rank(), epoch);
    if (round == 0) return kind_ == Kind::kRefused ? copy_text(slot, reach, why_.c_str()) : put_input(slot);
    if (heads_.leads()) finish(slot);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) {
      if (heads_.leads()) pack(lane, epoch);
      return PHX_OK;
    }
    const char *const result = lane.data(0, epoch);
    take_result(result,
                [&](int host) { return result + std::accumulate(bytes_.begin(), bytes_.begin() + host, size_t{0}); });
    return PHX_OK;
  }

  phx_status go_on(const Lane &, uint32_t round) override {
    const phx_status status = heads_.poll(*this);
    if (status != PHX_OK || rounds != 1 || round != 1 || done_) return status;
    done_ = true;
    char *const sums = kind_ == Kind::kAllReduce ? b_.out : heads_.own();
    if (traits_.reduces) finish(sums);
    take_result(sums, [&](int host) { return heads_.data(host); });
    return PHX_OK;
  }
  std::vector<int> late() const override { return heads_.late(); }
  bool takes_input_at_once() const override { return rounds == 2; }
  void keep_input(const Keeping &keeping) override {
    if (in_bytes_ == 0) return;
    Kept copy = keeping.memory.take(in_bytes_);
    put_input(copy.get());
    kept_ = std::move(copy);
  }

 private:
  // What a rank brings.
  size_t own_bytes(int rank) const {
    if (traits_.root == Root::kGives && rank != root_) return 0;
    const size_t count = traits_.in == Parts::kAll    ? in_.total()
                         : traits_.out == Parts::kAll ? out_.count(rank)
                                                      : b_.count;
    return count * b_.item;
  }
  void put_input(char *to) const {
    if (kept_) return put_bytes(to, kept_.get(), in_bytes_);
    if (traits_.in != Parts::kAll) return put_bytes(to, b_.in, in_bytes_);
    for (int i = 0; i < group_.size(); ++i) {
      in_.copy_to(to, i, 0, in_.count(i));
      to += in_.count(i) * b_.item;
    }
  }

  void pack(const Lane &lane, uint64_t epoch) {
    const int n = hosts_.local_size();
    char *to = heads_.own();
    if (kind_ == Kind::kRefused) {
      copy_text(to, bytes_[hosts_.own()], why_.c_str());
    } else if (traits_.reduces) {
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < n; ++i) inputs[i] = rounds == 1 ? to : lane.data(i, epoch);
      if (rounds == 1) put_input(to);
      if (in_bytes_ != 0 && (rounds != 1 || !reduction_.keeps_one()))
        reduction_.on_host(to, inputs, in_bytes_ / b_.item);
    } else {
      for (int i = 0; i < n; ++i) {
        const size_t bytes = own_bytes(hosts_.local(i));
        if (rounds == 1)
          put_input(to);
        else
          copy_bytes(to, lane.data(i, epoch), bytes);
        to += bytes;
      }
    }
    heads_.begin(*this, {channel_, first_call, 0}, bytes_);
  }

  // Writes what all ranks take their results from.
  void finish(char *to) {
    const int hosts = hosts_.count();
    if (traits_.reduces) {
      const void *inputs[kMaxGroupSize];
      for (int i = 0; i < hosts; ++i) inputs[i] = heads_.data(i);
      if (in_bytes_ != 0) reduction_.of_hosts(to, inputs, in_bytes_ / b_.item);
      return;
    }
    if (kind_ == Kind::kRefused) return;
    for (int i = 0; i < hosts; ++i) {
      copy_bytes(to, heads_.data(i), bytes_[i]);
      to += bytes_[i];
    }
  }

  // `sums`: of a collective that reduces; else from_host(i): what host i has brought.
  template <class FromHost>
  void take_result(const char *sums, FromHost from_host) const {
    const int self = group_.group_rank();
    const size_t bytes = b_.count * b_.item;
    if (traits_.out == Parts::kAll) {
      for (int host = 0; host < hosts_.count(); ++host) {
        const char *from = from_host(host);
        for (int i = 0; i < hosts_.size(host); ++i) {
          const int rank = hosts_.rank(host, i);
          out_.fill(rank, 0, out_.count(rank), from);
          from += out_.count(rank) * b_.item;
        }
      }
    } else if (traits_.in == Parts::kAll) {
      size_t before = 0;
      for (int i = 0; i < self; ++i) before += in_.count(i);
      copy_bytes(b_.out, sums + before * b_.item, in_.count(self) * b_.item);
    } else if (traits_.root == Root::kGives) {
      if (self != root_) copy_bytes(b_.out, from_host(hosts_.of(root_)), bytes);
    } else if (traits_.root == Root::kNone || self == root_) {
      copy_bytes(b_.out, sums, bytes);
    }
  }

  const Kind kind_;
  const CollectiveTraits &traits_;
  Group &group_;
  const Hosts &hosts_;
  const uint32_t channel_;
  const int root_;
  const TwoSteps reduction_;
  Heads heads_;
  Blocks in_, out_;
  std::vector<size_t> bytes_;  // of each host, with its head
  const std::string why_;
  bool done_ = false;
};

}  // namespace

// ---- what larger collectives share

BetweenHosts::BetweenHosts(const Plan &plan, const Buffers &buffers, size_t in_bytes, size_t windows)
    : Operation(buffers, in_bytes),
      net_(*plan.net),
      hosts_(plan.net->group().hosts()),
      n_(hosts_.local_size()),
      self_(hosts_.local_rank()),
      all_(plan.net->group().size()),
      rank_(plan.net->group().group_rank()),
      channel_(plan.channel),
      heads_(plan) {
  net = plan.net;
  for (size_t i = 0; i < windows; ++i) windows_.emplace_back(net_);
}

phx_status BetweenHosts::go_on(const Lane &, uint32_t round) {
  phx_status status = heads_.poll(*this);
  if (status != PHX_OK && status != PHX_IN_PROGRESS) return status;
  const phx_status settled = settle(round);
  // The heads hold up only the last round, and with it every rank of this host: a collective ends on no rank before it
  // has begun on all.
  if (settled == PHX_OK) return round + (n_ > 1 ? 1 : 0) >= rounds ? status : PHX_OK;
  if (settled == PHX_IN_PROGRESS) return settled;
  if (settled == PHX_ERR_MISMATCH && status == PHX_IN_PROGRESS) {  // the heads know both calls
    const KeptError kept;
    Backoff(1000, 5000).until(Deadline::after_ms(kComparisonMs), [&] {
      status = heads_.poll(*this);
      return status != PHX_IN_PROGRESS || net_.group().failed();
    });
  }
  for (Transfers &transfers : windows_)
    if (transfers.failed_peer() >= 0) return net_.raise(name_of(record), sequence, transfers.failed_peer());
  return net_.raise(name_of(record), sequence, -1);
}

phx_status BetweenHosts::settle(uint32_t round) {
  for (; settled_ < std::min(round, chunks_); ++settled_) {
    if (round != rounds && settled_ + kWindows > round) break;
    PHX_TRY(window(settled_).poll());
    finish(settled_);
  }
  return PHX_OK;
}

std::vector<int> BetweenHosts::late() const {
  for (const Transfers &transfers : windows_)
    if (std::vector<int> ranks = transfers.late(); !ranks.empty()) return ranks;
  return heads_.late();
}

TwoSteps::TwoSteps(const Reduction &whole, const Group &group)
    : hosts_(group.hosts()),
      // With one rank on each host the orders are the same.
      by_ranks_(group.reduces_by_ranks() || hosts_.count() == group.size()),
      local_(whole.fn),
      last_(whole.fn),
      scale_(whole.scale),
      item_(phx_dtype_size(whole.dtype)) {
  for (int host = 0; host < hosts_.count(); ++host)
    before_.push_back(before_.back() + (by_ranks_ ? hosts_.size(host) : 1));
  if (by_ranks_) return;
  if (whole.op == PHX_OP_AVG) local_ = kernels::find_reduce(whole.dtype, PHX_OP_SUM);
  if (whole.op != PHX_OP_PREMUL_SUM) return;
  last_ = kernels::find_reduce(whole.dtype, PHX_OP_SUM);
  keeps_one_ = false;
}

void TwoSteps::on_host(void *out, const void *const *in, size_t count) const {
  const int n = hosts_.local_size();
  if (!by_ranks_) return local_(out, in, n, count, n, scale_);
  for (int i = 0; i < n; ++i) copy_bytes(static_cast<char *>(out) + i * count * item_, in[i], count * item_);
}

void TwoSteps::of_hosts(void *out, const void *const *in, size_t count) const {
  const int hosts = hosts_.count(), ranks = hosts_.ranks();
  if (!by_ranks_) return last_(out, in, hosts, count, ranks, scale_);
  const void *inputs[kMaxGroupSize];
  for (int rank = 0; rank < ranks; ++rank)
    inputs[rank] = static_cast<const char *>(in[hosts_.of(rank)]) + hosts_.position(rank) * count * item_;
  last_(out, inputs, ranks, count, ranks, scale_);
}

OperationPtr make_between_hosts(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                                int root, const char *why) {
  const Group &group = plan.net->group();
  const Hosts &hosts = group.hosts();
  const CollectiveTraits &traits = traits_of(kind);
  if (in_pairs(kind)) return make_hosts_move(kind, plan, buffers, root);
  size_t most_on_host = 0;
  for (int host = 0; host < hosts.count(); ++host) most_on_host = std::max<size_t>(most_on_host, hosts.size(host));
  const Blocks in = input_blocks(buffers, group.size()), out = output_blocks(buffers, group.size());
  // What one host sends with its head. The slots must hold the results.
  size_t with_head = buffers.item * (traits.in == Parts::kAll    ? in.total()
                                     : traits.out == Parts::kAll ? out.largest() * most_on_host
                                                                 : buffers.count);
  const size_t result = traits.out == Parts::kAll ? out.total() * buffers.item : with_head;
  // Where the addends of several ranks travel and not their sum.
  const bool lays = traits.reduces && group.reduces_by_ranks() && most_on_host > 1;
  if (lays) with_head *= most_on_host;
  const size_t room = head_room(hosts) / (is_pair(hosts) || (traits.reduces && !lays) ? 1 : 2);
  if (with_head <= room && result <= plan.lane.slot_bytes())
    return plan.make<WithHeads>(kind, plan, buffers, reduction, root, why);
  return traits.reduces ? make_hosts_reduce(kind, plan, buffers, reduction, root)
                        : make_hosts_move(kind, plan, buffers, root);
}

}  // namespace phx
