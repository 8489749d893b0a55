// The endpoint of a world at its carrier: one for all of its groups that span hosts. It is opened by the first of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "base/progress.h"
#include "phalanx/carrier.h"
#include "world/world.h"

namespace phx {

// A send or receive that is under way.
struct Carried {
  void *transfer;
  int peer;  // group rank
  bool receives;
  size_t expected;  // bytes of a receive; kAny: any number
  static constexpr size_t kAny = SIZE_MAX;
};

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

}  // namespace phx
