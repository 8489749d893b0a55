// A carrier inside one process, for tests whose ranks are threads. Every endpoint registers in a hub, which copies
// messages into queues. By a seed it delays deliveries by a number of calls of progress, completes transfers out of
// order or at once, reads the data of a send as late as when it is received, keeps what was sent until the sender has
// called progress several times, and loses connections. It also checks how its caller uses the table of functions; what
// is wrong is printed and counted, and ends the process at the latest when the hub is destroyed.
//
//     Hub hub(options);
//     phx_world_set_carrier(world, hub_carrier_ops(), &hub);  // the same hub for all worlds
//     ...
//     hub.check();  // after the worlds are released
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/hash.h"
#include "check.h"
#include "phalanx/carrier.h"

struct HubOptions {
  uint64_t seed = 1;
  uint32_t max_delay = 6;           // of a delivery or a completion, in calls of the receiver's or owner's progress
  uint32_t losses_per_mille = 0;    // how many connections in a thousand are lost
  uint32_t max_steps_to_loss = 50;  // after how many sends and receives that name one it is lost, at most
  bool prints = true;               // what is misused; it is counted in any case
};

class Hub {
 public:
  explicit Hub(const HubOptions &options = {}) : options_(options) {}
  ~Hub() {
    if (open_ != 0) violation("an endpoint was not closed");
    if (violations != 0) std::abort();
  }
  Hub(const Hub &) = delete;
  Hub &operator=(const Hub &) = delete;

