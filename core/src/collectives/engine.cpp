#include "collectives/engine.h"

#include "group/group.h"

namespace phx {

phx_status Engine::raise(const AwaitResult &result, const Operation &operation, uint32_t round,
                         const LazyDeadline &deadline) {
  return group_->raise_await(result, kind_name(static_cast<Kind>(operation.record.operation)), operation.sequence,
                             operation.first_epoch + round, static_cast<int32_t>(round), operation.record,
                             deadline.budget_ms());
}

// Fills and publishes the next round of `operation`, which must be the newest.
phx_status Engine::publish(Operation &operation, LazyDeadline &deadline) {
  if (const AwaitResult room = lane_->reserve(deadline); !room)
    return raise(room, operation, operation.published, deadline);
  const uint64_t epoch = lane_->last_epoch() + 1;
  operation.put(*lane_, operation.published, epoch);
  uint64_t done = epoch - 1;  // all that came before has been taken, except:
  if (operation.published > 0) {
    done = operation.done_after(epoch - 1);
  } else if (!pending_.empty()) {
    const Operation &oldest = *pending_.front()->operation;
    done = oldest.first_epoch + oldest.taken - 1;
  }
  lane_->publish(operation.record, done);
  ++operation.published;
  return PHX_OK;
}

phx_status Engine::begin(Operation &operation, LazyDeadline &deadline) {
  const char *name = kind_name(static_cast<Kind>(operation.record.operation));
  operation.sequence = sequence_.fetch_add(1, std::memory_order_relaxed) + 1;
  if (group_->failed()) return group_->raise_revoked(name, operation.sequence);
  const phx_status room = make_room(deadline);
  if (room != PHX_OK) return room;
  operation.first_epoch = lane_->last_epoch() + 1;
  return publish(operation, deadline);
}

// Goes on with the rounds of `operation` until it is complete or, when it must not block, until it would.
phx_status Engine::advance(Operation &operation, LazyDeadline &deadline, bool may_block) {
  while (operation.taken < operation.rounds) {
    if (operation.published == operation.taken) {
      if (!may_block && lane_->reserve_would_block()) return PHX_IN_PROGRESS;
      const phx_status status = publish(operation, deadline);
      if (status != PHX_OK) return status;
    }
    const uint64_t epoch = operation.first_epoch + operation.taken;
    if (!may_block && lane_->await_would_block(epoch)) return PHX_IN_PROGRESS;
    if (const AwaitResult all = lane_->await(epoch, operation.record, deadline); !all)
      return raise(all, operation, operation.taken, deadline);
    const phx_status status = operation.take(*lane_, operation.taken, epoch);
    if (status != PHX_OK) return status;
    ++operation.taken;
  }
  lane_->publish_done(operation.first_epoch + operation.rounds - 1);
  return PHX_OK;
}

void Engine::settle(Work &work, phx_status status) {
  if (status < 0) work.error = last_error();
  work.operation->symm.reset();
  work.state.store(status, std::memory_order_release);
}

phx_status Engine::complete_front(LazyDeadline &deadline, bool may_block) {
  const WorkRef work = pending_.front();
  const phx_status status = advance(*work->operation, deadline, may_block);
  if (status == PHX_IN_PROGRESS) return status;
  pending_.pop_front();
  settle(*work, status);
  return status;
}

// Before a new epoch: older operations with rounds still to publish must go first, and one slot must be free here.
phx_status Engine::make_room(LazyDeadline &deadline) {
  while (!pending_.empty()) {
    const Operation &oldest = *pending_.front()->operation;
    const Operation &newest = *pending_.back()->operation;
    const uint64_t in_flight = lane_->last_epoch() + 1 - (oldest.first_epoch + oldest.taken);
    if (newest.published == newest.rounds && in_flight + 1 < kSlots) break;
    const phx_status status = complete_front(deadline, true);
    if (status != PHX_OK) return status;
  }
  return PHX_OK;
}

phx_status Engine::run(Operation &operation, int64_t timeout_ms) {
  LazyDeadline deadline(timeout_ms);
  std::lock_guard<std::mutex> lock(mutex_);
  const phx_status status = begin(operation, deadline);
  if (status != PHX_OK) return status;
  while (!pending_.empty()) {
    const phx_status older = complete_front(deadline, true);
    if (older != PHX_OK) return older;
  }
  return advance(operation, deadline, true);
}

phx_status Engine::start(std::unique_ptr<Operation> operation, int64_t timeout_ms, WorkRef *out) {
  LazyDeadline deadline(timeout_ms);
  WorkRef work = std::make_shared<Work>();
  std::lock_guard<std::mutex> lock(mutex_);
  operation->blocking = false;
  const phx_status status = begin(*operation, deadline);
  if (status != PHX_OK) return status;
  work->operation = std::move(operation);
  pending_.push_back(work);
  *out = std::move(work);
  return PHX_OK;
}

phx_status Engine::report(const Work &work) {
  const int32_t state = work.state.load(std::memory_order_acquire);
  return state < 0 ? set_last_error(work.error) : state;
}

phx_status Engine::wait(const WorkRef &work, int64_t timeout_ms) {
  if (work->state.load(std::memory_order_acquire) != PHX_IN_PROGRESS) return report(*work);
  LazyDeadline deadline(timeout_ms);
  std::lock_guard<std::mutex> lock(mutex_);
  while (work->state.load(std::memory_order_acquire) == PHX_IN_PROGRESS) complete_front(deadline, true);
  return report(*work);
}

phx_status Engine::test(const WorkRef &work) {
  if (work->state.load(std::memory_order_acquire) != PHX_IN_PROGRESS) return report(*work);
  std::unique_lock<std::mutex> lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return PHX_IN_PROGRESS;
  LazyDeadline none(1);
  while (work->state.load(std::memory_order_acquire) == PHX_IN_PROGRESS)
    if (complete_front(none, false) == PHX_IN_PROGRESS) return PHX_IN_PROGRESS;
  return report(*work);
}

}  // namespace phx
