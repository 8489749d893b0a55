#include "group/agree.h"

#include <cstring>

#include "base/failpoint.h"
#include "group/group.h"

namespace phx {
namespace {

static_assert(kMaxGroupSize + 2 < 1 << kRoundBits);
static_assert(sizeof(Vote) <= kMaxPayload);

const std::atomic<int32_t> kNoFailure{0};  // never set: a failure of the group does not end these waits

}  // namespace

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
    const int64_t left_ms = whole.left_ms();
    const Deadline deadline = Deadline::after_ms(round == 0 ? (left_ms + 1) / 2 : left_ms - left_ms / 4);
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
  if (may_tell() && take_turn(turn, until)) {
    Vote mine{~uint64_t{0}, 0, {}};
    mine.absent.set(static_cast<size_t>(group_rank()));
    const Envelope envelope{
        kWireMagic, MessageKind::kExchange, 0, id_, agreement_ordinal(++agreements_, 0), sizeof mine, 0};
    for (const LinkRef &link : links_)
      if (link) world_->monitor().post(link, envelope, &mine);
  }
  return error.info().status;
}

}  // namespace phx
