#include "p2p/window.h"

#include "symm/table.h"

namespace phx {
namespace {

constexpr const char *kCreate = "window_create", *kPut = "window_put", *kGet = "window_get", *kFlush = "window_flush",
                     *kWait = "window_wait_signal";

bool is_large(size_t bytes) { return bytes > RemoteRing::kEagerBytes; }

// The name of the data of a large REPLY.
MessageName reply_name(uint32_t number) { return {MessageName::kWindowReplies, number, number >> 13}; }

ErrorInfo broken() {
  (void)fail_text(PHX_ERR_ABI, "window", "it sent malformed data; do all ranks run the same build of phalanx-core?");
  return last_error();
}

}  // namespace

// ---- what a rank does with its own windows and those of others

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
  Turn turn;
  PHX_TRY(group_.take_turn(kCreate, turn_, deadline, "group with a new window. Let one thread make them", true, &turn));
  std::unique_ptr<Window> window(new Window(*this, group_, next_++));
  window->parts_.resize(group_.size());
  const Window::Part mine{window->number_, offset, bytes};
  window->parts_[group_.group_rank()] = mine;
  window->block_ = block;
  add(window.get());  // before the others know of it

  std::vector<Window::Part> all;
  PHX_TRY(group_.exchange_all(kCreate, mine, deadline, &all));
  for (int i = 0; i < group_.size(); ++i) {
    if (all[i].number != window->number_) return group_.raise_malformed(kCreate, i);
    window->parts_[i] = all[i];
  }
  PHX_TRY(meet(deadline));
  Group &sharing = local_ ? *local_ : group_;
  Turn rendezvous;
  PHX_TRY(group_.take_turn(kCreate, symms_of(sharing).mutex(), deadline, kSameRendezvous, true, &rendezvous));
  phx_status status = Symm::rendezvous(sharing, block, deadline, &window->symm_);
  if (group_.spans_hosts()) status = group_.confirm(kCreate, status, deadline);
  if (status != PHX_OK) return status;
  *out = std::move(window);
  return PHX_OK;
}

// ---- between hosts

Windows::Get::~Get() {
  const Lock lock(windows.mutex_);
  for (Get *&each : windows.remote_[peer].waiting)
    if (each == this) each = nullptr;
}

void Windows::attend(bool want) {
  if (want == attends_) return;
  attends_ = want;
  Progress &progress = group_.world().progress();
  want ? progress.watch(*this) : progress.unwatch(*this);
}

void Windows::add(Window *window) {
  const Lock lock(mutex_);
  windows_[window->number_] = window;
  largest_ = std::max(largest_, static_cast<size_t>(window->parts_[group_.group_rank()].bytes));
  if (!group_.spans_hosts() || !remote_.empty()) return;
  remote_ = std::vector<Remote>(group_.size());
  for (int i = 0; i < group_.size(); ++i)
    if (is_remote(i)) remote_[i].ring = std::make_unique<RemoteRing>(net_of(group_), i, MessageName::kWindows);
  attend(true);
}

void Windows::on_failed() {
  std::shared_ptr<Group> local;
  if (group_.failed()) {
    const std::lock_guard<std::mutex> lock(local_mutex_);
    local = local_;
  }
  if (local) (void)local->fail_with(group_.cause(), false);
}

void Windows::flush() {
  const Lock lock(mutex_);
  const Deadline deadline = Deadline::after_ms(kPartingMs);
  for (Remote &remote : remote_)
    if (remote.ring) remote.ring->flush(deadline);
}

void Windows::close() {
  if (group_.ends_well()) flush();
  {
    const Lock lock(mutex_);
    attend(false);
    remote_.clear();
  }
  const std::lock_guard<std::mutex> lock(local_mutex_);
  local_.reset();
}

// ---- serving

bool Windows::advance_pending() {
  if (waiting_.load(std::memory_order_relaxed) != 0) return false;
  const Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) return false;  // another thread of this rank does that
  const KeptError kept;
  return advance();
}

