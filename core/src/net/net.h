// What a group sends to and receives from its ranks on other hosts, through the endpoint of its world.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "base/wait.h"
#include "group/group.h"

namespace phx {

// A send or receive that is under way.
struct Carried {
  void *transfer;
  int peer;  // group rank
  bool receives;
  size_t expected;  // bytes of a receive; kAny: any number
  static constexpr size_t kAny = SIZE_MAX;
};

// The endpoint of a world at its carrier: one for all of its groups that span hosts. It is opened by the first of them.
class Endpoint final : public ProgressSource {
 public:
  // The endpoint of that world, opened if there is none.
  static phx_status of(World &world, std::shared_ptr<Endpoint> *out);
  ~Endpoint() override;

  const std::string &address() const { return address_; }
  // A number that no other group of this world has. Tags of messages to the group begin with it.
  uint16_t take_number();
  void give_back_number(uint16_t number);

  // The functions of the carrier, one at a time. Transfers count as pending operations of the world until they are
  // gone.
  phx_status connect(const std::string &address, void **peer);
  void disconnect(void *peer, bool flush);
  phx_status send(void *peer, uint64_t tag, const void *data, size_t bytes, int rank, std::vector<Carried> *list);
  phx_status recv(void *peer, uint64_t tag, void *data, size_t bytes, bool exact, int rank, std::vector<Carried> *list);
  // Moves what can be moved, and takes what is complete from the list. An error: *peer is the group rank at fault.
  phx_status test(std::vector<Carried> *list, int *peer);
  // Gives up the receives (or the sends, after their peers were disconnected) of a list.
  void cancel(std::vector<Carried> *list, bool receives);
  bool advance_pending() override;
  // While one lives, its thread moves what can be moved, and advance_pending leaves that to it.
  class Watch {
   public:
    explicit Watch(Endpoint &endpoint) : endpoint_(endpoint) { ++endpoint_.watches_; }
    ~Watch() { --endpoint_.watches_; }
    Watch(const Watch &) = delete;
    Watch &operator=(const Watch &) = delete;

   private:
    Endpoint &endpoint_;
  };
  // For the thread that looks after what the others leave to it: see ProgressSource::arm.
  int arm_for_attendant();
  // Lets what was sent leave this process, for `ms` at most.
  void flush(int64_t ms);
  // Sleeps until there may be something to move, for at most `ns`.
  void sleep(int64_t ns);

 private:
  Endpoint(World &world, const phx_carrier_ops &ops, std::shared_ptr<void> owner)
      : progress_(world.progress()), ops_(ops), owner_(std::move(owner)) {}
  phx_status open(void *self);
  void look_behind();  // after a send is complete, with the mutex held
  bool progress();     // with the mutex held; whether anything moved

  Progress &progress_;
  const phx_carrier_ops ops_;
  const std::shared_ptr<void> owner_;  // the carrier
  void *endpoint_ = nullptr;
  std::string address_;
  std::mutex mutex_;
  std::atomic<int> watches_{0};
  // Whether another thread than the attendant has moved something since that asked last, and whether it sleeps: what it
  // waits for may have come, and the descriptor does not tell it any more.
  bool moved_ = false, attendant_sleeps_ = false;
  bool rest_ = false;  // of complete sends, which waits for progress: a pending operation
  std::set<uint16_t> numbers_;
  uint16_t last_number_ = 0;
};

// The name of a message among all those between two ranks of a group: a channel, or one of these numbers for what p2p/
// sends; the number of the call in that channel, modulo 2^13; and a number within the call.
struct MessageName {
  static constexpr uint32_t kMessages = 64, kMeeting = 65, kWindows = 66, kWindowReplies = 67;
  uint32_t channel;
  uint64_t call;
  uint32_t part;
};

class Net final : public Attachment {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kNet;
  explicit Net(Group &group) : group_(group) {}
  ~Net() override;

  phx_status prepare() override;
  phx_status connect(const Deadline &deadline) override;
  void flush() override;
  void close() override;

  Group &group() const { return group_; }
  struct Memory {
    std::unique_ptr<char[]> bytes;
    size_t size = 0;
  };
  Memory take_memory(size_t bytes);
  void give_back_memory(Memory memory);
  phx_status send(int to, const MessageName &name, const void *data, size_t bytes, std::vector<Carried> *list);
  // `exact`: whether a message of fewer bytes is an error; one of more always is.
  phx_status recv(int from, const MessageName &name, void *data, size_t bytes, bool exact, std::vector<Carried> *list);
  phx_status test(std::vector<Carried> *list, int *peer) { return endpoint_->test(list, peer); }
  // Whether it is useless to wait for anybody. A group from which a rank has left in good order goes on without it.
  bool interrupted() const { return group_.interruption(group_.group_rank()).load(std::memory_order_acquire) != 0; }
  // Gives all of it up. The connections to ranks with which sends are among it end for good.
  void give_up(std::vector<Carried> *list);
  // Calls `look`, which moves data, until it returns something else than kNothing. Ends at once when the group has
  // failed, and a second after a rank of `late` has left: what that one had sent may still be on its way.
  template <class Look, class Late>
  WaitResult wait(const char *operation, LazyDeadline &deadline, Look look, Late late);
  void sleep(int64_t ns) { endpoint_->sleep(ns); }  // until there may be something to move
  int arm() { return endpoint_->arm_for_attendant(); }
  // The error of an operation whose transfer with that rank has failed, which is the thread's last error. Fails the
  // group.
  phx_status raise(const char *operation, uint64_t sequence, int peer);
  // The error of a wait that ended without success. Fails the group.
  phx_status raise_wait(const char *operation, uint64_t sequence, WaitResult result, const std::vector<int> &late,
                        int64_t timeout_ms);

