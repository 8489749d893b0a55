// The one thread of a world: accepts peers, receives their messages, and sees them die. Nothing on the path of a
// collective passes through it.
#pragma once

#include <algorithm>
#include <array>
#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <vector>

#include "base/event_loop.h"
#include "base/progress.h"
#include "world/host_handshake.h"
#include "world/link.h"

namespace phx {

// What the monitor tells a group. Called without locks of the monitor.
class GroupListener {
 public:
  virtual ~GroupListener() = default;
  virtual bool has_peer(const Uuid &uuid) const = 0;
  // Interrupts the group. `ended`: the process of that peer has ended, which every rank sees for itself.
  virtual void on_peer_gone(const Link &link, LinkState state, bool ended) = 0;
  virtual void on_revoked(const ErrorInfo &cause) = 0;
  // For slow work (a dump of the group), once all groups have been interrupted.
  virtual void after_interruption() {}
  // This rank's world ends.
  virtual void on_finalized(const ErrorInfo &) {}
};

// The last numbers that were put in: of a bounded count, in memory that does not grow.
class RecentIds {
 public:
  static constexpr size_t kCount = 1024;

  void insert(uint64_t id) {  // not 0
    if (count(id) != 0) return;
    ids_[next_] = id;
    next_ = (next_ + 1) % kCount;
  }
  void erase(uint64_t id) { std::replace(ids_.begin(), ids_.end(), id, uint64_t{0}); }
  size_t count(uint64_t id) const { return std::find(ids_.begin(), ids_.end(), id) != ids_.end() ? 1 : 0; }

 private:
  std::array<uint64_t, kCount> ids_{};
  size_t next_ = 0;
};

class Monitor : private EventLoop {
 public:
  explicit Monitor(const PeerRecord &self) : self_(self) {}
  ~Monitor() { stop(); }

  phx_status start();
  // Sends what is still to be sent, says goodbye to every peer, closes everything, joins the thread. Idempotent.
  void stop();

  // Sends at once or, where the peer has no room, later: never waits. A message to a peer that has ended is dropped.
  void post(const LinkRef &link, const Envelope &envelope, const void *payload);

  LinkRef find_link(const Uuid &uuid) const;
  void adopt(const LinkRef &link);  // one that was made elsewhere

  // Accepts ranks of other hosts from this listening TCP socket. False, with errno set, if that is impossible.
  bool listen_for_hosts(Fd listener);
  // Begins to connect to a rank, unless that was begun before or there is a link. The thread goes on with it, whether
  // or not anyone waits. `only_asks`: begins to ask another host whether that rank, which is to dial this one, still
  // listens; if not, await_link() fails. PHX_ERR_REVOKED, without a text: the world was finalized. Another error is
  // that of a connection that has failed at once.
  phx_status dial(const PeerRecord &peer, bool only_asks = false);
  // Waits for a connection to a rank, whichever dials. PHX_ERR_TIMEOUT, without a text: it is not there yet;
  // PHX_ERR_REVOKED, without a text: the world was finalized. Another error is that of the connection, and the next
  // dial() begins anew.
  phx_status await_link(const Uuid &uuid, const Deadline &deadline, LinkRef *out);
  std::string dial_lacks(const Uuid &uuid) const;  // what has not happened, for the error of a rank that dials

  using EventLoop::accept_error;

  void watch(uint64_t group_id, std::weak_ptr<GroupListener> listener);
  void unwatch(uint64_t group_id);  // forgets its messages too

  // The message of that number from that peer. IN_PROGRESS-free: PHX_OK, PHX_ERR_TIMEOUT, or PHX_ERR_PEER_DEAD when the
  // link ended first, or PHX_ERR_REVOKED when `interrupted` was set. Records no error text.
  phx_status take(const Uuid &from, uint64_t group_id, uint64_t ordinal, const Deadline &deadline,
                  const std::atomic<int32_t> &interrupted, Message *out);
  bool has_message(const Uuid &from, uint64_t group_id, uint64_t ordinal) const;  // whether `take` would return it
  // Drops the messages of that group with numbers of [from, to).
  void discard(uint64_t group_id, uint64_t from, uint64_t to);
  // This rank has begun the exchange of that number, so it asks for its descriptors; and it has ended the exchange,
  // with or without success, so late messages of it are dropped.
  void begin_exchange(uint64_t group_id, uint64_t ordinal);
  void end_exchange(uint64_t group_id, uint64_t ordinal);
  // Waits for a short time at most until all messages that have arrived by now are read.
  void catch_up();
  void poke();  // makes waiters look at their `interrupted`
  // begin_chore() has the thread call `chore` until that says no more: every millisecond, or if it returns a
  // descriptor, when that is readable. Set before the start.
  void set_chore(std::function<Progress::Next()> chore) { chore_ = std::move(chore); }
  void begin_chore();

