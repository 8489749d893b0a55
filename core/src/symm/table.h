// The symmetric allocations of one group by block, and the state that their rendezvous share.
#pragma once

#include <map>
#include <memory>
#include <mutex>

#include "group/group.h"
#include "symm/device.h"
#include "symm/pads.h"

namespace phx {

class Symm;

// The scope of SymmTable::mutex, for Group::take_turn.
inline constexpr const char *kSameRendezvous = "group with a rendezvous. Let one thread make them";

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

}  // namespace phx
