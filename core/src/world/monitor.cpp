#include "world/monitor.h"

#include <linux/sockios.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <cstdio>
#include <cstring>
#include <new>

#include "base/wait.h"

namespace phx {
namespace {

constexpr size_t kMaxStrangers = 64;
constexpr int64_t kCrowdedMs = 20;      // a rank sends its hello at once
constexpr size_t kHostListener = 1;     // of the event loop
constexpr uint32_t kMaxQueued = 4096;   // messages of one peer that this rank has not asked for yet
constexpr uint32_t kMaxQueuedFds = 64;  // descriptors in these messages
constexpr size_t kMaxEarly = 1024;
constexpr size_t kMaxOutbox = 4096;    // unsent messages to one peer; it learns of the rest by its deadlines
constexpr int64_t kFarewellMs = 1000;  // for running peers to take the last messages

// With the monitor's mutex held: a message leaves the inbox.
void uncount(Link &link, const Message &message) {
  if (message.asked) return;
  link.queued -= 1;
  link.queued_fds -= static_cast<uint32_t>(message.fds.size());
}

// Whether the kernel of a remote peer has not confirmed yet all that was sent. If this process closed its connection
// with unread messages in it, the rest would be dropped.
bool is_on_the_way(const Link &link) {
  int bytes = 0;
  return link.remote && link.socket.valid() && ioctl(link.socket.get(), SIOCOUTQ, &bytes) == 0 && bytes > 0;
}

}  // namespace

phx_status Monitor::start() {
  Fd listener;
  PHX_TRY(listen_abstract(socket_name(self_.uuid), &listener));
  return EventLoop::start("world_create", "phx-monitor", std::move(listener),
                          {kMaxStrangers, kHandshakeMs, kCrowdedMs});
}

void Monitor::stop() {
  if (stopped_.exchange(true)) return;
  std::vector<LinkRef> links;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &entry : links_) links.push_back(entry.second);
  }
  say_goodbye(links);
  stopping_.store(true);
  EventLoop::stop();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto &entry : links_) {  // also those that were made meanwhile
    entry.second->state.store(LinkState::kLeft);
    entry.second->close();
  }
  pending_.clear();
  dials_by_fd_.clear();
  dials_.clear();
  by_fd_.clear();
  inbox_.clear();
  changed_.notify_all();
}

// The goodbye follows the messages that are not sent yet. A peer that takes nothing sees the connection close instead.
void Monitor::say_goodbye(const std::vector<LinkRef> &links) {
  const Envelope goodbye{kWireMagic, MessageKind::kGoodbye, 0, 0, 0, 0, 0};
  for (const LinkRef &link : links) post(link, goodbye, nullptr);
  const auto is_served = [](const LinkRef &link) {
    {
      std::lock_guard<std::mutex> lock(link->send_mutex);
      if (link->outbox.empty() && !is_on_the_way(*link)) return true;
    }
    return link->gone() || std::strcmp(link->process_state_text(), "stopped") == 0;
  };
  Backoff(1000, 1000).until(Deadline::after_ms(runs() ? kFarewellMs : 0), [&] {
    return std::all_of(links.begin(), links.end(), is_served);
  });
}

void Monitor::post(const LinkRef &link, const Envelope &envelope, const void *payload) {
  if (link->gone()) return;
  std::lock_guard<std::mutex> lock(link->send_mutex);
  int error = 0;
  if (link->outbox.empty()) {
    const Sent sent = try_send_locked(*link, envelope, payload, nullptr, &error);
    if (sent != Sent::kFull) return;  // failed: the peer is gone, and the end of its connection will say so
  }
  if (link->outbox.size() >= kMaxOutbox) return;
  std::string bytes(reinterpret_cast<const char *>(&envelope), sizeof envelope);
  if (payload != nullptr) bytes.append(static_cast<const char *>(payload), envelope.payload_bytes);
  link->outbox.push_back(std::move(bytes));
  arm(*link);
}

void Monitor::arm(const Link &link) const {
  if (link.socket.valid()) change_events(link.socket.get(), link.outbox.empty() ? EPOLLIN : EPOLLIN | EPOLLOUT);
}

void Monitor::flush(const LinkRef &link) {
  std::lock_guard<std::mutex> lock(link->send_mutex);
  flush_outbox_locked(*link);
  if (link->outbox.empty()) arm(*link);
}

// ---- the thread