bool Windows::advance() {
  if (group_.failed()) {
    attend(false);
    return false;
  }
  bool moved = false;
  for (size_t i = 0; i < remote_.size(); ++i)
    if (remote_[i].ring && !remote_[i].lost) moved |= serve(static_cast<int>(i));
  return moved;
}

bool Windows::serve(int peer) {
  Remote &remote = remote_[peer];
  bool moved = false;
  std::unique_ptr<ErrorInfo> lost;
  if (remote.ring->advance(&moved) != PHX_OK) lost = std::make_unique<ErrorInfo>(last_error());
  moved |= serve_requests(peer);
  if (lost && !remote.lost) remote.lost = std::move(lost);  // what had come was served before
  return moved;
}

bool Windows::serve_requests(int peer) {
  Remote &remote = remote_[peer];
  bool moved = false;
  const auto lose = [&](const ErrorInfo &why) { remote.lost = std::make_unique<ErrorInfo>(why); };
  while (!remote.replies.empty()) {
    const phx_status status = remote.replies.front().data.poll();
    if (status == PHX_IN_PROGRESS) break;
    if (status != PHX_OK) return lose(last_error()), true;
    remote.replies.pop_front();
    moved = true;
  }
  for (;; moved = true) {
    if (remote.incoming) {
      const phx_status status = remote.incoming->poll();
      if (status == PHX_IN_PROGRESS) return moved;
      if (status != PHX_OK) return lose(last_error()), true;
      remote.incoming.reset();
      remote.dropped = Scratch();
      remote.block.reset();
      if (remote.signal) count(peer, remote.window);
      continue;
    }
    Record record;
    RingResult result = remote.ring->peek(&record);
    const auto cost = eager_cost(record.bytes);
    const bool costs = record.kind != RecordKind::kReply;
    if (result == RingResult::kOk) result = serve_record(peer, record);
    if (result == RingResult::kNothing) return moved;
    if (result == RingResult::kBroken || (costs && !remote.ring->charge_peer(cost))) return lose(broken()), true;
    remote.ring->release();
    if (costs) remote.ring->give_back(cost);
  }
}

RingResult Windows::serve_record(int peer, const Record &record) {
  switch (record.kind) {
    case RecordKind::kPut: return serve_put(peer, record);
    case RecordKind::kGet: return serve_get(peer, record);
    case RecordKind::kReply: return take_reply(peer, record);
    default: return RingResult::kBroken;
  }
}

void Windows::count(int peer, uint32_t number) {
  if (Window *const window = find(number)) window->come_[peer].fetch_add(1, std::memory_order_release);
}

RingResult Windows::serve_put(int peer, const Record &record) {
  Remote &remote = remote_[peer];
  const Window *const window = find(record.head.tag);
  const size_t bytes = record.head.count;
  if (window != nullptr ? !window->holds(record.offset, bytes) : bytes > largest_) return RingResult::kBroken;
  if (record.bytes != (is_large(bytes) ? 0 : bytes)) return RingResult::kBroken;
  char *const place = window == nullptr ? nullptr : window->own() + record.offset;
  if (!is_large(bytes)) {
    if (place != nullptr && bytes != 0) std::memcpy(place, record.data, bytes);
    if (record.head.dtype != 0) count(peer, record.head.tag);
    return RingResult::kOk;
  }
  remote.window = record.head.tag;
  remote.signal = record.head.dtype != 0;
  if (place != nullptr)
    remote.block = window->block_;
  else
    remote.dropped = Scratch(net_of(group_), bytes);
  remote.incoming = std::make_unique<Transfers>(net_of(group_));
  remote.ring->receive_rest(*remote.incoming, remote.their_puts++, place != nullptr ? place : remote.dropped.data(),
                            bytes);
  return RingResult::kOk;
}

