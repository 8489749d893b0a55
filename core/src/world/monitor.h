// The one thread of a world: accepts peers, receives their messages, and sees them die.
//
// It sleeps in epoll. Nothing on the path of a collective passes through it.
#pragma once

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

#include "world/link.h"

namespace phx {

// What the monitor tells a group. Called without locks of the monitor.
class GroupListener {
 public:
  virtual ~GroupListener() = default;
  virtual bool has_peer(const Uuid &uuid) const = 0;
  virtual void on_peer_gone(const Link &link, LinkState state) = 0;
  virtual void on_revoked(const phx_error_info &cause) = 0;
};

class Monitor {
 public:
  explicit Monitor(const PeerRecord &self) : self_(self) {}
  ~Monitor() { stop(); }

  phx_status start();
  // Says goodbye to every peer, closes everything, joins the thread. Idempotent.
  void stop();

  LinkRef find_link(const Uuid &uuid) const;
  // The process of the peer of that number, if it was connected and has ended, and none of that number is connected
  // now. Else 0.
  int32_t ended_process(int32_t rank) const;
  void adopt(LinkRef link);  // one that was dialed
  // Waits until the peer has dialed in; NULL at the deadline.
  LinkRef await_link(const Uuid &uuid, const Deadline &deadline);

  // Why who connected could not be let in lately: an errno, or 0.
  int listen_error() const { return listen_error_.load(); }

  void watch(uint64_t group_id, std::weak_ptr<GroupListener> listener);
  void unwatch(uint64_t group_id);  // forgets its messages too

  // The message of that number from that peer. IN_PROGRESS-free: PHX_OK, PHX_ERR_TIMEOUT, or PHX_ERR_PEER_DEAD when the
  // link ended first, or PHX_ERR_REVOKED when `interrupted` was set. Records no error text.
  phx_status take(const Uuid &from, uint64_t group_id, uint64_t ordinal, const Deadline &deadline,
                  const std::atomic<int32_t> &interrupted, Message *out);
  // Drops the messages of that group with numbers of [from, to).
  void discard(uint64_t group_id, uint64_t from, uint64_t to);
  // Waits, for a short time at most, until what has arrived by now was read.
  void catch_up();
  void poke();  // makes waiters look at their `interrupted`

 private:
  struct Pending {  // connected, not yet authenticated
    Fd fd;
    uint32_t uid = 0;
    int32_t pid = 0;
    int64_t expires_ns = 0;
  };
  struct Key {
    Uuid from;
    uint64_t group_id;
    uint64_t ordinal;
    bool operator<(const Key &other) const {
      if (from != other.from) return from < other.from;
      return group_id != other.group_id ? group_id < other.group_id : ordinal < other.ordinal;
    }
  };

  void run();
  void accept_peers();
  void greet(int fd);
  void drop_expired();
  void read_link(const LinkRef &link);
  void deliver(const LinkRef &link, Message &&message);
  void end_link(const LinkRef &link, LinkState state);
  void watch_fd(int fd);
  void drop_messages(uint64_t group_id, uint64_t from, uint64_t to);  // with the mutex held
  std::vector<std::shared_ptr<GroupListener>> listeners() const;

  const PeerRecord self_;
  Fd epoll_, wake_, listener_;
  std::thread thread_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> listen_error_{0};

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;                // the thread has all that it needs
  uint64_t asked_ = 0, caught_up_ = 0;  // calls of catch_up, and those that are over
  std::map<int, Pending> pending_;      // by fd; the thread's own
  std::map<int, LinkRef> by_fd_;        // socket and pidfd
  std::map<Uuid, LinkRef> links_;       // also ended ones, so that later groups get a proper error
  std::map<Key, Message> inbox_;
  std::map<uint64_t, std::weak_ptr<GroupListener>> groups_;
  std::map<uint64_t, phx_error_info> early_revocations_;  // of groups that this rank has not made yet
  std::set<uint64_t> retired_;                            // groups that are gone: their late messages are dropped
};

}  // namespace phx
