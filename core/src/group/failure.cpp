// How a group fails: the first cause sticks, waiters wake, peers are told, and later calls say why.
#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>

#include "group/dump.h"
#include "group/group.h"

namespace phx {

ErrorInfo Group::cause() const {
  std::lock_guard<std::mutex> lock(cause_mutex_);
  return cause_;
}

bool Group::keep_cause(const ErrorInfo &cause, bool dumps) {
  std::lock_guard<std::mutex> lock(cause_mutex_);
  if (failed_.load(std::memory_order_relaxed) != 0) return false;
  cause_ = cause;
  copy_text(cause_.group, sizeof cause_.group, name().c_str());
  if (dumps) dump_is_due_.store(true);
  failed_.store(1, std::memory_order_release);
  return true;
}

void Group::interrupt(int only) {
  for (int i = 0; i < size(); ++i)
    if (only < 0 || only == i) interruptions_[i].store(1, std::memory_order_release);
  for (const auto &attachment : attachments_) attachment->on_failed();
  world_->monitor().poke();
}

phx_status Group::fail_with(const ErrorInfo &given, bool tell, int only) {
  const ErrorInfo cause = given;  // often the thread's last error, which the messages below may overwrite
  // One that leaves in good order is no failure to look into.
  const bool in_good_order = only >= 0 || std::strcmp(cause.operation, "world_finalize") == 0;
  const bool first = keep_cause(cause, !in_good_order);
  interrupt(only);
  if (tell && (first || may_tell())) tell_cause();
  if (first) after_interruption();
  return set_last_error(cause);
}

void Group::tell_cause() const {
  if (told_.exchange(true)) return;
  const ErrorInfo wire = cause();
  const Envelope envelope{kWireMagic, MessageKind::kRevoke, 0, id_, 0, sizeof wire, 0};
  for (const LinkRef &link : links_)
    if (link) world_->monitor().post(link, envelope, &wire);
}

void Group::after_interruption() {
  if (!dump_is_due_.exchange(false)) return;
  const ErrorInfo before = last_error();
  dump_failure(*this, cause());
  set_last_error(before);
}

void Group::revoke(const char *operation, const char *reason) {
  ErrorInfo cause = make_error_info();
  cause.status = PHX_ERR_REVOKED;
  cause.rank = cause.peer = self_rank();
  copy_text(cause.operation, sizeof cause.operation, operation);
  const std::string text =
      "rank " + std::to_string(self_rank()) + " revoked it: " + (reason != nullptr ? reason : "no reason given");
  copy_text(cause.text, sizeof cause.text, text.c_str());
  fail_with(cause, true);
}

void Group::withdraw() {
  if (may_tell()) fail_with(cause(), true);
}

phx_status Group::raise_revoked(const char *operation, uint64_t sequence) const {
  if (!reported_.load()) return raise_in_flight(operation, sequence);
  const ErrorInfo first = cause();
  fail(PHX_ERR_REVOKED, operation, "%s on group '%s': the group was revoked by an earlier failure: %s", operation,
       name().c_str(), first.text);
  ErrorInfo info = last_error();
  copy_text(info.group, sizeof info.group, name().c_str());
  info.rank = self_rank();
  info.peer = first.peer;
  info.sequence = sequence;
  return set_last_error(info);
}

phx_status Group::raise_in_flight(const char *operation, uint64_t sequence) const {
  reported_.store(true);
  ErrorInfo info = cause();
  char text[sizeof info.text];
  const int length = sequence != 0 ? std::snprintf(text, sizeof text, "%s #%" PRIu64 " on group '%s': ", operation,
                                                   sequence, name().c_str())
                                   : std::snprintf(text, sizeof text, "%s on group '%s': ", operation, name().c_str());
  const char *what = info.text;
  while (length > 0 && std::strncmp(what, text, static_cast<size_t>(length)) == 0) what += length;  // told by others
  if (length > 0 && static_cast<size_t>(length) < sizeof text) {
    copy_text(text + length, sizeof text - length, what);
    const std::string who = "rank " + std::to_string(info.rank);
    if (info.rank >= 0 && info.rank != self_rank() && std::strstr(text, who.c_str()) == nullptr)
      copy_text(text + std::strlen(text), sizeof text - std::strlen(text), (" (on " + who + ")").c_str());
  }
  copy_text(info.text, sizeof info.text, text);
  copy_text(info.operation, sizeof info.operation, operation);
  info.rank = self_rank();
  info.sequence = sequence;
  return set_last_error(info);
}

int32_t Group::pid_of(int group_rank) const {
  if (group_rank == params_.group_rank) return records_[group_rank].pid;
  return links_[group_rank] ? links_[group_rank]->pid : 0;
}

phx_status Group::raise_interrupted(const char *operation, uint64_t sequence) {
  reported_.store(true);
  ErrorInfo cause = begin_error(PHX_ERR_REVOKED, operation, sequence, group_rank());
  std::snprintf(cause.text, sizeof cause.text, "rank %d (pid %d) was interrupted", self_rank(), pid_of(group_rank()));
  fail_with(cause, true);
  ErrorInfo info = begin_error(PHX_ERR_INTERRUPTED, operation, sequence, group_rank());
  std::snprintf(info.text, sizeof info.text,
                "%s on group '%s': rank %d (pid %d) was interrupted while it waited. The group is revoked; the ranks "
                "can go on with a group that they shrink or make anew.",
                operation, name().c_str(), self_rank(), pid_of(group_rank()));
  return set_last_error(info);
}

std::string Group::describe(int group_rank) const {
  char text[96];
  const int32_t pid = pid_of(group_rank);
  std::snprintf(text, sizeof text, "rank %d (pid %d, %s)", rank_of(group_rank), pid, process_state(pid));
  return text;
}

std::string Group::describe(int group_rank, const Lane &lane) const {
  std::string text = describe(group_rank);
  text.pop_back();
  const Recorded last = lane.history_of(group_rank).newest();
  if (last.sequence == 0) return text + "; it has called nothing yet)";
  return text + "; its last call was " + describe_call(last.call) + " #" + std::to_string(last.sequence) + ")";
}

ErrorInfo Group::begin_error(phx_status status, const char *operation, uint64_t sequence, int group_rank) const {
  ErrorInfo info = make_error_info();
  info.status = status;
  info.rank = self_rank();
  info.peer = rank_of(group_rank);
  info.sequence = sequence;
  copy_text(info.operation, sizeof info.operation, operation);
  copy_text(info.group, sizeof info.group, name().c_str());
  return info;
}

void Group::tell_mismatch(ErrorInfo *info, int group_rank, const CallRecord &theirs, const CallRecord &mine) const {
  std::snprintf(info->text, sizeof info->text,
                "%s #%" PRIu64
                " on group '%s': rank %d (pid %d) called %s while rank %d called %s. Every rank of a group must call "
                "the same collectives in the same order with the same dtype, count, reduce op and root.",
                info->operation, info->sequence, name().c_str(), info->peer, pid_of(group_rank),
                describe_call(theirs).c_str(), self_rank(), describe_call(mine).c_str());
}

phx_status Group::raise_mismatch(const char *operation, uint64_t sequence, int group_rank, const CallRecord &theirs,
                                 const CallRecord &mine) {
  ErrorInfo info = begin_error(PHX_ERR_MISMATCH, operation, sequence, group_rank);
  tell_mismatch(&info, group_rank, theirs, mine);
  reported_.store(true);
  return fail_with(info, true);
}

phx_status Group::raise_await(const Lane &lane, const AwaitResult &result, const char *operation, uint64_t sequence,
                              uint64_t epoch, int32_t round, const CallRecord &record, int64_t timeout_ms) {
  if (result.failure() == AwaitFailure::kInterrupted) {
    withdraw();
    return raise_in_flight(operation, sequence);
  }
  if (result.failure() == AwaitFailure::kTimeout && interrupt_requested())
    return raise_interrupted(operation, sequence);
  const bool differ = result.failure() == AwaitFailure::kMismatch;
  ErrorInfo info = begin_error(differ ? PHX_ERR_MISMATCH : PHX_ERR_TIMEOUT, operation, sequence, result.group_rank());
  info.step = round;
  if (differ) {
    const CallRecord &theirs = lane.record(result.group_rank(), epoch);
    tell_mismatch(&info, result.group_rank(), theirs, record);
    if (kind_of(theirs) == Kind::kRefused) {
      const char *why = lane.data(result.group_rank(), epoch);
      const std::string text(why, strnlen(why, std::min(lane.slot_bytes(), sizeof info.text)));
      std::snprintf(info.text, sizeof info.text,
                    "%s #%" PRIu64
                    " on group '%s': rank %d (pid %d) refused its own call, while rank %d called %s. Its error: %s",
                    operation, sequence, name().c_str(), info.peer, pid_of(result.group_rank()), self_rank(),
                    describe_call(record).c_str(), text.c_str());
    }
  } else {
    std::string late;
    for (int i = 0; i < size(); ++i) {
      if (i == group_rank() || lane.arrived(epoch, i)) continue;
      if (!late.empty()) late += ", ";
      late += describe(i, lane);
    }
    if (late.empty()) late = describe(result.group_rank(), lane) + " with an earlier collective";
    std::snprintf(info.text, sizeof info.text,
                  "%s #%" PRIu64
                  " on group '%s': %s: rank %d still waits for %s. Look at why it is late, or raise timeout_ms.",
                  operation, sequence, name().c_str(), timed_out(timeout_ms).c_str(), self_rank(), late.c_str());
  }
  reported_.store(true);
  return fail_with(info, true);
}

phx_status Group::raise_turn(const char *operation, const char *what, int64_t timeout_ms, bool revokes) {
  if (interrupt_requested()) return raise_interrupted(operation);
  fail(PHX_ERR_TIMEOUT, operation,
       "%s on group '%s': %s: rank %d still waits for its turn: another thread of this rank is inside the same %s, or "
       "raise timeout_ms.",
       operation, name().c_str(), timed_out(timeout_ms).c_str(), self_rank(), what);
  amend_last_error(nullptr, name().c_str(), self_rank(), self_rank());
  if (!revokes) return PHX_ERR_TIMEOUT;
  reported_.store(true);
  return fail_with(last_error(), true);
}

void Group::on_block_freed(uint64_t block_serial) {
  for (const auto &attachment : attachments_) attachment->on_block_freed(block_serial);
}

bool Group::has_peer(const Uuid &uuid) const {
  for (size_t i = 0; i < records_.size(); ++i)
    if (static_cast<int>(i) != group_rank() && records_[i].uuid == uuid) return true;
  return false;
}

void Group::on_peer_gone(const Link &link, LinkState state, bool ended) {
  for (int i = 0; i < size(); ++i) {
    if (i == group_rank() || records_[i].uuid != link.uuid) continue;
    ErrorInfo info = make_error_info();
    info.status = PHX_ERR_PEER_DEAD;
    info.rank = ended ? -1 : self_rank();  // a death is one for all ranks, not for this one
    info.peer = rank_of(i);
    const bool left = state == LinkState::kLeft;
    const char *what = left                  ? "has left: its world was finalized"
                       : ended               ? "died"
                       : link.ending.empty() ? "closed its connection"
                                             : link.ending.c_str();
    std::snprintf(info.text, sizeof info.text, "rank %d (pid %d) %s", info.peer, link.pid, what);
    if (ended) {  // the others see it for themselves; and all groups are interrupted before any is looked into
      keep_cause(info, true);
      told_.store(true);
      interrupt(-1);
    } else {
      fail_with(info, !left, left ? i : -1);
    }
  }
}

// Told on: this rank may leave before the others have heard of it, who would then see only that.
void Group::on_revoked(const ErrorInfo &cause) { fail_with(cause, true); }

}  // namespace phx
