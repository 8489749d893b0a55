// What a rank does with its own windows and those of others. windows.cpp serves the ranks of other hosts.
#include "p2p/window.h"

#include <cstring>

#include "symm/table.h"

namespace phx {
namespace {

constexpr const char *kCreate = "window_create";

// What a rank tells the others of its memory.
struct WindowParcel {
  uint64_t number, offset, bytes;
};

}  // namespace

Window::~Window() { windows_.remove(*this); }

phx_status Window::check(const char *operation, int group_rank, size_t offset, size_t bytes) const {
  if (group_rank < 0 || group_rank >= group_.size())
    return fail(PHX_ERR_INVALID, operation, "group_rank is %d, but the group has %d ranks, numbered from 0", group_rank,
                group_.size());
  const uint64_t size = parts_[group_rank].bytes;
  if (bytes > size || offset > size - bytes)
    return fail(PHX_ERR_INVALID, operation,
                "%zu bytes at offset %zu end beyond the window of rank %d, which has %llu bytes", bytes, offset,
                group_.rank_of(group_rank), static_cast<unsigned long long>(size));
  return PHX_OK;
}

char *Window::memory(int group_rank) const {
  return is_here(group_rank) ? symm_->buffer(position(group_rank)) + parts_[group_rank].offset : nullptr;
}

phx_status Window::put(int group_rank, size_t offset, const void *data, size_t bytes, bool signal, int64_t timeout_ms) {
  if (!is_here(group_rank)) return windows_.put(*this, group_rank, offset, data, bytes, signal, timeout_ms);
  if (bytes != 0) std::memmove(memory(group_rank) + offset, data, bytes);
  return signal ? symm_->put_signal(position(group_rank), 0, "window_put") : PHX_OK;
}

phx_status Window::get(int group_rank, size_t offset, void *data, size_t bytes, int64_t timeout_ms) {
  if (bytes == 0) return PHX_OK;
  if (!is_here(group_rank)) return windows_.get(*this, group_rank, offset, data, bytes, timeout_ms);
  std::memmove(data, memory(group_rank) + offset, bytes);
  return PHX_OK;
}

phx_status Window::wait_signal(int group_rank, int64_t timeout_ms) {
  if (!is_here(group_rank)) return windows_.wait_signal(*this, group_rank, timeout_ms);
  return symm_->wait_signal(position(group_rank), 0, timeout_ms, "window_wait_signal");
}

uint32_t Window::signals(int group_rank) {
  if (is_here(group_rank)) return symm_->signals(position(group_rank), 0);
  windows_.advance_pending();
  return come_[group_rank].load(std::memory_order_acquire) - taken_[group_rank].load(std::memory_order_relaxed);
}

// Several threads may wait for signals of one rank; each takes one.
bool Window::take(int peer) {
  uint32_t taken = taken_[peer].load(std::memory_order_relaxed);
  while (come_[peer].load(std::memory_order_acquire) != taken)
    if (taken_[peer].compare_exchange_weak(taken, taken + 1, std::memory_order_relaxed)) return true;
  return false;
}

phx_status Windows::refuse() { return group_.refuse_exchange(); }

// The ranks of each host make a group, when the first window is created.
phx_status Windows::meet(const Deadline &deadline) {
  if (!group_.spans_hosts() || local_) return PHX_OK;
  std::shared_ptr<Group> made;
  const int64_t left_ms = std::max<int64_t>(deadline.left_ms(), 1);
  PHX_TRY(group_.split(group_.hosts().own(), 0, group_.name(), left_ms, &made));
  const std::lock_guard<std::mutex> lock(local_mutex_);
  local_ = std::move(made);
  return PHX_OK;
}

phx_status Windows::create(const BlockRef &block, size_t offset, size_t bytes, int64_t timeout_ms,
                           std::unique_ptr<Window> *out) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  LazyDeadline until(deadline, &group_.world().progress());
  Turn turn(turn_, std::defer_lock);
  if (!take_turn(turn, until))
    return group_.raise_turn(kCreate, "group with a new window. Let one thread make them", timeout_ms, true);
  std::unique_ptr<Window> window(new Window(*this, group_, next_++));
  window->parts_.resize(group_.size());
  window->parts_[group_.group_rank()] = {offset, bytes};
  window->block_ = block;
  add(window.get());  // before the others know of it

  std::vector<WindowParcel> all;
  const WindowParcel mine{window->number_, offset, bytes};
  phx_status status = group_.exchange_all(kCreate, mine, deadline, &all);
  if (status != PHX_OK) return status;
  for (int i = 0; i < group_.size(); ++i) {
    if (all[i].number != window->number_) return group_.raise_malformed(kCreate, i);
    window->parts_[i] = {all[i].offset, all[i].bytes};
  }
  status = meet(deadline);
  if (status != PHX_OK) return status;
  Group &sharing = local_ ? *local_ : group_;
  Turn rendezvous(symms_of(sharing).mutex(), std::defer_lock);
  if (!take_turn(rendezvous, until))
    return group_.raise_turn(kCreate, "group with a rendezvous. Let one thread make them", timeout_ms, true);
  status = Symm::rendezvous(sharing, block, deadline, &window->symm_);
  if (group_.spans_hosts()) status = group_.confirm(kCreate, status, deadline);
  if (status != PHX_OK) return status;
  *out = std::move(window);
  return PHX_OK;
}

}  // namespace phx