RingResult Windows::serve_get(int peer, const Record &record) {
  Remote &remote = remote_[peer];
  const size_t bytes = record.head.count;
  const Window *const window = bytes == 0 ? nullptr : find(record.head.tag);
  if (window != nullptr && !window->holds(record.offset, bytes)) return RingResult::kBroken;
  const bool gone = bytes != 0 && window == nullptr;
  Record reply{RecordKind::kReply, {0, gone ? 1 : 0, bytes}};
  if (window != nullptr && !is_large(bytes)) {
    reply.data = window->own() + record.offset;
    reply.bytes = bytes;
  }
  size_t taken = 0;
  if (remote.ring->put(reply, &taken) != RingResult::kOk) return RingResult::kNothing;
  const uint32_t number = remote.their_gets++;
  if (window == nullptr || !is_large(bytes)) return RingResult::kOk;
  remote.replies.push_back({Transfers(net_of(group_)), window->block_});
  remote.replies.back().data.send(peer, reply_name(number), window->own() + record.offset, bytes);
  return RingResult::kOk;
}

RingResult Windows::take_reply(int peer, const Record &record) {
  Remote &remote = remote_[peer];
  if (remote.waiting.empty()) return RingResult::kBroken;
  Get *const get = remote.waiting.front();
  remote.waiting.pop_front();
  if (get == nullptr) return RingResult::kOk;
  get->gone = record.head.dtype != 0;
  if (record.head.count != get->bytes) return RingResult::kBroken;
  if (record.bytes != (get->gone || is_large(get->bytes) ? 0 : get->bytes)) return RingResult::kBroken;
  if (record.bytes != 0) std::memcpy(get->out, record.data, record.bytes);
  get->answered = true;
  return RingResult::kOk;
}

// ---- asking

bool Windows::ask(int peer, const Record &record, bool *charged) {
  RemoteRing &ring = *remote_[peer].ring;
  if (!*charged && ring.charge(eager_cost(record.bytes)) != RingResult::kOk) return false;
  *charged = true;
  size_t taken = 0;
  return ring.put(record, &taken) == RingResult::kOk;
}

bool Windows::ask(Get &get, uint32_t window, size_t offset) {
  const Record record{RecordKind::kGet, {window, 0, get.bytes}, offset};
  if (!get.asked && ask(get.peer, record, &get.charged)) {
    Remote &remote = remote_[get.peer];
    get.asked = true;
    remote.waiting.push_back(&get);
    const uint32_t number = remote.gets++;
    if (is_large(get.bytes)) get.rest.recv(get.peer, reply_name(number), get.out, get.bytes);
  }
  return get.asked;
}

template <class Done>
WaitResult Windows::wait(const char *operation, int peer, int64_t timeout_ms, Done done) {
  const auto look = [&] {
    const Lock lock(mutex_);
    if (done()) return WaitResult::kReached;
    const KeptError kept;
    advance();
    if (done()) return WaitResult::kReached;
    return remote_[peer].lost ? WaitResult::kInterrupted : WaitResult::kNothing;
  };
  ++waiting_;
  LazyDeadline deadline(timeout_ms, &group_.world().progress(), this);
  const WaitResult result = net_of(group_).wait(operation, deadline, look, [&] { return std::vector<int>{peer}; });
  --waiting_;
  return result;
}

phx_status Windows::raise_lost(const char *operation, int peer) {
  {
    const Lock lock(mutex_);
    if (!remote_[peer].lost) return PHX_OK;
    (void)set_last_error(*remote_[peer].lost);
  }
  return net_of(group_).raise(operation, 0, peer);
}

// A request that is given up in the middle fails the group, because what is left of it cannot be told from the next.
phx_status Windows::raise(const char *operation, int peer, WaitResult result, int64_t timeout_ms) {
  const phx_status lost = raise_lost(operation, peer);
  return lost != PHX_OK ? lost : net_of(group_).raise_wait(operation, 0, result, {peer}, timeout_ms);
}

phx_status Windows::finish(const char *operation, int peer, WaitResult result, int64_t timeout_ms, Transfers &rest,
                           phx_status status) {
  if (result != WaitResult::kReached) return raise(operation, peer, result, timeout_ms);
  if (status == PHX_OK) return PHX_OK;
  (void)rest.poll();  // makes its error that of this thread again
  return net_of(group_).raise(operation, 0, peer);
}