// Without the monitor nothing would be seen of the peers any more, so every group fails, also those made later. This
// takes no memory, because the want of it may be the reason.
bool Monitor::goes_on_after(const std::exception &error) {
  const char *why = error.what();
  PHX_LOG(PHX_LOG_ERROR, "the monitor thread of rank %d ended: %s", self_.rank, why);
  ErrorInfo cause;
  cause.status = std::strcmp(why, std::bad_alloc().what()) == 0 ? PHX_ERR_NO_MEMORY : PHX_ERR_INTERNAL;
  cause.rank = self_.rank;
  copy_text(cause.operation, sizeof cause.operation, "monitor");
  std::snprintf(cause.text, sizeof cause.text,
                "the monitor thread of rank %d (pid %d), which watches its peers, ended: %s. Make a new world.",
                self_.rank, self_.pid, why);
  bool first = true;
  for (uint64_t last = 0;; first = false) {
    std::shared_ptr<GroupListener> group;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      broken_ = cause;
      auto next = first ? groups_.begin() : groups_.upper_bound(last);
      while (next != groups_.end() && !(group = next->second.listener.lock())) ++next;
      if (next == groups_.end()) break;
      last = next->first;
    }
    try {
      group->on_revoked(cause);
    } catch (const std::exception &) {  // the group has failed by then; its peers learn of it when the world ends
    }
  }
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
  return false;
}

void Monitor::on_wake() {
  std::lock_guard<std::mutex> lock(mutex_);
  woken_ = asked_;
}

void Monitor::after_events(bool any) {
  const int64_t now = now_ns();
  if (now >= redial_ns_.load()) redial();
  if (now >= chore_ns_.load()) do_chore();
  if (any || caught_up_ == woken_) return;
  std::lock_guard<std::mutex> lock(mutex_);
  caught_up_ = woken_;
  changed_.notify_all();
}

void Monitor::on_event(int fd, uint32_t events) {
  if (pending_.count(fd) != 0) return greet(fd);
  LinkRef link;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (dials_by_fd_.count(fd) != 0) return advance_dial(fd);
    const auto found = by_fd_.find(fd);
    if (found == by_fd_.end()) {
      if (fd == chore_fd_) chore_ns_.store(0);
      return;
    }
    link = found->second;
  }
  if ((events & EPOLLOUT) != 0) flush(link);
  if ((events & ~EPOLLOUT) != 0) read_link(link);
}

void Monitor::on_accept(Fd fd, size_t listener) {
  const int number = fd.get();
  const bool remote = listener == kHostListener;
  if (remote) {
    tune_host_connection(number);
  } else if (const ucred peer = peer_credentials(number); peer.uid != self_.uid) {
    PHX_LOG(PHX_LOG_WARNING, "refused a connection from pid %d of user %u: ranks of a group must run as one user",
            peer.pid, peer.uid);
    return end_handshake(number);
  }
  pending_[number] = std::make_unique<Stranger>(std::move(fd), self_, remote);
  watch_fd(number);
  greet(number);
}

void Monitor::on_late(int fd) {
  PHX_LOG(PHX_LOG_WARNING, "closed a connection from %s, which ended no handshake in time",
          pending_.at(fd)->name().c_str());
  close_stranger(fd);
}

void Monitor::close_stranger(int fd) {
  pending_.erase(fd);
  end_handshake(fd);
}

// ---- the links

void Monitor::greet(int fd) {
  Stranger &stranger = *pending_.at(fd);
  const Stranger::Step step = stranger.advance();
  if (step == Stranger::Step::kWaits) return;
  const bool valid = step == Stranger::Step::kProven;
  const LinkRef known = valid ? find_link(stranger.peer()) : nullptr;
  const bool connected = known && !known->gone();
  if (!valid && !stranger.said_nothing())
    PHX_LOG(PHX_LOG_WARNING, "refused a malformed or unauthorised handshake from %s", stranger.name().c_str());
  else if (connected)
    PHX_LOG(PHX_LOG_WARNING, "refused a handshake from %s: rank %d (pid %d) is connected already",
            stranger.name().c_str(), known->rank, known->pid);
  if (!valid || connected) return close_stranger(fd);
  const LinkRef link = stranger.make_link();
  close_stranger(fd);
  const Welcome welcome{kWireMagic, self_.rank, self_.uuid};
  if (!send_record(fd, &welcome, sizeof welcome)) return;
  std::lock_guard<std::mutex> lock(mutex_);
  keep(link);
  changed_.notify_all();
}

