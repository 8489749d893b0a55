// One rank's context: its store, its monitor, its memory and its groups. No state of the process is involved.
#pragma once

#include <unistd.h>

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "memory/allocator.h"
#include "store/store.h"
#include "wait/progress.h"
#include "world/identity.h"
#include "world/monitor.h"

namespace phx {

class Group;

inline constexpr int64_t kDefaultTimeoutMs = 300000;
inline constexpr size_t kDefaultSlotBytes = size_t{256} << 10;  // a chunk of one stays in the second-level cache
inline constexpr uint32_t kDefaultSignalChannels = 64;
inline constexpr uint32_t kDefaultChannels = 4;
inline constexpr uint32_t kMaxChannels = 64;
inline constexpr uint32_t kDefaultRecorderEntries = 256;
inline constexpr uint32_t kMaxRecorderEntries = 1 << 20;
inline constexpr int32_t kMaxRanks = 4096;

class World : public std::enable_shared_from_this<World> {
 public:
  static phx_status create(const phx_world_params &params, std::shared_ptr<World> *out);
  ~World();

  int32_t rank() const { return record_.rank; }
  int32_t size() const { return size_; }
  const PeerRecord &record() const { return record_; }
  const std::string &job() const { return job_; }
  phx_store *store() const { return store_.get(); }
  size_t slot_bytes() const { return slot_bytes_; }
  uint32_t signal_channels() const { return signal_channels_; }
  uint32_t channels() const { return channels_; }
  uint32_t recorder_entries() const {
    return recorder_entries_;
  }  // of the flight recorder, for each channel: a power of two
  int64_t default_timeout_ms() const { return timeout_ms_.load(std::memory_order_relaxed); }
  void set_default_timeout_ms(int64_t ms) { timeout_ms_.store(ms, std::memory_order_relaxed); }
  // 0 means the default; a negative one is PHX_ERR_INVALID.
  phx_status resolve_timeout(const char *operation, int64_t timeout_ms, int64_t *out) const;

  Monitor &monitor() { return monitor_; }
  AllocatorRegistry &allocators() { return allocators_; }
  BlockTable &blocks() { return blocks_; }
  Progress &progress() { return progress_; }
  bool allows_fences() const { return allows_fences_; }

  // The connection to a peer, made if there is none, in two steps: begin it with all peers, and wait for none of them
  // before that. A connection that was begun and not waited for is gone on with by the next call.
  phx_status begin_connecting(const PeerRecord &peer, const Deadline &deadline);
  // `look` is called now and then while the peer does not answer; what it returns, if not PHX_OK, ends the wait.
  phx_status connect(const PeerRecord &peer, const Deadline &deadline, const std::function<phx_status()> &look,
                     LinkRef *out);
  // Who the ranks of this world are, as groups of them have shown. PHX_OK from look_at_rank while nothing is known
  // against that rank; else the thread's error says that it died or left.
  void know_rank(int32_t rank, const PeerRecord &record);
  phx_status look_at_rank(const char *operation, int32_t rank);
  // How many groups of that name this rank has tried to make: makes the keys of a name that is used again new ones.
  uint64_t next_ordinal(const std::string &name);

  void add_group(const std::shared_ptr<Group> &group);
  void forget_block(const BlockRef &block);  // in the caches of all groups
  std::vector<std::shared_ptr<Group>> groups() const;
  bool finalized() const { return finalized_.load(); }
  bool forked() const { return getpid() != record_.pid; }  // this is a child of the process that made the world
  void finalize();

 private:
  phx_status try_connecting(const PeerRecord &peer, const Deadline &until, LinkRef *out);
  World(const PeerRecord &record, int32_t size) : record_(record), size_(size), monitor_(record) {}

  const PeerRecord record_;
  const int32_t size_;
  StoreRef store_;
  std::string job_;
  size_t slot_bytes_ = kDefaultSlotBytes;
  uint32_t signal_channels_ = kDefaultSignalChannels;
  uint32_t channels_ = kDefaultChannels;
  uint32_t recorder_entries_ = kDefaultRecorderEntries;
  bool allows_fences_ = false;
  std::atomic<int64_t> timeout_ms_{kDefaultTimeoutMs};
  std::atomic<bool> finalized_{false};
  AllocatorRegistry allocators_;
  BlockTable blocks_;
  Progress progress_;
  std::mutex dial_mutex_;
  std::map<Uuid, Dial> dials_;  // of peers that have not answered yet
  mutable std::mutex mutex_;
  std::map<std::string, uint64_t> ordinals_;
  std::vector<std::weak_ptr<Group>> groups_;
  std::map<int32_t, PeerRecord> ranks_;  // the newest record of each that this rank has met
  Monitor monitor_;                      // last: its thread ends before anything it uses
};

}  // namespace phx

struct phx_world {
  std::shared_ptr<phx::World> ptr;
};

namespace phx {
// A world that can be used: not NULL, not finalized.
phx_status check_world(const char *operation, const phx_world *world);
}  // namespace phx