 private:
  using Stranger = phx::Stranger;  // more than EventLoop knows of one
  static constexpr int64_t kHandshakeMs = 5000;
  struct Key {
    Uuid from;
    uint64_t group_id;
    uint64_t ordinal;
    bool operator<(const Key &other) const {
      return std::tie(from, group_id, ordinal) < std::tie(other.from, other.group_id, other.ordinal);
    }
  };

  struct Watched {
    std::weak_ptr<GroupListener> listener;
    uint64_t asked = 0;   // the exchange that this rank is in; 0: none
    uint64_t passed = 0;  // the last one that it has ended
  };

  void on_accept(Fd fd, size_t listener) override;
  void on_late(int fd) override;
  void on_event(int fd, uint32_t events) override;
  void on_wake() override;
  void after_events(bool any) override;
  int64_t next_look_ns() const override {
    return woken_ == caught_up_ ? std::min(redial_ns_.load(), chore_ns_.load()) : 0;
  }
  bool goes_on_after(const std::exception &error) override;
  void flush(const LinkRef &link);
  void arm(const Link &link) const;  // with send_mutex held
  void say_goodbye(const std::vector<LinkRef> &links);
  void on_death(const Message &message);
  void greet(int fd);
  void close_stranger(int fd);
  void advance_dial(int fd);
  void after_step(Dial &dial, Dial::Step step, int watched);  // with the mutex held
  void redial();
  void do_chore();
  void keep(const LinkRef &link);  // with the mutex held
  void read_link(const LinkRef &link);
  void deliver(const LinkRef &link, Message &&message);
  void end_link(const LinkRef &link, LinkState state);
  template <class Is>
  void drop_messages(Is is);  // those for which `is` is true; with the mutex held
  void drop_messages(uint64_t group_id, uint64_t from, uint64_t to);
  std::vector<std::shared_ptr<GroupListener>> listeners() const;

  const PeerRecord self_;
  std::atomic<bool> stopped_{false};   // stop() was called
  std::atomic<bool> stopping_{false};  // no thread is to wait any more

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  ErrorInfo broken_;                    // why the thread ended before its time; PHX_OK: it has not
  uint64_t asked_ = 0, caught_up_ = 0;  // calls of catch_up, and those that are over; the thread writes the latter
  uint64_t woken_ = 0;                  // calls of catch_up that the thread knows of; the thread's own
  std::atomic<int64_t> redial_ns_{INT64_MAX};  // when a connection is to be tried again
  std::function<Progress::Next()> chore_;
  int chore_fd_ = -1;                                 // the thread's own
  std::atomic<int64_t> chore_ns_{INT64_MAX};          // when it is to be called
  std::map<int, std::unique_ptr<Stranger>> pending_;  // by descriptor; the thread's own
  std::map<int, LinkRef> by_fd_;                      // socket and pidfd
  std::map<Uuid, std::unique_ptr<Dial>> dials_;       // connections that are being made
  std::map<int, Uuid> dials_by_fd_;                   // those with a socket
  std::map<Uuid, LinkRef> links_;                     // also ended ones, so that later groups get a proper error
  std::map<Key, Message> inbox_;
  std::map<uint64_t, Watched> groups_;
  std::map<uint64_t, ErrorInfo> early_revocations_;  // of groups that this rank has not made yet
  // Groups that are gone, whose late messages are dropped. One that a peer sends after so many more have gone stays in
  // the inbox until the world ends; it counts for what that peer may leave there.
  RecentIds retired_;
};

}  // namespace phx
