#include "ops/engine.h"

#include <cinttypes>
#include <cstdio>

#include "base/failpoint.h"
#include "net/net.h"

namespace phx {
namespace {

// How long a wait whose time is over still waits for its turn: what another thread of this rank is about to find out in
// the channel, that a rank does not come, is what this one waited for, too.
constexpr int64_t kTurnAfterMs = 1000;

const char *name_of(const Operation &operation) { return phx::name_of(operation.record); }

// Published in place of a call that this rank refused, so that ranks that make the call see that theirs differs.
class Refusal final : public Operation {
 public:
  explicit Refusal(const char *why) : Operation({}, 0), why_(why) {}
  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    copy_text(lane.data(lane.group_rank(), epoch), lane.slot_bytes(), why_.c_str());
  }

 private:
  const std::string why_;
};

}  // namespace

phx_status CollectiveWork::wait(int64_t timeout_ms) { return engine_->wait(*this, timeout_ms); }
phx_status CollectiveWork::test() { return engine_->test(*this); }

Engine::~Engine() {
  if (!pending_.empty()) group_->world().progress().ended(*this);
}

LazyDeadline Engine::deadline(int64_t timeout_ms) {
  LazyDeadline deadline(timeout_ms, &group_->world().progress(), this);
  deadline.set_text(WaitText(late_text_));
  return deadline;
}

phx_status Engine::raise(const AwaitResult &result, const Operation &operation, uint32_t round,
                         const LazyDeadline &deadline) {
  return group_->raise_await(*lane_, result, name_of(operation), operation.sequence, operation.first_epoch + round,
                             static_cast<int32_t>(round), operation.record, deadline.budget_ms());
}

// Raises the error that another thread of this rank has been inside this channel for the whole timeout. `revokes`: the
// call is not made, so this rank is out of step with the group. A thread that only waited may wait again.
phx_status Engine::raise_turn(const char *operation, const LazyDeadline &deadline, bool revokes) {
  const Recorded last = lane_->history_of(lane_->group_rank()).newest();
  const std::string holder = "channel with " + describe_call(last.call) + " #" + std::to_string(last.sequence) +
                             ". Use another channel for it";
  return group_->raise_turn(operation, holder.c_str(), deadline.budget_ms(), revokes);
}

// For the thread that holds mutex_: the oldest operation that is not complete, and the ranks of this host that have not
// come to it, or, where they all have, that have not ended an earlier one.
std::string Engine::LateText::operator()() const {
  const Lane &lane = *engine->lane_;
  const Hosts &hosts = engine->group_->hosts();
  const Recorded last = lane.history_of(lane.group_rank()).newest();
  CallRecord call = last.call;
  uint64_t sequence = last.sequence, epoch = lane.last_epoch();
  if (!engine->pending_.empty()) {
    const Operation &oldest = engine->pending_.front()->operation();
    call = oldest.record;
    sequence = oldest.sequence;
    epoch = oldest.first_epoch + oldest.taken;
  }
  std::vector<int> late;
  for (int i = 0; i < hosts.local_size(); ++i)
    if (i != lane.group_rank() && !lane.arrived(epoch, i)) late.push_back(hosts.local(i));
  for (int i = 0; i < hosts.local_size() && late.empty(); ++i)
    if (i != lane.group_rank() && !reached(lane.done_of(i), static_cast<uint32_t>(epoch - 1)))
      late.push_back(hosts.local(i));
  return engine->group_->still_waiting(phx::name_of(call), sequence, late);
}

// Whether a new operation can be published now: all older ones have been, the last of them is not exclusive, and this
// rank has a free slot.
bool Engine::has_room() const {
  if (pending_.empty()) return true;
  const Operation &newest = pending_.back()->operation();
  return newest.published == newest.rounds && !newest.exclusive() && has_free_slot();
}

// Whether this rank has a free slot. Precondition: an operation is pending, and it has been published.
bool Engine::has_free_slot() const {
  const Operation &oldest = pending_.front()->operation();
  return lane_->last_epoch() + 2 - (oldest.first_epoch + oldest.taken) < kSlots;
}