  // Fails the test if the table was misused.
  void check() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const uint64_t count = violations.exchange(0);
    if (open_ != 0) ::check::failed(__FILE__, __LINE__, "an endpoint of the hub was not closed");
    if (count != 0) ::check::failed(__FILE__, __LINE__, std::to_string(count) + " misuses of the carrier");
  }
  // Loses every connection that there is.
  void lose_all() {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (const auto &peer : peers_)
      if (peer->state != kGone && !peer->lost) lose(peer.get());
  }

  std::atomic<uint64_t> messages{0}, bytes{0}, connections{0}, connections_lost{0};
  std::atomic<uint64_t> at_once{0}, late_reads{0}, cancelled{0}, released{0}, violations{0};

 private:
  friend struct HubTable;
  enum State { kUnderWay, kComplete, kGone };
  struct Endpoint;
  struct Message;

  // One end of a connection.
  struct Peer {
    Endpoint *owner, *to;
    Peer *other = nullptr;  // the end of the other process, once both have connected
    State state = kUnderWay;
    bool lost = false;    // nothing goes through any more
    uint32_t notice = 0;  // after how many calls of progress the owner learns of it
    int64_t steps = -1;   // until it is lost; negative: never
    bool known_lost() const { return lost && notice == 0; }
  };
  struct Transfer {
    Endpoint *owner;
    Peer *peer;
    bool receives;
    uint64_t tag;
    const char *source;
    char *target;
    size_t size, came = 0;
    uint64_t hash = 0;     // of the source, or of what a receive was filled with
    bool watched = false;  // whether `hash` of a receive counts
    uint32_t hold = 0;     // calls of progress from completion to its report
    State state = kUnderWay;
  };
  struct Message {
    uint64_t tag;
    Peer *from;
    std::vector<char> data;
    Transfer *late = nullptr;  // the send whose data is read on delivery
    size_t size = 0;
    uint32_t delay = 0;
    bool kept = false;  // by the sender
  };
  struct Endpoint {
    Hub *hub;
    uint64_t index, random;
    int fd = -1;
    std::atomic<bool> busy{false};
    bool open = true;
    uint32_t keeps = 0;                   // calls of progress until what was sent leaves
    std::list<Message> coming;            // with a delay that has not passed
    std::map<uint64_t, Message> arrived;  // without a receive
    std::map<uint64_t, Transfer *> posted;
    std::set<Transfer *> transfers, completing;
    std::set<Peer *> peers;
  };

  static uint64_t splitmix(uint64_t *state) {
    uint64_t z = *state += 0x9e3779b97f4a7c15ull;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ z >> 27) * 0x94d049bb133111ebull;
    return z ^ z >> 31;
  }
  static uint32_t below(Endpoint *endpoint, uint32_t limit) {
    return static_cast<uint32_t>(splitmix(&endpoint->random) % limit);
  }
  uint32_t delay(Endpoint *endpoint) const { return below(endpoint, options_.max_delay + 1); }

  void violation(const std::string &what) {
    ++violations;
    if (options_.prints) std::fprintf(stderr, "the carrier is misused: %s\n", what.c_str());
  }
  static void wake(Endpoint *endpoint) {
    const uint64_t one = 1;
    (void)!write(endpoint->fd, &one, sizeof one);
  }

  // A connection that fails: what is on its way is gone, what has arrived stays.
  void lose(Peer *peer) {
    ++connections_lost;
    cut(peer, true);
  }
  void cut(Peer *peer, bool drop) {
    Peer *const other = peer->other;
    for (Peer *end : {peer, other})
      if (end != nullptr && !end->lost) drop_messages(end, drop);
    for (Peer *end : {peer, other})
      if (end != nullptr && !end->lost) lose_end(end);
  }
  // The owner learns of it after what has been sent to it, and not dropped, has arrived.
  void lose_end(Peer *end) {
    end->lost = true;
    end->notice = delay(end->owner);
    for (const Message &message : end->owner->coming)
      if (message.from == end->other && end->notice <= message.delay) end->notice = message.delay + 1;
    wake(end->owner);
  }
  // What an end has sent and is not received yet: `drop` what is on its way, or let it arrive. In both cases nothing
  // reads the sender's data afterwards.
  void drop_messages(Peer *from, bool drop) {
    Endpoint *const to = from->to;
    for (auto message = to->coming.begin(); message != to->coming.end();) {
      if (message->from == from && drop) {
        message = to->coming.erase(message);
        continue;
      }
      if (message->from == from) {
        read_now(&*message);
        message->kept = false;
      }
      ++message;
    }
    for (auto entry = to->arrived.begin(); entry != to->arrived.end();) {
      if (entry->second.from == from && entry->second.late != nullptr && drop) {
        entry = to->arrived.erase(entry);
        continue;
      }
      if (entry->second.from == from) read_now(&entry->second);
      ++entry;
    }
  }
  void read_now(Message *message) {
    if (message->late == nullptr) return;
    Transfer *const send = message->late;
    message->data.assign(send->source, send->source + send->size);
    message->late = nullptr;
    complete(send);
  }
  void complete(Transfer *transfer) {
    if (!transfer->receives && phx::hash_bytes(transfer->source, transfer->size) != transfer->hash)
      violation("the data of a send was changed while it was under way");
    transfer->hold = delay(transfer->owner);
    transfer->owner->completing.insert(transfer);
    if (transfer->hold == 0) transfer->state = kComplete;
    wake(transfer->owner);
  }
  // Takes a transfer out of everything, so that its data is not touched any more.
  void end(Transfer *transfer) {
    Endpoint *const owner = transfer->owner;
    owner->transfers.erase(transfer);
    owner->completing.erase(transfer);
    const auto posted = owner->posted.find(transfer->tag);
    if (transfer->receives && posted != owner->posted.end() && posted->second == transfer) owner->posted.erase(posted);
    if (!transfer->receives) {
      const auto of_it = [&](const Message &message) { return message.late == transfer; };
      transfer->peer->to->coming.remove_if(of_it);
      auto &arrived = transfer->peer->to->arrived;
      const auto message = arrived.find(transfer->tag);
      if (message != arrived.end() && of_it(message->second)) arrived.erase(message);
    }
    transfer->state = kGone;
  }
  void deliver(Message *message, Transfer *receive) {
    if (receive->watched && phx::hash_bytes(receive->target, receive->size) != receive->hash)
      violation("the data of a receive was touched while it was under way");
    receive->came = message->size;
    const char *const source = message->late != nullptr ? message->late->source : message->data.data();
    const size_t count = message->size < receive->size ? message->size : receive->size;
    if (count != 0) std::memcpy(receive->target, source, count);
    if (message->late != nullptr) complete(message->late);
    receive->owner->posted.erase(receive->tag);
    complete(receive);
    ++messages;
    bytes += message->size;
  }
  static void let_go(Endpoint *owner) {
    if (owner->keeps == 0 || --owner->keeps > 0) return;
    for (const Peer *peer : owner->peers) {
      for (Message &message : peer->to->coming)
        if (message.from == peer) message.kept = false;
      wake(peer->to);
    }
  }
  void step(Peer *peer) {
    for (Peer *end : {peer, peer->other})
      if (end != nullptr && end->steps > 0 && --end->steps == 0 && !end->lost) lose(end);
  }

  const HubOptions options_;
  std::mutex mutex_;
  std::deque<std::unique_ptr<Endpoint>> endpoints_;  // nothing is freed, so that a late use is seen
  std::deque<std::unique_ptr<Peer>> peers_;
  std::deque<std::unique_ptr<Transfer>> transfers_;
  int open_ = 0;
};

