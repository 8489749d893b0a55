// One rank's context: its store, its monitor, its memory and its groups. No state of the process is involved.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "base/cores.h"
#include "base/fork.h"
#include "phalanx/carrier.h"
#include "store/store.h"
#include "world/allocator.h"
#include "world/monitor.h"

namespace phx {

inline constexpr int64_t kDefaultTimeoutMs = 300000;
inline constexpr uint32_t kMaxChannels = 64;
inline constexpr uint32_t kMaxRecorderEntries = 1 << 20;
inline constexpr int32_t kMaxRanks = 4096;

using Carrier = Registered<phx_carrier_ops, &phx_carrier_ops::release>;
using CarrierRef = std::shared_ptr<Carrier>;

// The carrier of a world: the functions that move bytes to other hosts, and the endpoint that room net/ opens with
// them.
class CarrierSlot {
 public:
  // Makes the carrier of a world for which none was set. NULL, with the thread's error: there is none.
  using Maker = const phx_carrier_ops *(*)();
  void make_on_demand(Maker maker) { maker_ = maker; }
  // False: the endpoint is open already.
  bool set(CarrierRef carrier) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (endpoint_) return false;
    carrier_ = std::move(carrier);
    return true;
  }
  // The endpoint, which `open` makes if there is none.
  template <class Open>
  phx_status endpoint(Open open, std::shared_ptr<ProgressSource> *out) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!endpoint_) {
      if (!carrier_) {
        const phx_carrier_ops *const ops = maker_();
        if (ops == nullptr) return last_error().status;
        carrier_ = std::make_shared<Carrier>(*ops, nullptr);
      }
      PHX_TRY(open(carrier_, &endpoint_));
    }
    *out = endpoint_;
    return PHX_OK;
  }

 private:
  Maker maker_ = nullptr;
  std::mutex mutex_;  // also held while the endpoint is opened
  CarrierRef carrier_;
  std::shared_ptr<ProgressSource> endpoint_;
};

class World : public std::enable_shared_from_this<World> {
 public:
  static phx_status create(const phx_world_params &params, std::shared_ptr<World> *out);
  ~World();

  int32_t rank() const { return record_.rank; }
  int32_t size() const { return size_; }
  const PeerRecord &record() const { return record_; }  // without an address
  // Where this rank accepts ranks of other hosts; family 0 until listen_for_hosts() has succeeded.
  HostAddress address() const { return listens_.load(std::memory_order_acquire) ? address_ : HostAddress{}; }
  // Begins to accept ranks of other hosts, unless it does so already. The address is one on the way to the server of
  // the store, or to MASTER_ADDR, unless a variable names an interface: see choose_address.
  phx_status listen_for_hosts(HostAddress *out);
  const std::string &job() const { return job_; }
  phx_store *store() const { return store_.get(); }
  size_t slot_bytes() const { return slot_bytes_; }
  uint32_t signal_channels() const { return signal_channels_; }
  uint32_t channels() const { return channels_; }
  uint32_t recorder_entries() const { return recorder_entries_; }  // for each channel: a power of two
  int64_t default_timeout_ms() const { return timeout_ms_.load(std::memory_order_relaxed); }
  void set_default_timeout_ms(int64_t ms) { timeout_ms_.store(ms, std::memory_order_relaxed); }
  // 0 means the default; a negative one is PHX_ERR_INVALID.
  phx_status resolve_timeout(const char *operation, int64_t timeout_ms, int64_t *out) const {
    if (timeout_ms < 0 || in_interrupt_hook()) return refuse_to_wait(operation, timeout_ms);
    *out = timeout_ms == 0 ? default_timeout_ms() : timeout_ms;
    return PHX_OK;
  }

  // The text of an error for a wait of this length.
  std::string timed_out(int64_t timeout_ms) const {
    return phx::timed_out(timeout_ms, timeout_ms == default_timeout_ms() ? "the default of the world" : kLimitOfCall);
  }

