// The table of pending work: a list, as few collectives are pending at a time where programs wait for what they start.
// Entries that nobody waits for are found complete by later sweeps, so dropped results do not pile up: a sweep comes
// when the table has twice as many entries as the last one had to leave.
#include "pending.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include "base/fork.h"
#include "errors.h"
#include "gpu.h"
#include "phalanx_torch.h"

namespace phxt {
namespace {

constexpr size_t kSweepAt = 64;

using Entry = std::shared_ptr<Pending>;

struct Table {  // never destroyed: an op may run while the process exits
  phx::AcrossForks<std::mutex> mutex;
  std::vector<Entry> entries;
  size_t sweep_at = kSweepAt;
  std::atomic<uint64_t> count{0};

  // With the mutex held. What is taken out goes to `gone`, to be destroyed without the mutex: the last reference to a
  // tensor may run code of Python.
  void sweep(std::vector<Entry> &gone, const Group *leaving) {
    const auto keep = std::stable_partition(entries.begin(), entries.end(), [=](const Entry &entry) {
      const phx_status status = phx_work_test(entry->work);
      // A failed one stays, as its error belongs to whoever waits; but not for longer than its group.
      return status == PHX_IN_PROGRESS || (status != PHX_OK && entry->group.get() != leaving);
    });
    gone.insert(gone.end(), std::make_move_iterator(keep), std::make_move_iterator(entries.end()));
    entries.erase(keep, entries.end());
    count.store(entries.size(), std::memory_order_relaxed);
    sweep_at = std::max(kSweepAt, 2 * entries.size());
  }
};
Table &table() {
  static Table *const made = new Table;
  return *made;
}

// Waits entry by entry without the mutex. An entry leaves the table only when its wait is over, so that a second thread
// that waits for the same tensor does not pass before.
template <class Matches>
phx_status wait_matching(Matches matches, int64_t timeout_ms, bool *found) {
  Table &all = table();
  phx_status first = PHX_OK;
  for (Entry done;;) {
    Entry next, gone;
    {
      const std::lock_guard lock(all.mutex);
      for (size_t i = 0; i < all.entries.size();) {
        if (all.entries[i] == done) {
          gone = std::move(all.entries[i]);
          all.entries.erase(all.entries.begin() + static_cast<std::ptrdiff_t>(i));
          all.count.store(all.entries.size(), std::memory_order_relaxed);
        } else if (!next && matches(*all.entries[i])) {
          next = all.entries[i++];
        } else {
          ++i;
        }
      }
    }
    if (!next) break;
    if (found) *found = true;
    const phx_status status = phx_work_wait(next->work, timeout_ms);
    if (status != PHX_OK && first == PHX_OK) first = set_error(status, phx_last_error());
    if (status == PHX_ERR_INTERRUPTED) return first;  // it stays, so that a later wait fails too
    done = std::move(next);
  }
  return first;
}

}  // namespace

uint64_t pending_count() { return table().count.load(std::memory_order_relaxed); }

void pending_add(std::shared_ptr<Pending> entry) {
  Table &all = table();
  std::vector<Entry> gone;
  const std::lock_guard lock(all.mutex);
  if (all.entries.size() >= all.sweep_at) all.sweep(gone, nullptr);
  all.entries.push_back(std::move(entry));
  all.count.store(all.entries.size(), std::memory_order_relaxed);
}

void pending_leave(const Group *group) {
  Table &all = table();
  std::vector<Entry> gone;
  const std::lock_guard lock(all.mutex);
  all.sweep(gone, group);
}

phx_status wait_storage(uintptr_t storage, int64_t timeout_ms, bool *found) {
  const phx_status followed = gpu::has_marks() ? gpu::follow_storage(storage, found) : PHX_OK;
  if (storage == 0 || pending_count() == 0) return followed;
  const phx_status status =
      wait_matching([=](const Pending &entry) { return entry.storage == storage; }, timeout_ms, found);
  return status != PHX_OK ? status : followed;
}

phx_status wait_overlapping(uintptr_t storage, const Range &range) {
  return wait_matching([&](const Pending &entry) { return entry.storage == storage && entry.output.overlaps(range); },
                       0, nullptr);
}

}  // namespace phxt

using namespace phxt;

extern "C" {

uint64_t phxt_pending_count(void) { return pending_count(); }

int32_t phxt_pending_has(const void *storage) {
  Table &all = table();
  {
    const std::lock_guard lock(all.mutex);
    const auto matches = [=](const Entry &entry) { return entry->storage == reinterpret_cast<uintptr_t>(storage); };
    if (std::any_of(all.entries.begin(), all.entries.end(), matches)) return 1;
  }
  return gpu::has_mark(reinterpret_cast<uintptr_t>(storage)) ? 1 : 0;
}

phx_status phxt_wait_storage(const void *storage, int64_t timeout_ms) {
  return wait_storage(reinterpret_cast<uintptr_t>(storage), timeout_ms, nullptr);
}

phx_status phxt_wait_group(uint64_t context, const char *name, int64_t timeout_ms) {
  const GroupRef group = name ? find_group(context, name) : nullptr;
  if (!group)
    return set_error(PHX_ERR_NOT_FOUND, std::string("phxt_wait_group: context ") + std::to_string(context) +
                                            " has no group '" + (name ? name : "") + "'");
  const phx_status followed = gpu::follow_group(group.get());
  const phx_status status =
      wait_matching([&](const Pending &entry) { return entry.group == group; }, timeout_ms, nullptr);
  return status != PHX_OK ? status : followed;
}

uint64_t phxt_sweep(void) {
  gpu::sweep_marks();
  Table &all = table();
  std::vector<Entry> gone;
  const std::lock_guard lock(all.mutex);
  all.sweep(gone, nullptr);
  return all.entries.size();
}

}  // extern "C"