struct HubTable {
  using Endpoint = Hub::Endpoint;
  using Peer = Hub::Peer;
  using Transfer = Hub::Transfer;
  struct Address {
    uint64_t magic, index;
    char name[40];
  };
  static constexpr uint64_t kMagic = 0x6875622d63617272;

  // Every function of an endpoint begins with one: it finds two at a time, and locks the hub. The flag is relaxed, so
  // that it orders nothing that the caller should have ordered itself.
  class Call {
   public:
    explicit Call(void *endpoint) : self(static_cast<Endpoint *>(endpoint)), hub(*self->hub) {
      alone_ = !self->busy.exchange(true, std::memory_order_relaxed);
      hub.mutex_.lock();
      if (!alone_) hub.violation("two functions of one endpoint run at a time");
      if (!self->open) hub.violation("a closed endpoint is used");
    }
    ~Call() {
      if (alone_) self->busy.store(false, std::memory_order_relaxed);
      hub.mutex_.unlock();
    }
    Call(const Call &) = delete;
    Call &operator=(const Call &) = delete;
    Peer *peer(void *which) const {
      Peer *const peer = static_cast<Peer *>(which);
      if (peer->owner != self || peer->state == Hub::kGone) hub.violation("a peer is used after it was disconnected");
      return peer;
    }
    // NULL: it is gone.
    Transfer *transfer(void *which, const char *what) const {
      Transfer *const transfer = static_cast<Transfer *>(which);
      if (transfer->owner == self && transfer->state != Hub::kGone) return transfer;
      hub.violation(std::string(what) + " of a transfer that is complete or cancelled");
      return nullptr;
    }
    Endpoint *const self;
    Hub &hub;

   private:
    bool alone_;
  };

  static phx_status dead() { return phx_set_error(PHX_ERR_PEER_DEAD, "the hub has lost the connection"); }

  static phx_status open(void *self, void **endpoint) {
    Hub &hub = *static_cast<Hub *>(self);
    const std::lock_guard<std::mutex> lock(hub.mutex_);
    auto made = std::make_unique<Endpoint>();
    made->hub = &hub;
    made->index = hub.endpoints_.size();
    made->random = hub.options_.seed * 0x9e3779b97f4a7c15ull + made->index;
    made->fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (made->fd < 0) return phx_set_error(PHX_ERR_SYSTEM, "the hub has no eventfd");
    *endpoint = made.get();
    hub.endpoints_.push_back(std::move(made));
    ++hub.open_;
    return PHX_OK;
  }