// Makes resident the memory of the slots that `operation` needs and no earlier operation has needed.
phx_status Engine::hold(const Operation &operation) {
  if (lane_->hold(name_of(operation), operation.reach) == PHX_OK) return PHX_OK;
  ErrorInfo info = last_error();
  std::snprintf(info.text, sizeof info.text,
                "%s #%" PRIu64
                " on group '%s': rank %d: the host ran out of memory for the staging of this group, up to %zu bytes. "
                "Free memory, raise the limit, or make the world with less staging_bytes.",
                name_of(operation), operation.sequence, group_->name().c_str(), group_->self_rank(),
                kSlots * lane_->slot_bytes());
  info.rank = group_->self_rank();
  info.sequence = operation.sequence;
  group_->fail_with(info, true);
  return group_->raise_in_flight(name_of(operation), operation.sequence);
}

// Fills and publishes the next round of `operation`. Precondition: no later operation has been published.
phx_status Engine::publish(Operation &operation, LazyDeadline &deadline) {
  const uint64_t epoch = lane_->last_epoch() + 1;
  if (operation.published == 0) operation.first_epoch = epoch;
  if (const AwaitResult room = lane_->reserve(deadline); !room)
    return raise(room, operation, operation.published, deadline);
  PHX_FAILPOINT(name_of(operation), 2);
  operation.put(*lane_, operation.published, epoch);
  uint64_t done = epoch - 1;  // all earlier epochs have been taken, unless older operations are not complete:
  if (operation.published == 0 && !pending_.empty()) {
    const Operation &oldest = pending_.front()->operation();
    done = oldest.first_epoch + oldest.taken - 1;
  }
  PHX_FAILPOINT(name_of(operation), 3);
  lane_->publish(operation.record, done, operation.place, operation.even);
  PHX_FAILPOINT(name_of(operation), 4);
  operation.keep_own(*lane_, operation.published++);
  return PHX_OK;
}

// Publishes the started operations for which there is room now. Never waits.
phx_status Engine::publish_queued(LazyDeadline &deadline) {
  for (size_t i = 0; i < pending_.size(); ++i) {
    Operation &operation = pending_[i]->operation();
    if (operation.published == operation.rounds) continue;
    if (operation.published > 0) return PHX_OK;  // its next round is not due yet, and nothing may overtake it
    if (i > 0 && (pending_[i - 1]->operation().exclusive() || !has_free_slot())) return PHX_OK;
    if (lane_->reserve_would_block()) return PHX_OK;
    const phx_status status = publish(operation, deadline);
    if (status != PHX_OK || operation.published != operation.rounds) return status;  // nothing may overtake its rounds
  }
  return PHX_OK;
}

// Some ranks have left their slots empty, because their inputs can be read where they lie. The operation reads them
// there if all ranks can; otherwise these ranks fill their slots now. All ranks look at the same input locations, so
// all decide in the same way.
phx_status Engine::use_places(Operation &operation, uint64_t epoch, LazyDeadline &deadline, bool may_block) {
  const InputLocation place = std::exchange(operation.place, {});
  const bool from_places = operation.takes_from_places(*lane_, epoch);
  if (!lane_->holds(operation.reach)) PHX_TRY(hold(operation));  // takes_from_places may have raised `reach`
  if (from_places) return PHX_OK;
  if (place.leaves_slot_empty()) {
    PHX_FAILPOINT("places", 1);
    operation.put(*lane_, 0, epoch);
    PHX_FAILPOINT("places", 2);
    lane_->publish_staged(epoch);
  }
  if (!may_block && lane_->staging_would_block(epoch)) return PHX_IN_PROGRESS;
  const AwaitResult staged = lane_->await_staged(epoch, deadline);
  return staged ? PHX_OK : raise(staged, operation, 0, deadline);
}

// Waits until the transfers of `operation` allow its next round, or its end.
phx_status Engine::await_transfers(Operation &operation, LazyDeadline &deadline, bool may_block) {
  phx_status status = operation.go_on(*lane_, operation.taken);
  if (status != PHX_IN_PROGRESS) return status;
  WaitResult result = WaitResult::kInterrupted;
  if (may_block)
    result = operation.net->wait(
        name_of(operation), deadline,
        [&] {
          status = operation.go_on(*lane_, operation.taken);
          return status == PHX_IN_PROGRESS ? WaitResult::kNothing : WaitResult::kReached;
        },
        [&] { return operation.late(); });
  else if (!operation.net->interrupted())
    return PHX_IN_PROGRESS;
  if (status != PHX_IN_PROGRESS) return status;
  return operation.net->raise_wait(name_of(operation), operation.sequence, result, operation.late(),
                                   deadline.budget_ms());
}