void Monitor::keep(const LinkRef &link) {
  by_fd_[link->socket.get()] = link;
  if (link->pidfd.valid()) {
    by_fd_[link->pidfd.get()] = link;
    watch_fd(link->pidfd.get());
  }
  // The caller of this function holds send_mutex and has an open socket, so this monitor has not ended.
  link->on_outbox = [this, kept = link.get()] { arm(*kept); };
  links_[link->uuid] = link;
}

void Monitor::read_link(const LinkRef &link) {
  Receive got = Receive::kMessage;
  while (got == Receive::kMessage) {
    Message message;
    got = receive_message(*link, &message);
    if (got == Receive::kMessage) deliver(link, std::move(message));
    if (link->gone()) return;
  }
  pollfd entry{link->pidfd.get(), POLLIN, 0};
  if (got == Receive::kNothing) {
    // An event, but not of the socket: the pidfd says that the process has ended.
    if (!link->pidfd.valid() || poll(&entry, 1, 0) <= 0) return;
  } else if (got == Receive::kMalformed) {
    PHX_LOG(PHX_LOG_ERROR, "rank %d (pid %d) sent a malformed message; its connection is closed", link->rank,
            link->pid);
    link->ending = "sent a malformed message, so this rank closed its connection";
  } else {
    // The sockets of a dying process close a moment before its pidfd says that it has ended.
    if (link->pidfd.valid()) poll(&entry, 1, 20);
    if (link->remote) link->ending = why_lost(*link);
  }
  end_link(link, LinkState::kDead);
}

void Monitor::deliver(const LinkRef &link, Message &&message) {
  switch (message.envelope.kind) {
    case MessageKind::kGoodbye: end_link(link, LinkState::kLeft); return;
    case MessageKind::kDeath: on_death(message); return;
    case MessageKind::kExchange: {
      std::unique_lock<std::mutex> lock(mutex_);
      const uint64_t group_id = message.envelope.group_id, ordinal = message.envelope.ordinal;
      const auto group = groups_.find(group_id);
      if (group == groups_.end() && retired_.count(group_id) != 0) return;
      if (group != groups_.end()) {
        const uint64_t number = ordinal & ~kDescriptors;  // far above all exchanges for a message ring or an agreement
        if (number <= group->second.passed) return;
        // Each peer sends at most one message ring to each group.
        message.asked = number == group->second.asked || ordinal == kRing;
      }
      const Key key{link->uuid, group_id, ordinal};
      if (message.asked && inbox_.count(key) != 0) return;  // no correct rank sends it twice
      if (!message.asked) {
        link->queued += 1;
        link->queued_fds += static_cast<uint32_t>(message.fds.size());
      }
      if (link->queued > kMaxQueued || link->queued_fds > kMaxQueuedFds) {
        lock.unlock();
        PHX_LOG(PHX_LOG_ERROR, "rank %d (pid %d) sent %u messages with %u descriptors that nobody asked for",
                link->rank, link->pid, link->queued, link->queued_fds);
        link->ending = "sent " + std::to_string(link->queued) + " messages with " + std::to_string(link->queued_fds) +
                       " descriptors that nobody asked for, so this rank closed its connection";
        end_link(link, LinkState::kDead);
        return;
      }
      inbox_[key] = std::move(message);
      changed_.notify_all();
      return;
    }
    case MessageKind::kRevoke: {
      ErrorInfo cause;
      if (message.payload.size() != sizeof cause) return;
      std::memcpy(&cause, message.payload.data(), sizeof cause);
      cause.struct_size = sizeof cause;
      if (cause.status >= 0 || cause.status < PHX_ERR_INTERNAL)
        cause.status = PHX_ERR_REVOKED;  // whatever status a peer sends: the group has failed
      cause.operation[sizeof cause.operation - 1] = cause.group[sizeof cause.group - 1] =
          cause.text[sizeof cause.text - 1] = '\0';
      std::shared_ptr<GroupListener> group;
      {
        std::lock_guard<std::mutex> lock(mutex_);
        auto found = groups_.find(message.envelope.group_id);
        if (found != groups_.end()) group = found->second.listener.lock();
        if (!group && retired_.count(message.envelope.group_id) == 0) {
          if (early_revocations_.size() >= kMaxEarly) early_revocations_.erase(early_revocations_.begin());
          early_revocations_[message.envelope.group_id] = cause;
          drop_messages(message.envelope.group_id, 0, UINT64_MAX);  // no call of this rank will take them any more
        }
      }
      if (group) group->on_revoked(cause);
      return;
    }
  }
}