  static phx_status address(void *endpoint, void *out, size_t *bytes) {
    const Call call(endpoint);
    Address address{kMagic, call.self->index, {}};
    std::snprintf(address.name, sizeof address.name, "endpoint %llu", static_cast<unsigned long long>(address.index));
    const bool fits = *bytes >= sizeof address;
    *bytes = sizeof address;
    if (!fits) return phx_set_error(PHX_ERR_INVALID, "there is too little room for an address of the hub");
    std::memcpy(out, &address, sizeof address);
    return PHX_OK;
  }

  static phx_status connect(void *endpoint, const void *where, size_t bytes, void **out) {
    const Call call(endpoint);
    Address address{};
    if (bytes == sizeof address) std::memcpy(&address, where, sizeof address);
    if (address.magic != kMagic || address.index >= call.hub.endpoints_.size()) {
      call.hub.violation("an address is not one that the hub has given");
      return phx_set_error(PHX_ERR_INVALID, "no address of the hub");
    }
    auto made = std::make_unique<Peer>();
    made->owner = call.self;
    made->to = call.hub.endpoints_[address.index].get();
    Endpoint *const self = call.self;
    if (Hub::below(self, 1000) < call.hub.options_.losses_per_mille)
      made->steps = 1 + Hub::below(self, call.hub.options_.max_steps_to_loss);
    for (Peer *end : made->to->peers) {
      if (end->to != self || end->other != nullptr) continue;
      end->other = made.get();
      made->other = end;
      made->lost = end->lost;  // noticed at once
      break;
    }
    if (!made->to->open) call.hub.cut(made.get(), true);
    self->peers.insert(made.get());
    ++call.hub.connections;
    *out = made.get();
    call.hub.peers_.push_back(std::move(made));
    return PHX_OK;
  }

  static Transfer *begin(const Call &call, Peer *peer, bool receives, uint64_t tag, size_t size) {
    auto made = std::make_unique<Transfer>();
    made->owner = call.self;
    made->peer = peer;
    made->receives = receives;
    made->tag = tag;
    made->size = size;
    made->source = nullptr;
    made->target = nullptr;
    call.self->transfers.insert(made.get());
    call.hub.transfers_.push_back(std::move(made));
    return call.hub.transfers_.back().get();
  }

  static phx_status send(void *endpoint, void *to, uint64_t tag, const void *data, size_t bytes, void **transfer) {
    const Call call(endpoint);
    Peer *const peer = call.peer(to);
    *transfer = nullptr;
    call.hub.step(peer);
    if (peer->known_lost()) return dead();
    Hub::Message message;
    message.tag = tag;
    message.from = peer;
    message.size = bytes;
    message.delay = call.hub.delay(call.self);
    const char *const source = static_cast<const char *>(data);
    const uint32_t manner = Hub::below(call.self, 4);
    if (manner != 0) {  // else complete at once
      Transfer *const made = begin(call, peer, false, tag, bytes);
      made->source = source;
      made->hash = phx::hash_bytes(data, bytes);
      *transfer = made;
      if (manner == 1) {
        if (!peer->lost) {
          message.late = made;
          ++call.hub.late_reads;
        }
      } else {
        call.hub.complete(made);
      }
    } else {
      ++call.hub.at_once;
    }
    if (peer->lost) return PHX_OK;  // it is lost, but not yet known to be
    Endpoint *const target = peer->to;
    for (const Hub::Message &other : target->coming)
      if (other.tag == tag) call.hub.violation("two messages with one tag are under way");
    if (target->arrived.count(tag) != 0) call.hub.violation("a message has the tag of one that was not received");
    if (message.late == nullptr && bytes != 0) message.data.assign(source, source + bytes);
    message.kept = message.late == nullptr && Hub::below(call.self, 4) == 0;
    if (message.kept) call.self->keeps += 1 + Hub::below(call.self, 30);
    target->coming.push_back(std::move(message));
    Hub::wake(target);
    return PHX_OK;
  }