// A rank of this host that met a call which differs does not come; the heads tell how it does.
phx_status Engine::compare_before(uint64_t epoch, Operation &operation, LazyDeadline &deadline, bool may_block) {
  phx_status status = PHX_IN_PROGRESS;
  const auto look = [&] {
    const bool ends = !lane_->await_would_block(epoch) || (status = operation.compare()) != PHX_IN_PROGRESS;
    return ends ? WaitResult::kReached : WaitResult::kNothing;
  };
  if (may_block)
    operation.net->wait(name_of(operation), deadline, look, [&] { return operation.late(); });
  else
    look();
  return status == PHX_IN_PROGRESS ? PHX_OK : status;
}

// Runs the rounds of `operation` until it is complete or, unless `may_block`, until it would block.
phx_status Engine::advance(Operation &operation, LazyDeadline &deadline, bool may_block) {
  while (operation.taken < operation.rounds) {
    if (operation.published == operation.taken) {
      if (operation.net != nullptr && operation.taken != 0) PHX_TRY(await_transfers(operation, deadline, may_block));
      if (!may_block && lane_->reserve_would_block()) return PHX_IN_PROGRESS;
      PHX_TRY(publish(operation, deadline));
    }
    const uint64_t epoch = operation.first_epoch + operation.taken;
    if (operation.net != nullptr && operation.taken != 0)
      PHX_TRY(compare_before(epoch, operation, deadline, may_block));
    if (!may_block && lane_->await_would_block(epoch)) return PHX_IN_PROGRESS;
    const AwaitResult all = lane_->await(epoch, operation.record, deadline);
    if (!all) return raise(all, operation, operation.taken, deadline);
    PHX_FAILPOINT(name_of(operation), 5);
    if (operation.taken == 0 && (!all.staged() || operation.place.key != 0))
      PHX_TRY(use_places(operation, epoch, deadline, may_block));
    PHX_TRY(operation.take(*lane_, operation.taken, epoch));
    ++operation.taken;
  }
  if (operation.net != nullptr) PHX_TRY(await_transfers(operation, deadline, may_block));
  PHX_FAILPOINT(name_of(operation), 6);
  lane_->publish_done(operation.first_epoch + operation.rounds - 1);
  PHX_FAILPOINT(name_of(operation), 7);
  return PHX_OK;
}

phx_status Engine::complete_front(LazyDeadline &deadline, bool may_block) {
  const phx_status status = advance(pending_.front()->operation(), deadline, may_block);
  if (status == PHX_IN_PROGRESS) return status;
  const CollectiveWorkRef work = std::move(pending_.front());
  pending_.pop_front();
  if (pending_.empty()) group_->world().progress().ended(*this);
  lane_->history().end(work->operation().sequence, status);
  work->operation().end();
  work->settle(status);
  return status;
}

void Engine::number(Operation &operation) {
  operation.first_call = calls_ + 1;
  calls_ += operation.calls;
}

phx_status Engine::begin(Operation &operation) {
  operation.sequence = sequence() + 1;  // mutex_ is held: no other thread changes it
  sequence_.store(operation.sequence, std::memory_order_relaxed);
  number(operation);
  if (!group_->failed()) {
    if (!lane_->holds(operation.reach)) PHX_TRY(hold(operation));
    lane_->history().begin(operation.sequence, operation.record);
    PHX_FAILPOINT(name_of(operation), 1);
    return PHX_OK;
  }
  group_->withdraw();
  return group_->raise_revoked(name_of(operation), operation.sequence);
}

phx_status Engine::run(Operation &operation, int64_t timeout_ms) {
  LazyDeadline until = deadline(timeout_ms);
  Turn turn(mutex_, std::defer_lock);
  if (!take_turn(turn, until)) return raise_turn(name_of(operation), until, true);
  PHX_TRY(begin(operation));
  phx_status status = pending_.empty() ? PHX_OK : make_room(until);
  if (status == PHX_OK) status = publish(operation, until);
  if (status == PHX_OK && !pending_.empty()) status = complete_pending(until);
  if (status == PHX_OK) status = advance(operation, until, true);
  lane_->history().end(operation.sequence, status);
  return status;
}

// Completes started operations until a new one may be published. Their own errors are theirs.
phx_status Engine::make_room(LazyDeadline &until) {
  while (!pending_.empty() && !has_room()) {
    phx_status status = complete_front(until, true);
    if (status == PHX_OK) status = publish_queued(until);
    if (status != PHX_OK && group_->failed()) return status;
  }
  return PHX_OK;
}