// A peer reports that another peer's process has ended. The messages that the ended one has sent before count, so they
// are read first; and this rank checks for itself that the process has ended.
void Monitor::on_death(const Message &message) {
  Uuid uuid;
  if (message.payload.size() != sizeof uuid) return;
  std::memcpy(&uuid, message.payload.data(), sizeof uuid);
  const LinkRef link = find_link(uuid);
  if (!link || link->gone() || !link->process_has_ended()) return;
  read_link(link);
  if (!link->gone()) end_link(link, LinkState::kDead);
}

template <class Is>
void Monitor::drop_messages(Is is) {
  for (auto it = inbox_.begin(); it != inbox_.end();) {
    if (!is(it->first, it->second)) {
      ++it;
      continue;
    }
    const auto link = links_.find(it->first.from);
    if (link != links_.end()) uncount(*link->second, it->second);
    it = inbox_.erase(it);
  }
}

void Monitor::end_link(const LinkRef &link, LinkState state) {
  std::vector<LinkRef> others;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    by_fd_.erase(link->socket.get());
    if (link->pidfd.valid()) by_fd_.erase(link->pidfd.get());
    for (const auto &entry : links_)
      if (entry.second != link) others.push_back(entry.second);
  }
  unwatch_fd(link->socket.get());
  if (link->pidfd.valid()) unwatch_fd(link->pidfd.get());
  const bool ended = state == LinkState::kDead && link->process_has_ended();
  link->state.store(state);
  std::vector<std::shared_ptr<GroupListener>> groups;
  for (const auto &group : listeners())
    if (group->has_peer(link->uuid)) groups.push_back(group);
  for (const auto &group : groups) group->on_peer_gone(*link, state, ended);
  // Every rank sees a death for itself. But this one may leave at once, and the others must not hear of that first.
  const Envelope death{kWireMagic, MessageKind::kDeath, 0, 0, 0, sizeof link->uuid, 0};
  if (ended)
    for (const LinkRef &other : others) post(other, death, &link->uuid);
  for (const auto &group : groups) group->after_interruption();
  link->close();
  std::lock_guard<std::mutex> lock(mutex_);
  // Its messages may still count, as in an agreement. The descriptors of a peer that left in good order do so too: it
  // had what it needed, and others may still be reading. Those of a dead peer are useless: its groups have failed.
  drop_messages([&](const Key &key, const Message &message) {
    const bool useless = state == LinkState::kDead || groups_.count(key.group_id) == 0;
    return key.from == link->uuid && !message.fds.empty() && useless;
  });
  changed_.notify_all();
}

// ---- for the other threads

LinkRef Monitor::find_link(const Uuid &uuid) const {
  std::lock_guard<std::mutex> lock(mutex_);
  auto found = links_.find(uuid);
  return found == links_.end() ? nullptr : found->second;
}

void Monitor::adopt(const LinkRef &link) {
  std::lock_guard<std::mutex> lock(mutex_);
  watch_fd(link->socket.get());
  keep(link);
}

void Monitor::watch(uint64_t group_id, std::weak_ptr<GroupListener> listener) {
  std::shared_ptr<GroupListener> group = listener.lock();
  ErrorInfo cause;  // PHX_OK: the group was not revoked yet
  std::vector<LinkRef> ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    groups_[group_id].listener = std::move(listener);
    retired_.erase(group_id);
    auto early = early_revocations_.find(group_id);
    if (early != early_revocations_.end()) {
      cause = early->second;
      early_revocations_.erase(early);
    }
    if (broken_.status != PHX_OK) cause = broken_;
    for (const auto &entry : links_)
      if (entry.second->gone()) ended.push_back(entry.second);
  }
  // A peer that ended between its handshake and now was not reported to this group.
  for (const LinkRef &link : ended)
    if (group->has_peer(link->uuid))
      group->on_peer_gone(*link, link->state.load(),
                          link->state.load() == LinkState::kDead && link->process_has_ended());
  if (cause.status != PHX_OK) group->on_revoked(cause);
}

