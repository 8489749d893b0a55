#include "symm/table.h"

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

SymmDirectory &SymmDirectory::of_process() {
  static SymmDirectory *const directory = new SymmDirectory;  // never destroyed: memory may be freed after main
  return *directory;
}

SymmDirectory::Name SymmDirectory::name_of(const Symm &symm) { return {symm.members(), symm.group_rank(), symm.key()}; }

void SymmDirectory::add(const std::shared_ptr<Symm> &symm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  by_base_.insert({static_cast<const char *>(symm->block().base), {symm.get(), symm}});
  by_name_.insert({name_of(*symm), {symm.get(), symm}});
  count_.store(by_base_.size(), std::memory_order_relaxed);
}

void SymmDirectory::remove(const Symm *symm) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto range = by_base_.equal_range(static_cast<const char *>(symm->block().base));
  const auto row =
      std::find_if(range.first, range.second, [&](const auto &entry) { return entry.second.symm == symm; });
  if (row != range.second) by_base_.erase(row);
  const auto named = by_name_.find(name_of(*symm));
  if (named != by_name_.end() && named->second.symm == symm) by_name_.erase(named);
  count_.store(by_base_.size(), std::memory_order_relaxed);
}

std::shared_ptr<Symm> SymmDirectory::find(uint64_t members, int group_rank, const char *begin, size_t bytes) const {
  std::shared_ptr<Symm> best;
  const std::lock_guard<std::mutex> lock(mutex_);
  auto row = by_base_.upper_bound(begin);
  if (row == by_base_.begin()) return nullptr;
  const char *const base = std::prev(row)->first;
  for (row = by_base_.lower_bound(base); row != by_base_.end() && row->first == base; ++row) {
    // A Symm in the table has not been destroyed: its destructor removes it first.
    const Symm &symm = *row->second.symm;
    if (symm.members() != members || symm.group_rank() != group_rank) continue;
    if (static_cast<size_t>(begin - base) > symm.block().size ||
        bytes > symm.block().size - static_cast<size_t>(begin - base))
      continue;
    if (best && best->key() <= symm.key()) continue;
    if (std::shared_ptr<Symm> held = row->second.weak.lock()) best.swap(held);
  }
  return best;
}

std::shared_ptr<Symm> SymmDirectory::find_key(uint64_t members, int group_rank, uint64_t key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto row = by_name_.find({members, group_rank, key});
  return row == by_name_.end() ? nullptr : row->second.weak.lock();
}

bool SymmDirectory::has_any(uint64_t members, int group_rank) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto row = by_name_.lower_bound({members, group_rank, 0});
  return row != by_name_.end() && std::get<0>(row->first) == members && std::get<1>(row->first) == group_rank;
}

}  // namespace phx