phx_status Engine::complete_pending(LazyDeadline &until) {
  while (!pending_.empty()) {
    const phx_status status = complete_front(until, true);
    if (status != PHX_OK && group_->failed()) return status;
  }
  return PHX_OK;
}

phx_status Engine::start(OperationPtr operation, int64_t timeout_ms, bool keeps_input, WorkRef *out) {
  LazyDeadline none(1);
  auto work = std::make_shared<CollectiveWork>(this, std::move(operation));
  Operation &started = work->operation();
  LazyDeadline until = deadline(timeout_ms);
  Turn turn(mutex_, std::defer_lock);
  if (!take_turn(turn, until)) return raise_turn(name_of(started), until, true);
  // A refusal takes an epoch of the lane, but it is not a collective that was issued: it gets no sequence number and no
  // entry in the history.
  if (kind_of(started.record) == Kind::kRefused)
    number(started);
  else
    PHX_TRY(begin(started));
  if (has_room() && !lane_->reserve_would_block()) {
    if (const phx_status status = publish(started, none); status != PHX_OK) {
      lane_->history().end(started.sequence, status);
      return status;
    }
  }
  if (keeps_input && (started.published == 0 || !started.takes_input_at_once()))
    started.keep_input({group_->eager_bytes(), *kept_memory_});
  if (pending_.empty()) group_->world().progress().began(*this);
  pending_.push_back(work);
  if (started.net != nullptr && pending_.size() == 1) complete_front(none, false);  // its transfers begin
  *out = std::move(work);
  return PHX_OK;
}

phx_status Engine::wait(const CollectiveWork &work, int64_t timeout_ms) {
  if (work.complete()) return work.report();
  LazyDeadline until = deadline(timeout_ms);
  Turn turn(mutex_, std::defer_lock);
  if (!take_turn(turn, until)) {
    LazyDeadline after = deadline(kTurnAfterMs);
    if (!take_turn(turn, after))
      return work.complete() ? work.report() : raise_turn(name_of(work.operation()), until, false);
  }
  while (!work.complete()) {
    publish_queued(until);  // an error is returned again when its operation comes to the front
    complete_front(until, true);
  }
  return work.report();
}

phx_status Engine::test(const CollectiveWork &work) {
  if (work.complete()) return work.report();
  Turn lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return PHX_IN_PROGRESS;
  LazyDeadline none(1);
  while (!work.complete()) {
    publish_queued(none);
    if (complete_front(none, false) == PHX_IN_PROGRESS) return PHX_IN_PROGRESS;
  }
  return work.report();
}

bool Engine::advance_pending() {
  Turn lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock() || pending_.empty()) return false;
  LazyDeadline none(1);
  const CollectiveWorkRef front = pending_.front();
  const auto steps = [&] { return front->operation().published + front->operation().taken; };
  const auto before = steps();
  publish_queued(none);
  complete_front(none, false);
  return front->complete() || steps() != before;
}

// ---- the engines of a group

Collectives::Collectives(Group &group) : group_(group) {
  for (uint32_t i = 0; i < group.channels(); ++i) engines_.push_back(std::make_unique<Engine>(&group, &group.lane(i)));
}

void Collectives::open(const std::vector<char *> &) {
  for (const auto &engine : engines_) engine->begin_at(group_.first_count());
}

std::vector<ProgressSource *> Collectives::progress_sources() {
  std::vector<ProgressSource *> sources;
  for (const auto &engine : engines_) sources.push_back(engine.get());
  return sources;
}

// Skips channels that were never used: they have no waiters, and waking would touch their memory. A thread that uses
// one for the first time at this moment sees the interruption after a slice of its sleep.
void Collectives::on_failed() {
  for (uint32_t i = 0; i < group_.channels(); ++i)
    if (engines_[i]->sequence() != 0) group_.lane(i).wake_waiters();
}

phx_status Collectives::refuse(uint32_t channel) {
  const KeptError error;
  WorkRef work;
  OperationPtr refusal(new Refusal(error.info().text));
  if (group_.spans_hosts()) {
    const Plan plan{group_.lane(channel), group_.tuning(), true, &net_of(group_), channel};
    refusal = make_between_hosts(Kind::kRefused, plan, {}, {}, -1, error.info().text);
  }
  refusal->record.operation = static_cast<uint8_t>(Kind::kRefused);
  if (group_.may_refuse())
    engines_[channel]->start(std::move(refusal), group_.world().default_timeout_ms(), false, &work);
  return error.info().status;
}

}  // namespace phx