  static phx_status recv(void *endpoint, void *from, uint64_t tag, void *data, size_t capacity, void **transfer) {
    const Call call(endpoint);
    Peer *const peer = call.peer(from);
    *transfer = nullptr;
    call.hub.step(peer);
    if (call.self->posted.count(tag) != 0) call.hub.violation("two receives with one tag are under way");
    Transfer *const made = begin(call, peer, true, tag, capacity);
    made->target = static_cast<char *>(data);
    if (capacity <= 65536 && Hub::below(call.self, 4) == 0) {  // what a receive has in it does not count
      if (capacity != 0) std::memset(data, static_cast<int>(Hub::below(call.self, 256)), capacity);
      made->hash = phx::hash_bytes(data, capacity);
      made->watched = true;
    }
    call.self->posted[tag] = made;
    *transfer = made;
    const auto arrived = call.self->arrived.find(tag);
    if (arrived == call.self->arrived.end()) return PHX_OK;
    call.hub.deliver(&arrived->second, made);
    call.self->arrived.erase(arrived);
    if (made->came == capacity && Hub::below(call.self, 4) == 0) {
      call.hub.end(made);
      *transfer = nullptr;
      ++call.hub.at_once;
    }
    return PHX_OK;
  }

  static phx_status test(void *endpoint, void *which, int32_t *done, size_t *bytes) {
    const Call call(endpoint);
    *done = 0;
    Transfer *const transfer = call.transfer(which, "a test");
    if (transfer == nullptr) return phx_set_error(PHX_ERR_INTERNAL, "a transfer is used after its end");
    if (transfer->state == Hub::kComplete) {
      call.hub.end(transfer);
      if (bytes != nullptr) *bytes = transfer->receives ? transfer->came : transfer->size;
      if (transfer->receives && transfer->came > transfer->size)
        return phx_set_error(PHX_ERR_MISMATCH, ("a message of " + std::to_string(transfer->came) +
                                                " bytes came for a receive of " + std::to_string(transfer->size))
                                                   .c_str());
      *done = 1;
      return PHX_OK;
    }
    // What has come, or is on its way from a peer that has flushed it, is reported, if late.
    const bool has_come = call.self->completing.count(transfer) != 0 ||
                          std::any_of(call.self->coming.begin(), call.self->coming.end(),
                                      [&](const Hub::Message &message) { return message.tag == transfer->tag; });
    if (has_come || !(transfer->peer->known_lost() || transfer->peer->state == Hub::kGone)) return PHX_OK;
    call.hub.end(transfer);
    return dead();
  }

  static void cancel(void *endpoint, void *which) {
    const Call call(endpoint);
    Transfer *const transfer = call.transfer(which, "a cancel");
    if (transfer == nullptr) return;
    if (!transfer->receives && transfer->peer->state != Hub::kGone)
      call.hub.violation("a send is cancelled before its peer is disconnected");
    call.hub.end(transfer);
    ++call.hub.cancelled;
  }

  static int32_t progress(void *endpoint) {
    const Call call(endpoint);
    Endpoint *const self = call.self;
    uint64_t signals = 0;
    (void)!read(self->fd, &signals, sizeof signals);
    bool moved = self->keeps > 0;
    Hub::let_go(self);
    for (Peer *peer : self->peers) {
      if (!peer->lost || peer->notice == 0) continue;
      --peer->notice;
      moved = true;
    }
    for (auto completing = self->completing.begin(); completing != self->completing.end();) {
      Transfer *const transfer = *completing;
      if (transfer->hold > 0) {
        --transfer->hold;
        ++completing;
        continue;
      }
      transfer->state = Hub::kComplete;
      completing = self->completing.erase(completing);
      moved = true;
    }
    for (auto message = self->coming.begin(); message != self->coming.end();) {
      if (message->delay > 0 || message->kept) {
        if (!message->kept) --message->delay;
        ++message;
        continue;
      }
      const auto posted = self->posted.find(message->tag);
      if (posted != self->posted.end())
        call.hub.deliver(&*message, posted->second);
      else
        self->arrived.emplace(message->tag, std::move(*message));
      message = self->coming.erase(message);
      moved = true;
    }
    return moved ? 1 : 0;
  }

