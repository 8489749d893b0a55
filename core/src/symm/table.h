// Where symmetric allocations are found: those of a group by block, and those of the process by address.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "base/fork.h"
#include "group/group.h"
#include "symm/symm.h"

namespace phx {

// The scope of SymmTable::mutex, for Group::take_turn.
inline constexpr const char *kSameRendezvous = "group with a rendezvous. Let one thread make them";

// The symmetric allocations of one group by block, and the state that their rendezvous share.
class SymmTable final : public Attachment {
 public:
  static constexpr AttachmentKind kKind = AttachmentKind::kSymm;
  SymmTable(Group &group, MakeSymmDevice make_device);

  // Held during a rendezvous. Rendezvous are collective, so they have one order anyway.
  TurnMutex &mutex() { return mutex_; }
  Pads &pads(bool on_device) { return on_device ? device_pads_ : pads_; }
  MakeSymmDevice make_device() const { return make_device_; }
  uint64_t next_ordinal() { return ordinal_++; }

  std::shared_ptr<Symm> find(uint64_t block_serial) const;
  void keep(uint64_t block_serial, std::shared_ptr<Symm> symm);
  // Like Group::refuse_exchange, in place of a rendezvous.
  phx_status refuse_rendezvous();

  void forget(uint64_t block_serial);  // the world has freed that block
  void close() override;

 private:
  Group &group_;
  const MakeSymmDevice make_device_;
  TurnMutex mutex_;
  Pads pads_;         // of allocations in host memory
  Pads device_pads_;  // with the entries of enqueued collectives after each pad
  mutable std::mutex cache_mutex_;
  std::map<uint64_t, std::shared_ptr<Symm>> symms_;
  uint64_t ordinal_ = 0;
};

inline SymmTable &symms_of(const Group &group) { return group.attached<SymmTable>(); }

// The symmetric allocations of this process, of all worlds, by address and by the processes that share them.
//
// With it a collective of any group finds out that its peers can read its input in place, whichever group the
// rendezvous was with, as long as both groups have the same processes in the same order.
class SymmDirectory {
 public:
  static SymmDirectory &of_process();

  void add(const std::shared_ptr<Symm> &symm);
  void remove(const Symm *symm);
  // The allocation with these bytes: of several, that with the smallest key, the same on all ranks. NULL: there is
  // none.
  std::shared_ptr<Symm> find(uint64_t members, int group_rank, const char *begin, size_t bytes) const;
  // The allocation with that key. NULL if there is none: this rank may have freed an allocation that others still have.
  std::shared_ptr<Symm> find_key(uint64_t members, int group_rank, uint64_t key) const;
  bool has_any(uint64_t members, int group_rank) const;
  bool empty() const { return count_.load(std::memory_order_relaxed) == 0; }

 private:
  struct Row {
    const Symm *symm;
    std::weak_ptr<Symm> weak;
  };

  using Name = std::tuple<uint64_t, int, uint64_t>;  // members, group rank, key
  static Name name_of(const Symm &symm);

  mutable AcrossForks<std::mutex> mutex_;
  std::multimap<const char *, Row> by_base_;
  std::map<Name, Row> by_name_;
  std::atomic<size_t> count_{0};
};

}  // namespace phx
