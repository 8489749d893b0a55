// Groups derived from a group: over its connections, without a store.
#include <bitset>

#include "base/failpoint.h"
#include "group/group.h"

namespace phx {

struct Vote {
  uint64_t bits;
  uint64_t decided;  // 1: this is the decision
  std::bitset<kMaxGroupSize> absent;
  bool operator==(const Vote &o) const { return bits == o.bits && absent == o.absent; }
};
static_assert(sizeof(Vote) <= kMaxPayload);

namespace {

struct SplitChoice {  // sent by each rank in a split
  int32_t color;
  int32_t key;
};

constexpr const char *kSameDerivation =
    "group with a call that makes a group or agrees. Make such calls from one thread";

int64_t left_ms(const Deadline &deadline) { return std::max<int64_t>(deadline.left_ms(), 1); }
// The rest of the deadline, at least 1 ms.
Deadline left(const Deadline &deadline) { return deadline.part(left_ms(deadline)); }

// The ordinal of the messages of one round.
constexpr uint32_t kRoundBits = 16;
uint64_t agreement_ordinal(uint64_t agreement, uint64_t round) { return kAgreements | agreement << kRoundBits | round; }
static_assert(kMaxGroupSize + 2 < 1 << kRoundBits);

const std::atomic<int32_t> kNoFailure{0};  // never set: a failure of the group does not end the waits of an agreement

}  // namespace

// ---- agreement among the living ranks, which works even if the group has failed
//
// In each round every rank sends its vote (the AND of the bits, and which ranks are absent) to all others and merges
// theirs into it. A rank that has died, or sends nothing in time, becomes absent. A rank that receives its own vote
// from all ranks that are not absent has the decision. It sends the decision to the others, which adopt it: they may
// lack it because a rank died meanwhile. Every further round has one more absent rank, which limits the rounds to one
// more than the ranks.

void Group::send_vote(const Vote &vote, uint64_t ordinal, const Deadline &deadline) {
  const Envelope envelope{kWireMagic, MessageKind::kExchange, 0, id_, ordinal, sizeof vote, 0};
  for (int i = 0; i < size(); ++i) {
    if (!links_[i] || links_[i]->state.load() != LinkState::kAlive) continue;
    // Absent ranks get it too, so that they learn of it if they resume, but this rank does not wait for them to have
    // room. A failure to send shows in the wait for the answer.
    (void)send(i, envelope, &vote, nullptr, vote.absent[i] ? Deadline::after_ms(0) : deadline, kNoFailure);
  }
}

// Receives the vote of rank i in that round; false if rank i counts as absent.
bool Group::receive_vote(int i, uint64_t ordinal, const Deadline &deadline, Vote *out) {
  Message message;
  // If this process was stopped, the deadline may have passed while messages arrived that are still in the sockets.
  if (deadline.passed()) world_->monitor().catch_up();
  const phx_status status = world_->progress().keep_going(deadline, [&](const Deadline &until) {
    return world_->monitor().take(records_[i].uuid, id_, ordinal, until, kNoFailure, &message);
  });
  if (status != PHX_OK || message.payload.size() != sizeof *out) return false;
  std::memcpy(out, message.payload.data(), sizeof *out);
  return true;
}

phx_status Group::agree(const char *operation, const Deadline &whole, Vote *vote) {
  const uint64_t number = ++agreements_;
  // Drops late messages of earlier agreements.
  world_->monitor().discard(id_, agreement_ordinal(0, 0), agreement_ordinal(number, 0));
  Vote mine = *vote;
  for (uint64_t round = 0;; ++round) {
    // This rank waits for one that is alive but silent for half of the time in the first round, and for three quarters
    // of the rest in later rounds. So time is left for the others to agree that it is absent.
    const int64_t rest_ms = whole.left_ms();
    const Deadline deadline = Deadline::after_ms(round == 0 ? (rest_ms + 1) / 2 : rest_ms - rest_ms / 4);
    const Vote sent = mine;
    PHX_FAILPOINT("group_agree", 1);
    send_vote(sent, agreement_ordinal(number, round), deadline);
    PHX_FAILPOINT("group_agree", 2);
    // If the vote was sent too late, the others may have gone on without it, which their next votes tell.
    bool unanimous = !deadline.passed();
    int late = -1;
    const auto text = [&] { return late < 0 ? "" : still_waiting(operation, 0, {late}); };
    const LongWait long_wait(WaitText(text), whole);
    for (int i = 0; i < size() && mine.decided == 0; ++i) {
      if (i == group_rank() || sent.absent[i]) continue;
      late = i;
      Vote theirs;
      if (!receive_vote(i, agreement_ordinal(number, round), deadline, &theirs)) {
        mine.absent.set(i);
        unanimous = false;
        continue;
      }
      if (!(theirs == sent)) unanimous = false;
      if (theirs.decided != 0) {
        mine = theirs;
      } else {
        mine.bits &= theirs.bits;
        mine.absent |= theirs.absent;
      }
    }
    if (mine.decided == 0 && interrupt_requested()) {  // the others go on without this rank, as if it had died
      Vote leaving = mine;
      leaving.absent.set(group_rank());
      send_vote(leaving, agreement_ordinal(number, round + 1), Deadline::after_ms(0));
      return raise_interrupted(operation);
    }
    PHX_FAILPOINT("group_agree", 3);
    if (mine.absent[group_rank()])
      return raise(PHX_ERR_REVOKED, operation,
                   "rank %d came too late, and the others went on without it. Finalize its world; a new group needs a "
                   "new world.",
                   self_rank());
    // Deciding now could split the group: no peer could confirm it.
    if (!unanimous && mine.decided == 0 && whole.passed())
      return raise(PHX_ERR_TIMEOUT, operation, "%s: the ranks that are alive did not agree in time; raise timeout_ms",
                   timed_out(whole.budget_ms()).c_str());
    if (!unanimous && mine.decided == 0) {
      if (round < static_cast<uint64_t>(size())) continue;
      return raise(PHX_ERR_INTERNAL, operation,
                   "no agreement after %d rounds, though each has one more absent rank: a rank goes on changing its "
                   "mind. Its process is broken; end it.",
                   size() + 1);
    }
    mine.decided = 1;
    send_vote(mine, agreement_ordinal(number, round + 1), whole);
    PHX_FAILPOINT("group_agree", 4);
    *vote = mine;
    return PHX_OK;
  }
}

// A rank that refuses an agreement is absent from it, and says so: the others do not wait for it.
phx_status Group::refuse_agreement() {
  const KeptError error;
  LazyDeadline until(world_->default_timeout_ms(), &world_->progress());
  Turn turn(derive_mutex_, std::defer_lock);
  // This is done even if the group has failed, because agreements still work then.
  if (may_tell() && phx::take_turn(turn, until)) {
    Vote mine{~uint64_t{0}, 0, {}};
    mine.absent.set(static_cast<size_t>(group_rank()));
    const Envelope envelope{
        kWireMagic, MessageKind::kExchange, 0, id_, agreement_ordinal(++agreements_, 0), sizeof mine, 0};
    for (const LinkRef &link : links_)
      if (link) world_->monitor().post(link, envelope, &mine);
  }
  return error.info().status;
}

// ---- the new groups

GroupParams Group::derived(const std::string &name, const std::vector<int> &members, const std::string &number) const {
  GroupParams params;
  params.name = name;
  for (int member : members) {
    if (member == group_rank()) params.group_rank = static_cast<int>(params.ranks.size());
    params.ranks.push_back(rank_of(member));
  }
  params.attach = params_.attach;
  params.reduction_order = reduction_order_;
  params.key = params_.key + "/" + number;
  return params;
}

phx_status Group::split(int32_t color, int32_t key, const std::string &name, int64_t timeout_ms,
                        std::shared_ptr<Group> *out) {
  const char *operation = "group_split";
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn;
  PHX_TRY(take_turn(operation, derive_mutex_, deadline, kSameDerivation, true, &turn));
  const SplitChoice mine{color, key};
  std::vector<SplitChoice> all;
  PHX_TRY(exchange_all(operation, mine, deadline, &all));
  // Counted only after the exchange. If that fails on any rank, the group is revoked and there are no more splits.
  const std::string number = "split" + std::to_string(++splits_);
  std::vector<std::pair<int32_t, int>> order;  // key, rank
  for (int i = 0; i < size(); ++i)
    if (all[i].color == color) order.emplace_back(all[i].key, i);
  if (color < 0) return PHX_OK;
  std::sort(order.begin(), order.end());
  std::vector<int> members;
  for (const auto &member : order) members.push_back(member.second);
  return create_from(*this, members, derived(name, members, number), left(deadline), true, out);
}

phx_status Group::agree(uint64_t *bits, uint8_t *alive, int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn;
  PHX_TRY(take_turn("group_agree", derive_mutex_, deadline, kSameDerivation, false, &turn));
  Vote vote{*bits, 0, {}};
  PHX_TRY(agree("group_agree", left(deadline), &vote));
  *bits = vote.bits;
  for (int i = 0; alive != nullptr && i < size(); ++i) alive[i] = vote.absent[i] ? 0 : 1;
  return PHX_OK;
}

phx_status Group::shrink(const std::string &name, int64_t timeout_ms, std::shared_ptr<Group> *out) {
  const char *operation = "group_shrink";
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Turn turn;
  PHX_TRY(take_turn(operation, derive_mutex_, deadline, kSameDerivation, false, &turn));
  for (;;) {
    Vote survivors{~uint64_t{0}, 0, {}};
    PHX_TRY(agree(operation, left(deadline), &survivors));
    const std::string number = "shrink" + std::to_string(agreements_);  // the same on all ranks that have agreed
    std::vector<int> members;
    for (int i = 0; i < size(); ++i)
      if (!survivors.absent[i]) members.push_back(i);
    std::shared_ptr<Group> group;
    // Half of the time remains to agree on whether all survivors have the group, and for another attempt.
    const phx_status status = create_from(*this, members, derived(name, members, number),
                                          deadline.part((left_ms(deadline) + 1) / 2), false, &group);
    const ErrorInfo error = last_error();
    Vote outcome{status == PHX_OK ? uint64_t{1} : uint64_t{0}, 0, survivors.absent};
    PHX_TRY(agree(operation, left(deadline), &outcome));
    if (outcome.bits == 1) {
      *out = std::move(group);
      return PHX_OK;
    }
    if (!deadline.passed() && outcome.absent != survivors.absent) continue;  // another rank died meanwhile
    if (status != PHX_OK) return set_last_error(error);
    return raise(PHX_ERR_TIMEOUT, operation,
                 "%s: not all surviving ranks could make the new group; raise timeout_ms, or shrink again",
                 timed_out(timeout_ms).c_str());
  }
}

}  // namespace phx