phx_status Windows::put(const Window &window, int peer, size_t offset, const void *data, size_t bytes, bool signal,
                        int64_t timeout_ms) {
  if (group_.interruption(peer).load(std::memory_order_acquire) != 0) return group_.raise_revoked(kPut);
  Record record{RecordKind::kPut, {window.number_, signal ? 1 : 0, bytes}, offset};
  if (!is_large(bytes)) {
    record.bytes = bytes;
    record.data = static_cast<const char *>(data);
  }
  Transfers rest(net_of(group_));
  bool charged = false, asked = false;
  phx_status status = PHX_IN_PROGRESS;
  const WaitResult result = wait(kPut, peer, timeout_ms, [&] {
    if (!asked && ask(peer, record, &charged)) {
      Remote &remote = remote_[peer];
      asked = remote.unflushed = true;
      if (is_large(bytes)) remote.ring->send_rest(rest, remote.puts++, data, bytes);
    }
    if (asked) status = rest.poll();
    return status != PHX_IN_PROGRESS;
  });
  return finish(kPut, peer, result, timeout_ms, rest, status);
}

phx_status Windows::get(const Window &window, int peer, size_t offset, void *data, size_t bytes, int64_t timeout_ms) {
  if (group_.interruption(peer).load(std::memory_order_acquire) != 0) return group_.raise_revoked(kGet);
  Get get(*this, peer, data, bytes);
  phx_status status = PHX_IN_PROGRESS;
  const WaitResult result = wait(kGet, peer, timeout_ms, [&] {
    if (ask(get, window.number_, offset) && get.answered) status = get.gone ? PHX_OK : get.rest.poll();
    return status != PHX_IN_PROGRESS;
  });
  PHX_TRY(finish(kGet, peer, result, timeout_ms, get.rest, status));
  if (!get.gone) return PHX_OK;
  return group_.raise(PHX_ERR_NOT_FOUND, kGet, "%s has released the window", group_.describe(peer).c_str())
      .peer(group_.rank_of(peer));
}

phx_status Windows::flush(int64_t timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  std::deque<Get> asked;
  {
    const Lock lock(mutex_);
    for (size_t i = 0; i < remote_.size(); ++i) {
      if (!std::exchange(remote_[i].unflushed, false)) continue;
      asked.emplace_back(*this, static_cast<int>(i), nullptr, 0);
      ask(asked.back(), 0, 0);
    }
  }
  for (Get &get : asked) {
    const int64_t left_ms = std::max<int64_t>(deadline.left_ms(), 1);
    const WaitResult result = wait(kFlush, get.peer, left_ms, [&] { return ask(get, 0, 0) && get.answered; });
    if (result != WaitResult::kReached) return raise(kFlush, get.peer, result, timeout_ms);
  }
  return PHX_OK;
}

// The state of the group is not checked first: a signal that has arrived can be taken, whatever happened since.
phx_status Windows::wait_signal(Window &window, int peer, int64_t timeout_ms) {
  if (window.take(peer)) return PHX_OK;
  const WaitResult result = wait(kWait, peer, timeout_ms, [&] { return window.take(peer); });
  if (result == WaitResult::kReached) return PHX_OK;
  if (result == WaitResult::kInterrupted) {
    const phx_status lost = raise_lost(kWait, peer);
    return lost != PHX_OK ? lost : group_.raise_revoked(kWait);
  }
  if (interrupt_requested()) return group_.raise_interrupted(kWait);
  return group_
      .raise(PHX_ERR_TIMEOUT, kWait, "%s: rank %d still waits for a signal of %s. The call may be tried again. %s",
             group_.timed_out(timeout_ms).c_str(), group_.self_rank(), group_.describe(peer).c_str(),
             group_.advice(peer).c_str())
      .peer(group_.rank_of(peer));
}

}  // namespace phx
