// The part of the monitor that listens for other hosts, and makes connections to ranks. None waits for another one.
#include "base/wait.h"
#include "world/monitor.h"

namespace phx {
namespace {

constexpr size_t kMaxHostStrangers = 128;  // of the TCP listener: all ranks of a large job may come at once
constexpr int64_t kCrowdedHostsMs = 500;   // of these: two round trips of a slow network, and a busy host

}  // namespace

bool Monitor::listen_for_hosts(Fd listener) {
  return add_listener(std::move(listener), {kMaxHostStrangers, kHandshakeMs, kCrowdedHostsMs});
}

phx_status Monitor::dial(const PeerRecord &peer, bool only_asks) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (stopping_.load()) return PHX_ERR_REVOKED;
  if (links_.count(peer.uuid) != 0) return PHX_OK;
  std::unique_ptr<Dial> &dial = dials_[peer.uuid];
  if (dial && !dial->failed()) return PHX_OK;
  dial = std::make_unique<Dial>(self_, peer, only_asks);
  const Dial::Step step = dial->begin();
  after_step(*dial, step, -1);
  return step == Dial::Step::kFailed ? set_last_error(dial->error()) : PHX_OK;
}

// `watched`: the socket that epoll watches for this connection, -1 if none. It is closed if the connection was lost.
void Monitor::after_step(Dial &dial, Dial::Step step, int watched) {
  dials_by_fd_.erase(watched);
  switch (step) {
    case Dial::Step::kWaits:
      dials_by_fd_[dial.socket()] = dial.peer().uuid;
      watched < 0 ? watch_fd(dial.socket(), dial.events()) : change_events(watched, dial.events());
      return;
    case Dial::Step::kPauses:
      redial_ns_.store(std::min(redial_ns_.load(), dial.again_ns()));
      wake();
      return;
    case Dial::Step::kDone: {
      if (dial.only_asks()) {
        if (watched >= 0) unwatch_fd(watched);
        dials_.erase(Uuid(dial.peer().uuid));
        return;
      }
      const LinkRef link = dial.make_link();
      dials_.erase(link->uuid);
      change_events(watched, EPOLLIN);
      keep(link);
      break;
    }
    case Dial::Step::kFailed: break;
  }
  changed_.notify_all();
}

void Monitor::advance_dial(int fd) {
  Dial &dial = *dials_.at(dials_by_fd_.at(fd));
  after_step(dial, dial.advance(), fd);
}

void Monitor::redial() {
  std::lock_guard<std::mutex> lock(mutex_);
  redial_ns_.store(INT64_MAX);
  for (const auto &entry : dials_) {
    Dial &dial = *entry.second;
    if (!dial.pauses()) continue;
    if (now_ns() < dial.again_ns())
      redial_ns_.store(std::min(redial_ns_.load(), dial.again_ns()));
    else
      after_step(dial, dial.begin(), -1);
  }
}

phx_status Monitor::await_link(const Uuid &uuid, const Deadline &deadline, LinkRef *out) {
  phx_status status = PHX_ERR_TIMEOUT;
  std::unique_lock<std::mutex> lock(mutex_);
  wait_until(changed_, lock, deadline, [&] {
    const auto link = links_.find(uuid);
    const auto dial = dials_.find(uuid);
    if (link != links_.end()) {
      *out = link->second;
      status = PHX_OK;
    } else if (stopping_.load()) {
      status = PHX_ERR_REVOKED;
    } else if (dial != dials_.end() && dial->second->failed()) {
      status = set_last_error(dial->second->error());
    } else if (broken_.status != PHX_OK) {
      status = set_last_error(broken_);
    }
    return status != PHX_ERR_TIMEOUT;
  });
  return status;
}

std::string Monitor::dial_lacks(const Uuid &uuid) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto dial = dials_.find(uuid);
  return dial == dials_.end() ? "did not connect" : dial->second->lack();
}

}  // namespace phx
