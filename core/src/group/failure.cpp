// How a group fails: it keeps the first cause, wakes waiting threads, tells the peers, and fails later calls.

#include "group/group.h"

namespace phx {

ErrorInfo Group::cause() const {
  std::lock_guard<std::mutex> lock(cause_mutex_);
  return cause_;
}

bool Group::fails_within(int64_t ms) const {
  return Backoff(1000, 5000).until(Deadline::after_ms(ms), [&] { return failed(); });
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

phx_status Group::fail_with(const ErrorInfo &error, bool tell, int only) {
  const ErrorInfo cause = error;  // often the thread's last error, which the messages below may overwrite
  // A rank that leaves in good order is not a failure that needs a dump.
  const bool in_good_order = only >= 0 || std::strcmp(cause.operation, "world_finalize") == 0;
  const bool first = keep_cause(cause, !in_good_order);
  interrupt(only);
  if (tell && (first || may_tell())) tell_cause();
  if (first) after_interruption();
  return set_last_error(cause);
}

// A finalized world, a forked child, and a hook that runs inside another call must not send anything.
bool Group::may_tell() const { return size() > 1 && !world_->finalized() && !world_->forked() && !in_interrupt_hook(); }
bool Group::may_refuse() const { return may_tell() && !failed(); }

void Group::tell_cause() const {
  if (told_.exchange(true)) return;
  const ErrorInfo wire = cause();
  const Envelope envelope{kWireMagic, MessageKind::kRevoke, 0, id_, 0, sizeof wire, 0};
  for (const LinkRef &link : links_)
    if (link) world_->monitor().post(link, envelope, &wire);
}

void Group::after_interruption() {
  if (!dump_is_due_.exchange(false)) return;
  const KeptError kept;
  dump_failure(*this, cause());
}

void Group::on_finalized(const ErrorInfo &cause) {
  ends_well_ = ends_well();
  if (ends_well_)
    for (auto it = attachments_.rbegin(); it != attachments_.rend(); ++it) (*it)->flush();
  fail_with(cause, false);
}

void Group::revoke(const char *operation, const char *reason) {
  const std::string text =
      "rank " + std::to_string(self_rank()) + " revoked it: " + (reason != nullptr ? reason : "no reason given");
  fail_with(make_error(PHX_ERR_REVOKED, operation, self_rank(), self_rank(), text.c_str()), true);
}

void Group::withdraw() {
  if (may_tell()) fail_with(cause(), true);
}

phx_status Group::raise_revoked(const char *operation, uint64_t sequence) const {
  if (!reported_.load()) return raise_in_flight(operation, sequence);
  const ErrorInfo first = cause();
  return raise(PHX_ERR_REVOKED, operation, "the group was revoked by an earlier failure: %s", first.text)
      .peer(first.peer)
      .sequence(sequence);
}

phx_status Group::raise_in_flight(const char *operation, uint64_t sequence) const {
  reported_.store(true);
  ErrorInfo info = cause();
  const std::string begin = prefix({operation, sequence}), who = "rank " + std::to_string(info.rank);
  std::string text = info.text;
  while (text.compare(0, begin.size(), begin) == 0) text.erase(0, begin.size());  // other ranks have put it there
  text.insert(0, begin);
  if (info.rank >= 0 && info.rank != self_rank() && text.find(who) == std::string::npos) text += " (on " + who + ")";
  copy_text(info.text, sizeof info.text, text.c_str());
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
  fail_all(fail_text(PHX_ERR_REVOKED, operation, "rank %d (pid %d) was interrupted", self_rank(), pid_of(group_rank()))
               .in(name().c_str(), self_rank())
               .peer(self_rank())
               .sequence(sequence));
  return raise(PHX_ERR_INTERRUPTED, operation,
               "rank %d (pid %d) was interrupted while it waited. The group is revoked; the ranks can go on with a "
               "group that they shrink or make anew.",
               self_rank(), pid_of(group_rank()))
      .peer(self_rank())
      .sequence(sequence);
}

const char *Group::process_of(int group_rank) const {
  const LinkRef &link = links_[group_rank];
  return link ? link->process_state_text() : process_state(pid_of(group_rank));
}

std::string Group::still_waiting(const char *operation, uint64_t sequence, const std::vector<int> &late) const {
  constexpr size_t kMostNames = 16;
  std::string ranks = late.empty() ? "any rank" : late.size() == 1 ? "rank " : "ranks ";
  const size_t named = std::min(late.size(), kMostNames);
  for (size_t i = 0; i < named; ++i) {
    if (i > 0) ranks += i + 1 == late.size() ? " and " : ", ";
    ranks += std::to_string(rank_of(late[i]));
  }
  if (named < late.size()) ranks += " and " + std::to_string(late.size() - named) + " more";
  return "rank " + std::to_string(self_rank()) + ": still waiting for " + ranks + " on group '" + name() +
         "': " + operation + (sequence != 0 ? " #" + std::to_string(sequence) : "");
}

std::string Group::describe(int group_rank) const {
  return "rank " + std::to_string(rank_of(group_rank)) + " (pid " + std::to_string(pid_of(group_rank)) + ", " +
         process_of(group_rank) + ")";
}

std::string Group::advice(int group_rank) const {
  const std::string rank = std::to_string(rank_of(group_rank)), pid = std::to_string(pid_of(group_rank));
  return "Find out what rank " + rank + " is doing (for example `py-spy dump --pid " + pid +
         "`, or `phalanx trace`), or raise timeout_ms.";
}

std::string Group::describe(int group_rank, const Lane &lane) const {
  std::string text = describe(group_rank);
  text.pop_back();
  if (!hosts_.is_here(group_rank)) return text + ")";
  const Recorded last = lane.history_of(hosts_.position(group_rank)).newest();
  if (last.sequence == 0) return text + "; it has called nothing yet)";
  return text + "; its last call was " + describe_call(last.call) + " #" + std::to_string(last.sequence) + ")";
}

std::string Group::prefix(const CallName &call) const {
  return call.operation + (call.sequence != 0 ? " #" + std::to_string(call.sequence) : "") + " on group '" + name() +
         "': ";
}

Failed Group::raise(phx_status status, const CallName &call, const char *format, ...) const {
  va_list args;
  va_start(args, format);
  const Failed failed = fail_v(status, 0, call.operation, prefix(call).c_str(), format, args);
  va_end(args);
  return failed.in(name().c_str(), self_rank()).sequence(call.sequence);
}

phx_status Group::fail_all(const Failed &) {
  reported_.store(true);
  return fail_with(last_error(), true);
}

phx_status Group::raise_mismatch(const char *operation, uint64_t sequence, int group_rank, const CallRecord &theirs,
                                 const CallRecord &mine, int32_t step) {
  const bool graphs = theirs.op == kComparesGraphs || mine.op == kComparesGraphs;
  return fail_all(
      raise(PHX_ERR_MISMATCH, {operation, sequence}, "rank %d (pid %d) %s while rank %d %s%s", rank_of(group_rank),
            pid_of(group_rank), describe_act(theirs).c_str(), self_rank(), describe_act(mine).c_str(),
            graphs ? ": the ranks compiled different graphs. Every rank must compile the same model for inputs "
                     "of the same shapes, and call it in the same order."
                   : ". Every rank of a group must call the same collectives in the same order with the same "
                     "dtype, count, reduce op and root.")
          .peer(rank_of(group_rank))
          .step(step));
}

phx_status Group::raise_await(const Lane &lane, const AwaitResult &result, const char *operation, uint64_t sequence,
                              uint64_t epoch, int32_t round, const CallRecord &record, int64_t timeout_ms) {
  if (result.result() == WaitResult::kInterrupted) return raise_cause(operation, sequence);
  if (result.result() == WaitResult::kTimeout && interrupt_requested()) return raise_interrupted(operation, sequence);
  const int at = result.group_rank(), other = hosts_.local(at);
  if (result.result() == WaitResult::kMismatch) {
    const CallRecord &theirs = lane.record(at, epoch);
    const bool refused_here = kind_of(record) == Kind::kRefused;
    if (!refused_here && kind_of(theirs) != Kind::kRefused)
      return raise_mismatch(operation, sequence, other, theirs, record, round);
    const char *slot = lane.data(refused_here ? lane.group_rank() : at, epoch);
    const std::string why(slot, strnlen(slot, std::min(lane.slot_bytes(), sizeof ErrorInfo::text)));
    return refused_here ? raise_refusal(operation, sequence, group_rank(), other, theirs, why)
                        : raise_refusal(operation, sequence, other, group_rank(), record, why);
  }
  // In a later round the rank that is late may wait for another host, whose ranks know which of them did not come.
  if (round > 0 && hosts_.count() > 1 && fails_within(2 * verdict_ms(timeout_ms)))
    return raise_cause(operation, sequence);
  std::string late;
  for (int i = 0; i < hosts_.local_size(); ++i) {
    if (i == hosts_.local_rank() || lane.arrived(epoch, i)) continue;
    if (!late.empty()) late += ", ";
    late += describe(hosts_.local(i), lane);
  }
  if (late.empty()) late = describe(other, lane) + " to finish an earlier collective";
  return fail_all(raise(PHX_ERR_TIMEOUT, {operation, sequence}, "%s: rank %d still waits for %s. %s",
                        timed_out(timeout_ms).c_str(), self_rank(), late.c_str(), advice(other).c_str())
                      .peer(rank_of(other))
                      .step(round));
}

phx_status Group::raise_refusal(const char *operation, uint64_t sequence, int i, int other, const CallRecord &called,
                                const std::string &why) {
  return fail_all(raise(PHX_ERR_MISMATCH, {operation, sequence},
                        "rank %d (pid %d) refused its own call, while rank %d called %s. Its error: %s", rank_of(i),
                        pid_of(i), rank_of(other), describe_call(called).c_str(), why.c_str())
                      .peer(rank_of(i)));
}

phx_status Group::raise_transfer(const char *operation, uint64_t sequence, int i, const ErrorInfo &why) {
  const bool differs = why.status == PHX_ERR_MISMATCH;
  return fail_all(raise(why.status, {operation, sequence}, "%s %s %s: %s%s",
                        differs ? "a message of" : "the connection to", describe(i).c_str(),
                        differs ? "does not fit the call of this rank" : "was lost", why.text,
                        differs ? ". Every rank of a group must call the same collectives in the same order with "
                                  "the same dtype and counts."
                                : "")
                      .peer(rank_of(i)));
}

phx_status Group::raise_late(const char *operation, uint64_t sequence, const std::vector<int> &late,
                             int64_t timeout_ms) {
  std::string ranks;
  for (const int i : late) {
    // It may have left, which no rank was told of as a failure.
    if (interruptions_[i].load(std::memory_order_acquire) != 0) return raise_cause(operation, sequence);
    ranks += (ranks.empty() ? "" : ", ") + describe(i);
  }
  return fail_all(raise(PHX_ERR_TIMEOUT, {operation, sequence}, "%s: rank %d still waits for %s. %s",
                        timed_out(timeout_ms).c_str(), self_rank(), ranks.empty() ? "itself" : ranks.c_str(),
                        advice(late.empty() ? group_rank() : late[0]).c_str())
                      .peer(late.empty() ? self_rank() : rank_of(late[0])));
}

phx_status Group::raise_turn(const char *operation, const char *scope, int64_t timeout_ms, bool revokes) {
  if (interrupt_requested()) return raise_interrupted(operation);
  const Failed failed =
      raise(PHX_ERR_TIMEOUT, operation,
            "%s: rank %d still waits for its turn: another thread of this rank is inside the same %s, or raise "
            "timeout_ms",
            timed_out(timeout_ms).c_str(), self_rank(), scope)
          .peer(self_rank());
  return revokes ? fail_all(failed) : failed;
}

phx_status Group::take_turn(const char *operation, TurnMutex &mutex, const Deadline &deadline, const char *scope,
                            bool revokes, Turn *out) {
  LazyDeadline until(deadline, &world_->progress());
  *out = Turn(mutex, std::defer_lock);
  return phx::take_turn(*out, until) ? PHX_OK : raise_turn(operation, scope, deadline.budget_ms(), revokes);
}

bool Group::has_peer(const Uuid &uuid) const {
  for (size_t i = 0; i < records_.size(); ++i)
    if (static_cast<int>(i) != group_rank() && records_[i].uuid == uuid) return true;
  return false;
}

void Group::on_peer_gone(const Link &link, LinkState state, bool ended) {
  for (int i = 0; i < size(); ++i) {
    if (i == group_rank() || records_[i].uuid != link.uuid) continue;
    const bool left = state == LinkState::kLeft;
    const char *event = left                  ? "has left: its world was finalized"
                        : ended               ? "died"
                        : link.ending.empty() ? "closed its connection"
                                              : link.ending.c_str();
    const std::string text = "rank " + std::to_string(rank_of(i)) + " (pid " + std::to_string(link.pid) + ") " + event;
    // A death concerns all ranks, so no rank is named as the one that reports it.
    const ErrorInfo info = make_error(PHX_ERR_PEER_DEAD, "", ended ? -1 : self_rank(), rank_of(i), text.c_str());
    if (ended) {  // the others find out themselves; and all groups are interrupted before any is dumped
      keep_cause(info, true);
      told_.store(true);
      interrupt(-1);
    } else {
      fail_with(info, !left, left ? i : -1);
    }
  }
}

// Forwards the cause: this rank may leave before the others have received it, and they would see only that.
void Group::on_revoked(const ErrorInfo &cause) { fail_with(cause, true); }

}  // namespace phx