 private:
  phx_status exchange_addresses(const Deadline &deadline);
  phx_status greet(const Deadline &deadline);
  phx_status reach(int rank, void **peer);  // with the mutex held
  uint64_t tag(uint16_t number, int from, const MessageName &name) const;
  void disconnect(int rank, bool flush);  // with the mutex held
  void disconnect_all(bool flush);

  Group &group_;
  std::shared_ptr<Endpoint> endpoint_;
  uint16_t number_ = 0;             // of this group here; 0: none
  std::vector<uint16_t> numbers_;   // by group rank: that of this group there
  std::vector<std::string> where_;  // addresses
  std::mutex mutex_;
  std::vector<void *> peers_;  // connections, made when they are first used; NULL: none
  std::vector<bool> ended_;    // by group rank: there is to be no connection any more
  std::mutex memory_mutex_;
  std::vector<Memory> memory_;  // that no operation uses
};

// How long a rank that leaves waits for what it has sent to go, and its peers for what it had sent to come.
inline constexpr int64_t kPartingMs = 1000;

// A peer that has left. What it had sent may come later than the word that it has.
class Parting {
 public:
  bool is_over() {
    constexpr int kLooks = 200;
    if (since_ns_ == 0) since_ns_ = now_ns();
    return ++looks_ > kLooks && now_ns() - since_ns_ > kPartingMs * 1000 * 1000;
  }

 private:
  int64_t since_ns_ = 0;
  int looks_ = 0;
};

// For the first rank of a host to say how calls differ of which messages do not fit.
inline constexpr int64_t kComparisonMs = 2000;

inline Net &net_of(const Group &group) { return group.attached<Net>(); }

// Memory for what crosses, which was touched before. It goes back to its group at the end.
class Scratch {
 public:
  Scratch() = default;
  Scratch(Net &net, size_t bytes) {
    // NOLINTNEXTLINE(clang-analyzer-cplusplus.NewDeleteLeaks): it goes back to `net`, and ends with it
    Net::Memory memory = net.take_memory(bytes);
    memory_ = {memory.bytes.release(), {&net, memory.size}};
  }
  char *data() const { return memory_.get(); }

 private:
  struct GiveBack {
    Net *net;
    size_t size;
    void operator()(char *bytes) const { net->give_back_memory({std::unique_ptr<char[]>(bytes), size}); }
  };
  std::unique_ptr<char[], GiveBack> memory_;
};

// What one step of an operation has under way. Gives up what is left when it goes.
class Transfers {
 public:
  explicit Transfers(Net &net) : net_(&net) {}
  Transfers(Transfers &&) noexcept = default;
  Transfers &operator=(Transfers &&) = delete;
  ~Transfers() {
    if (!list_.empty()) net_->give_up(&list_);
  }

  // After an error these do nothing, and `poll` returns it.
  void send(int to, const MessageName &name, const void *data, size_t bytes) {
    if (error_ == nullptr) keep(to, net_->send(to, name, data, bytes, &list_));
  }
  void recv(int from, const MessageName &name, void *data, size_t bytes) {
    if (error_ == nullptr) keep(from, net_->recv(from, name, data, bytes, true, &list_));
  }
  void recv_some(int from, const MessageName &name, void *data, size_t most) {
    if (error_ == nullptr) keep(from, net_->recv(from, name, data, most, false, &list_));
  }
  // PHX_OK once all is complete. An error stays, and is this thread's last one.
  phx_status poll();
  int failed_peer() const { return peer_; }
  // The ranks for whose messages this one waits, or, if there are none, those that take nothing.
  std::vector<int> late() const;

 private:
  void keep(int rank, phx_status status);  // the thread's last error, if the status is one

  Net *net_;
  std::vector<Carried> list_;
  std::unique_ptr<ErrorInfo> error_;
  int peer_ = -1;
};

template <class Look, class Late>
WaitResult Net::wait(const char *operation, LazyDeadline &deadline, Look look, Late late) {
  constexpr int64_t kSliceNs = 5 * 1000 * 1000;
  // Longer spinning would keep the core from a rank that is waited for, if that one is on it. Over TCP a look takes a
  // system call, so a yield after each costs little.
  constexpr int64_t kSpinNs = 2000;
  const int64_t spin_until_ns = now_ns() + kSpinNs;
  do {
    if (const WaitResult seen = look(); seen != WaitResult::kNothing) return seen;
  } while (now_ns() < spin_until_ns);
  const Endpoint::Watch watch(*endpoint_);
  Parting parting;
  const auto look_at_all = [&] {
    const WaitResult seen = look();
    if (seen != WaitResult::kNothing) return seen;
    if (interrupted()) return WaitResult::kInterrupted;
    bool gone = false;
    for (const int rank : late()) gone = gone || group_.interruption(rank).load(std::memory_order_acquire) != 0;
    return gone && parting.is_over() ? WaitResult::kInterrupted : seen;
  };
  const auto text = [&] { return group_.still_waiting(operation, 0, late()); };
  const LongWait long_wait(WaitText(text), deadline.at_ns(), deadline.budget_ms());
  Waiter waiter(deadline);
  return waiter.wait(look_at_all, [&] {
    endpoint_->sleep(
        std::min(waiter.left_ns(), deadline.poll() == LazyDeadline::Elsewhere::kNothing ? kSliceNs : kSliceNs / 50));
    return WaitResult::kNothing;
  });
}

}  // namespace phx