  Monitor &monitor() { return monitor_; }
  AllocatorRegistry &allocators() { return allocators_; }
  CarrierSlot &carrier() { return carrier_; }
  BlockTable &blocks() { return blocks_; }
  const BlockTable &blocks() const { return blocks_; }
  Progress &progress() { return progress_; }
  bool allows_fences() const { return allows_fences_; }
  const CpuQuota &cpu_quota() const { return cpu_quota_; }

  // The connection to a peer, made if there is none, in two steps: begin it with all peers, and wait for none of them
  // before that. To a peer of another host it is a TCP connection to the address in its record, and both ranks must
  // listen_for_hosts(), because either may be the one that dials.
  phx_status begin_connecting(const PeerRecord &peer);
  // `look` is called now and then while the peer does not answer; what it returns, if not PHX_OK, ends the wait.
  phx_status connect(const PeerRecord &peer, const Deadline &deadline, const std::function<phx_status()> &look,
                     LinkRef *out);
  // The newest record of each rank of this world, as its groups learn it. PHX_OK from look_at_rank while nothing is
  // known against that rank; else the thread's error says that it died or left.
  void know_rank(int32_t rank, const PeerRecord &record);
  phx_status look_at_rank(int32_t rank);
  // How many groups under that key this rank has tried to make: makes the keys of a name that is used again new ones.
  // *first_failed: the first attempt whose failure may still be told in the store; that number itself if there is none.
  uint64_t next_attempt(const std::string &key, uint64_t *first_failed);
  void note_failed_attempt(const std::string &key, uint64_t attempt);
  void forget_failed_attempts(const std::string &key);

  void add_group(const std::shared_ptr<GroupListener> &group);
  std::vector<std::shared_ptr<GroupListener>> groups() const;  // all of them are Groups
  bool finalized() const { return finalized_.load(); }
  // Whether this process is a forked child of the one that made the world. One relaxed load.
  bool forked() const { return generation_ != process_generation(); }
  void finalize();

 private:
  // The error of resolve_timeout.
  phx_status refuse_to_wait(const char *operation, int64_t timeout_ms) const;
  phx_status raise_late(const PeerRecord &peer, const Deadline &deadline) const;
  World(const PeerRecord &record, int32_t size) : record_(record), size_(size), monitor_(record) {}

  const PeerRecord record_;
  const int32_t size_;
  const uint32_t generation_ = process_generation();
  StoreRef store_;
  std::string job_;
  size_t slot_bytes_ = size_t{256} << 10;  // a chunk of one stays in the second-level cache
  uint32_t signal_channels_ = 64;
  uint32_t channels_ = 4;
  uint32_t recorder_entries_ = 256;
  bool allows_fences_ = false;
  CpuQuota cpu_quota_;
  std::atomic<int64_t> timeout_ms_{kDefaultTimeoutMs};
  std::atomic<bool> finalized_{false};
  AllocatorRegistry allocators_;
  BlockTable blocks_;
  Progress progress_;
  CarrierSlot carrier_;
  std::mutex listen_mutex_;
  std::atomic<bool> listens_{false};  // release, after address_ is complete; pairs with the acquire in address()
  HostAddress address_{};
  mutable std::mutex mutex_;
  struct Attempts {
    uint32_t made = 0;
    uint32_t failed = 0;  // one more than the number of the first whose failure may be in the store; 0: none
  };
  // By the hash of the key. An entry stays for each name: the peers count in the same way, and any name may be used
  // again.
  std::unordered_map<uint64_t, Attempts> attempts_;
  std::vector<std::weak_ptr<GroupListener>> groups_;
  std::map<int32_t, PeerRecord> ranks_;  // the newest record of each that this rank has met
  Monitor monitor_;                      // last: its thread ends before anything it uses
};

// PHX_ERR_UNSUPPORTED: this process is a forked child of the one that made the world.
phx_status refuse_fork(const char *operation, const World &world);

}  // namespace phx

struct phx_world {
  std::shared_ptr<phx::World> ptr;
};