void Monitor::unwatch(uint64_t group_id) {
  std::lock_guard<std::mutex> lock(mutex_);
  groups_.erase(group_id);
  early_revocations_.erase(group_id);
  retired_.insert(group_id);
  drop_messages(group_id, 0, UINT64_MAX);
}

void Monitor::discard(uint64_t group_id, uint64_t from, uint64_t to) {
  std::lock_guard<std::mutex> lock(mutex_);
  drop_messages(group_id, from, to);
}

void Monitor::begin_exchange(uint64_t group_id, uint64_t ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto group = groups_.find(group_id);
  if (group == groups_.end()) return;
  group->second.asked = ordinal;
  for (const auto &link : links_) {  // messages that came earlier were not asked for when they came
    const auto early = inbox_.find({link.first, group_id, ordinal});
    if (early == inbox_.end() || early->second.asked) continue;
    uncount(*link.second, early->second);
    early->second.asked = true;
  }
}

void Monitor::end_exchange(uint64_t group_id, uint64_t ordinal) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto group = groups_.find(group_id);
  if (group == groups_.end()) return;
  group->second.asked = 0;
  group->second.passed = std::max(group->second.passed, ordinal);
  for (const auto &link : links_) {
    for (const uint64_t number : {ordinal, ordinal | kDescriptors}) {
      const auto late = inbox_.find({link.first, group_id, number});
      if (late == inbox_.end()) continue;
      uncount(*link.second, late->second);
      inbox_.erase(late);
    }
  }
}

void Monitor::drop_messages(uint64_t group_id, uint64_t from, uint64_t to) {
  drop_messages([&](const Key &key, const Message &) {
    return key.group_id == group_id && key.ordinal >= from && key.ordinal < to;
  });
}

std::vector<std::shared_ptr<GroupListener>> Monitor::listeners() const {
  std::vector<std::shared_ptr<GroupListener>> all;
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto &entry : groups_)
    if (auto group = entry.second.listener.lock()) all.push_back(std::move(group));
  return all;
}

phx_status Monitor::take(const Uuid &from, uint64_t group_id, uint64_t ordinal, const Deadline &deadline,
                         const std::atomic<int32_t> &interrupted, Message *out) {
  const Key key{from, group_id, ordinal};
  phx_status status = PHX_ERR_TIMEOUT;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(changed_, lock, deadline, [&] {
    const auto found = inbox_.find(key);
    const auto link = links_.find(from);
    if (found != inbox_.end()) {
      if (link != links_.end()) uncount(*link->second, found->second);
      *out = std::move(found->second);
      inbox_.erase(found);
      status = PHX_OK;
    } else if (interrupted.load() != 0) {
      status = PHX_ERR_REVOKED;
    } else if (link == links_.end() || link->second->gone() || stopping_.load()) {
      status = PHX_ERR_PEER_DEAD;
    } else if (broken_.status != PHX_OK) {
      status = PHX_ERR_REVOKED;
    }
    return status != PHX_ERR_TIMEOUT;
  });
  return status;
}

bool Monitor::has_message(const Uuid &from, uint64_t group_id, uint64_t ordinal) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return inbox_.count(Key{from, group_id, ordinal}) != 0;
}

void Monitor::catch_up() {
  std::unique_lock<std::mutex> lock(mutex_);
  const uint64_t mine = ++asked_;
  if (stopping_.load()) return;
  wake();
  changed_.wait_for(lock, std::chrono::milliseconds(100), [&] { return caught_up_ >= mine || stopping_.load(); });
}

void Monitor::begin_chore() {
  chore_ns_.store(0);
  wake();
}

void Monitor::do_chore() {
  constexpr int64_t kPauseNs = 1000 * 1000, kLongestPauseNs = 1000 * kPauseNs;
  chore_ns_.store(INT64_MAX);  // before the call: it may be begun again as soon as it has ended
  const Progress::Next next = chore_();
  if (!next.again) return;
  constexpr uint32_t kOnce = EPOLLIN | EPOLLONESHOT;
  const bool watched = next.fd >= 0 && (change_events(next.fd, kOnce) || watch_fd(next.fd, kOnce));
  if (watched) chore_fd_ = next.fd;
  int64_t not_begun = INT64_MAX;
  chore_ns_.compare_exchange_strong(not_begun, now_ns() + (watched ? kLongestPauseNs : kPauseNs));
}

void Monitor::poke() {
  std::lock_guard<std::mutex> lock(mutex_);
  changed_.notify_all();
}

}  // namespace phx
