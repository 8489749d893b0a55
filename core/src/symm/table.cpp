#include "symm/table.h"

#include <utility>

#include "base/error.h"
#include "symm/directory.h"
#include "symm/symm.h"

namespace phx {

SymmTable::SymmTable(Group &group, MakeSymmDevice make_device)
    : group_(group),
      make_device_(make_device),
      pads_(group.size(), group.group_rank(), pad_bytes_of(group.world().signal_channels(), group.size())),
      device_pads_(group.size(), group.group_rank(),
                   pad_bytes_of(group.world().signal_channels(), group.size()) +
                       round_up(kCallEntries * sizeof(HistoryEntry), page_bytes())) {}

std::shared_ptr<Symm> SymmTable::find(uint64_t block_serial) const {
  std::lock_guard<std::mutex> lock(cache_mutex_);
  auto row = symms_.find(block_serial);
  return row == symms_.end() ? nullptr : row->second;
}

void SymmTable::keep(uint64_t block_serial, std::shared_ptr<Symm> symm) {
  if (!symm->block().on_device()) SymmDirectory::of_process().add(symm);  // the host reads blocks that it finds there
  if (symm->device() != nullptr) symm->device()->on_kept(*symm);
  std::lock_guard<std::mutex> lock(cache_mutex_);
  symms_[block_serial] = std::move(symm);
}

void SymmTable::forget(uint64_t block_serial) {
  std::shared_ptr<Symm> gone;  // destroyed after the lock is released
  std::lock_guard<std::mutex> lock(cache_mutex_);
  auto row = symms_.find(block_serial);
  if (row == symms_.end()) return;
  gone = std::move(row->second);
  symms_.erase(row);
}

void SymmTable::close() { symms_.clear(); }

phx_status SymmTable::refuse_rendezvous() {
  const KeptError error;
  LazyDeadline until(group_.world().default_timeout_ms(), &group_.world().progress());
  Turn turn(mutex_, std::defer_lock);
  if (!group_.may_refuse() || !take_turn(turn, until)) return error.info().status;
  next_ordinal();  // the other ranks count this rendezvous too
  return group_.refuse_exchange();
}

}  // namespace phx