  static int32_t arm(void *endpoint, int32_t *fd) {
    const Call call(endpoint);
    *fd = call.self->fd;
    for (const Peer *peer : call.self->peers)
      if (peer->lost && peer->notice > 0) return 0;
    for (const Transfer *transfer : call.self->transfers)  // those that a test would report
      if (transfer->state == Hub::kComplete) return 0;
    const auto moves = [](const Hub::Message &message) { return !message.kept; };
    const auto &coming = call.self->coming;
    return std::none_of(coming.begin(), coming.end(), moves) && call.self->completing.empty() ? 1 : 0;
  }

  static int32_t unsent(void *endpoint) { return Call(endpoint).self->keeps > 0; }

  static void disconnect(void *endpoint, void *which, int32_t flush) {
    const Call call(endpoint);
    Peer *const peer = call.peer(which);
    if (flush != 0)
      for (const Transfer *transfer : call.self->transfers)
        if (transfer->peer == peer && transfer->receives)
          call.hub.violation("a connection is flushed while a receive names it");
    const bool drop = flush == 0 && Hub::below(call.self, 2) == 0;
    if (!peer->lost) call.hub.drop_messages(peer, drop);
    if (Peer *const other = peer->other; other != nullptr) {
      if (!other->lost) {
        call.hub.drop_messages(other, true);
        // As with UCX over TCP, the other end may learn of it only when the endpoint is closed.
        if (Hub::below(call.self, 2) == 0) call.hub.lose_end(other);
      }
      other->other = nullptr;
    }
    peer->lost = true;
    peer->notice = 0;
    peer->other = nullptr;
    peer->state = Hub::kGone;
    call.self->peers.erase(peer);
  }

  static void close(void *endpoint) {
    const Call call(endpoint);
    Endpoint *const self = call.self;
    if (!self->transfers.empty()) call.hub.violation("an endpoint is closed while transfers are under way");
    if (!self->peers.empty()) call.hub.violation("an endpoint is closed before its peers are disconnected");
    while (!self->transfers.empty()) call.hub.end(*self->transfers.begin());
    for (const auto &peer : call.hub.peers_)
      if (peer->to == self && peer->state != Hub::kGone && !peer->lost) call.hub.cut(peer.get(), true);
    self->coming.clear();
    self->arrived.clear();
    self->open = false;
    --call.hub.open_;
    ::close(self->fd);
    self->fd = -1;
  }

  static void release(void *self) { ++static_cast<Hub *>(self)->released; }
};

// The table for phx_world_set_carrier, whose `self` is a Hub. `armed`: with a descriptor to wait for.
inline const phx_carrier_ops *hub_carrier_ops(bool armed = true) {
  const auto table = [](bool with) {
    phx_carrier_ops ops{};
    ops.struct_size = sizeof ops;
    ops.name = "hub";
    ops.open = &HubTable::open;
    ops.address = &HubTable::address;
    ops.connect = &HubTable::connect;
    ops.send = &HubTable::send;
    ops.recv = &HubTable::recv;
    ops.test = &HubTable::test;
    ops.cancel = &HubTable::cancel;
    ops.progress = &HubTable::progress;
    ops.unsent = &HubTable::unsent;
    ops.arm = with ? &HubTable::arm : nullptr;
    ops.disconnect = &HubTable::disconnect;
    ops.close = &HubTable::close;
    ops.release = &HubTable::release;
    return ops;
  };
  static const phx_carrier_ops with_arm = table(true), without_arm = table(false);
  return armed ? &with_arm : &without_arm;
}
