#include "group/attempt.h"

#include <algorithm>
#include <cstring>

namespace phx {
namespace {

constexpr int64_t kTellMs = 1000;  // in case the store hangs: the others then fail at their own deadlines
const Uuid kNobody;

// The value that a rank that gives up writes to the store. The identities of all members whose records it has read
// follow: a rank that finds its own there knows that the failure is of the present attempt, not of an earlier run.
struct Failure {
  PeerRecord who;
  ErrorInfo why;
};

bool lists_member(const std::string &failure, const Uuid &member) {
  for (size_t at = sizeof(Failure); at + sizeof member <= failure.size(); at += sizeof member)
    if (std::memcmp(&failure[at], &member, sizeof member) == 0) return true;
  return false;
}

}  // namespace

bool Attempt::read_prefix(const std::string &value, PeerRecord *out) {
  if (value.size() < kPeerPrefix || std::memcmp(value.data(), kPeerMagic, sizeof kPeerMagic) != 0) return false;
  std::memcpy(static_cast<void *>(out), value.data(), kPeerPrefix);
  return true;
}

phx_status Attempt::refuse_build(const PeerRecord &theirs) const {
  const PeerRecord &mine = world_.record();
  return fail(PHX_ERR_ABI, kGroupCreate,
              "rank %d (pid %d) runs phalanx %s and rank %d (pid %d) runs phalanx %s; ranks of different builds "
              "would compute wrong values together. Install one build of phalanx-core for all ranks.",
              mine.rank, mine.pid, text_of(mine.build).c_str(), theirs.rank, theirs.pid, text_of(theirs.build).c_str())
      .peer(theirs.rank);
}

phx_status Attempt::look(const std::vector<PeerRecord> &records) {
  for (const PeerRecord &record : records) {
    if (record.uuid == kNobody || record.uuid == world_.record().uuid) continue;
    if (look_at(record) == PHX_OK) continue;
    const ErrorInfo ended = last_error();
    Uuid reporter;
    if (read_failure(records, &reporter) != PHX_OK && reporter == record.uuid) break;  // it gave up before it ended
    from_peer_ = false;
    return set_last_error(ended);
  }
  Uuid reporter;
  return from_peer_ ? last_error().status : read_failure(records, &reporter);
}

phx_status Attempt::look_at(const PeerRecord &record) {
  const LinkRef link = world_.monitor().find_link(record.uuid);
  const LinkState state = link ? link->state.load() : LinkState::kAlive;
  if (state == LinkState::kLeft || (state == LinkState::kDead && link->remote))
    return fail(PHX_ERR_PEER_DEAD, kGroupCreate, "rank %d (pid %d) %s", record.rank, record.pid, link->fate())
        .peer(record.rank);
  if (state == LinkState::kDead || (!link && !on_another_host(world_.record(), record) && has_ended(record)))
    return died(record);
  return PHX_OK;
}

phx_status Attempt::read_failure(const std::vector<PeerRecord> &records, Uuid *reporter) {
  std::string value;
  const ErrorInfo before = last_error();
  if (store_->get(key_.c_str(), &value, 1) != PHX_OK) {
    set_last_error(before);
    return PHX_OK;
  }
  Failure failure{};
  if (!read_prefix(value, &failure.who)) return PHX_OK;
  const bool same_build = failure.who.build == this_build();
  if (same_build && value.size() < sizeof failure) return PHX_OK;
  if (same_build) std::memcpy(static_cast<void *>(&failure), value.data(), sizeof failure);
  *reporter = failure.who.uuid;
  const bool known = (same_build && lists_member(value, world_.record().uuid)) ||
                     std::any_of(records.begin(), records.end(),
                                 [&](const PeerRecord &record) { return record.uuid == failure.who.uuid; });
  // The failure is of an earlier run with the same store, whose process has ended. (On another host that is unknown.)
  if (!known && (on_another_host(world_.record(), failure.who) || has_left(failure.who))) return PHX_OK;
  if (!same_build) {
    from_peer_ = true;
    return refuse_build(failure.who);
  }
  ErrorInfo &why = failure.why;
  why.text[sizeof why.text - 1] = '\0';
  if (why.status >= 0 || why.status < PHX_ERR_INTERNAL) why.status = PHX_ERR_INTERNAL;
  from_peer_ = true;
  return fail(why.status, kGroupCreate, "rank %d (pid %d) gave up: %s", failure.who.rank, failure.who.pid, why.text)
      .peer(why.peer >= 0 ? why.peer : failure.who.rank);
}

void Attempt::give_up(const std::vector<PeerRecord> &records) {
  const KeptError kept;
  const ErrorInfo &error = kept.info();
  const store::CallTimeout call_timeout(kTellMs);
  Uuid reporter;
  if (!from_peer_ && read_failure(records, &reporter) == PHX_OK) {
    Failure failure{world_.record(), error};
    if (error.status == PHX_ERR_INTERRUPTED) failure.why.status = PHX_ERR_REVOKED;  // the others were not interrupted
    std::string value(reinterpret_cast<const char *>(&failure), sizeof failure);
    for (const PeerRecord &record : records)
      if (record.uuid != kNobody) value.append(reinterpret_cast<const char *>(&record.uuid), sizeof record.uuid);
    store_->set(key_.c_str(), value.data(), value.size());
  }
}

}  // namespace phx
