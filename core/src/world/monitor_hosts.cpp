// The part of the monitor that accepts ranks of other hosts and dials them. No dial waits for another one.
#include <algorithm>
#include <utility>

#include "base/error.h"
#include "world/monitor.h"

namespace phx {
namespace {

constexpr size_t kMaxHostStrangers = 128;  // of the TCP listener: all ranks of a large job may come at once
constexpr int64_t kCrowdedHostsMs = 500;   // of these: two round trips of a slow network, and a busy host

}  // namespace

void Monitor::greet_host(int fd) {
  HostStranger &stranger = *pending_hosts_[fd];
  const HostStranger::Step step = stranger.advance();
  if (step == HostStranger::Step::kWaits) return;
  const bool valid = step == HostStranger::Step::kProven;
  const LinkRef known = valid ? find_link(stranger.hello().from) : nullptr;
  const bool connected = known && known->state.load() == LinkState::kAlive;
  if (!valid && !stranger.said_nothing())
    PHX_LOG(PHX_LOG_WARNING, "refused a malformed or unauthorised handshake from %s", address_of_peer(fd).c_str());
  else if (connected)
    PHX_LOG(PHX_LOG_WARNING, "refused a handshake from %s: rank %d (pid %d) is connected already",
            address_of_peer(fd).c_str(), known->rank, known->pid);
  if (!valid || connected) return close_stranger(fd);
  admit(fd, stranger.make_link());
}

// ---- connections to ranks of other hosts, of which this rank is the dialer

bool Monitor::listen_for_hosts(Fd listener) {
  return add_listener(std::move(listener), {kMaxHostStrangers, kHandshakeMs, kCrowdedHostsMs});
}

phx_status Monitor::dial_host(const PeerRecord &peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_.load()) return PHX_ERR_REVOKED;
  begin_dial(peer, false);
  return PHX_OK;
}

void Monitor::ask_host(const PeerRecord &peer) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (!stopping_.load()) begin_dial(peer, true);
}

void Monitor::begin_dial(const PeerRecord &peer, bool only_asks) {
  if (links_.count(peer.uuid) != 0) return;
  std::unique_ptr<HostDial> &dial = host_dials_[peer.uuid];
  if (dial && !dial->failed()) return;
  dial = std::make_unique<HostDial>(self_, peer, only_asks);
  after_step(*dial, dial->begin(), -1);
}

// `watched`: the socket that epoll watches for this connection, -1 if none. It is closed if the connection was lost.
void Monitor::after_step(HostDial &dial, HostDial::Step step, int watched) {
  dials_by_fd_.erase(watched);
  switch (step) {
    case HostDial::Step::kWaits:
      dials_by_fd_[dial.socket()] = dial.peer().uuid;
      watched < 0 ? watch_fd(dial.socket(), dial.events()) : change_events(watched, dial.events());
      return;
    case HostDial::Step::kPauses:
      redial_ns_.store(std::min(redial_ns_.load(), dial.again_ns()));
      wake();
      return;
    case HostDial::Step::kDone: {
      if (dial.only_asks()) {
        if (watched >= 0) unwatch_fd(watched);
        host_dials_.erase(Uuid(dial.peer().uuid));
        return;
      }
      const LinkRef link = dial.make_link();
      host_dials_.erase(link->uuid);
      change_events(watched, EPOLLIN);
      keep(link);
      break;
    }
    case HostDial::Step::kFailed: break;
  }
  changed_.notify_all();
}

void Monitor::advance_dial(int fd) {
  HostDial &dial = *host_dials_.at(dials_by_fd_.at(fd));
  after_step(dial, dial.advance(), fd);
}

void Monitor::redial() {
  std::lock_guard<std::mutex> lock(mutex_);
  redial_ns_.store(INT64_MAX);
  for (const auto &entry : host_dials_) {
    HostDial &dial = *entry.second;
    if (!dial.pauses()) continue;
    if (now_ns() < dial.again_ns())
      redial_ns_.store(std::min(redial_ns_.load(), dial.again_ns()));
    else
      after_step(dial, dial.begin(), -1);
  }
}

phx_status Monitor::await_host(const Uuid &uuid, const Deadline &deadline, LinkRef *out) {
  phx_status status = PHX_ERR_TIMEOUT;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(changed_, lock, deadline, [&] {
    const auto link = links_.find(uuid);
    const auto dial = host_dials_.find(uuid);
    if (link != links_.end()) {
      *out = link->second;
      status = PHX_OK;
    } else if (stopping_.load()) {
      status = PHX_ERR_REVOKED;
    } else if (dial != host_dials_.end() && dial->second->failed()) {
      status = set_last_error(dial->second->error());
    } else if (broken_.status != PHX_OK) {
      status = set_last_error(broken_);
    }
    return status != PHX_ERR_TIMEOUT;
  });
  return status;
}

std::string Monitor::host_waits_for(const Uuid &uuid) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto dial = host_dials_.find(uuid);
  return dial == host_dials_.end() ? std::string() : dial->second->waiting();
}

}  // namespace phx
