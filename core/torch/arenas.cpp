// The registry of arenas. Lookups share a lock; never destroyed, as a kernel may run while the process exits.
#include "arenas.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "agreement.h"
#include "base/fork.h"

namespace phxt {
namespace {

// Numbers start far from those that a tensor of something else would have.
constexpr int64_t kFirstNumber = INT64_C(0x5048584100000001);
constexpr size_t kPageBytes = 4096;

// Registered groups are of one context, so group, plan and device are the whole key. Two texts of one name are two
// plans.
struct Row {
  int64_t number;
  size_t plan_bytes;
  ArenaRef arena;
};
struct Arenas {
  phx::AcrossForks<std::shared_mutex> mutex;
  std::vector<Row> rows;
  int64_t next_number = kFirstNumber;

  Row *find(const Call &call, std::string_view plan) {
    const std::string_view name = name_of_plan(plan);
    for (Row &row : rows)
      if (row.plan_bytes == plan.size() && row.arena->group == call.group && row.arena->gpu == call.gpu &&
          row.arena->plan == name)
        return &row;
    return nullptr;
  }
};
Arenas &all_arenas() {
  static Arenas *const made = new Arenas;
  return *made;
}

// A plan whose shapes grow step by step shall not need new memory at each of them. All ranks come to the same size.
size_t size_to_make(size_t bytes, size_t before) {
  if (bytes == 0) return 0;
  const size_t wished = std::max({bytes, before + before / 2, kPageBytes});
  return (wished + kPageBytes - 1) / kPageBytes * kPageBytes;
}

// A plan that needs no memory has an arena all the same: it was compared, and stands for an order.
ArenaRef make_arena(const Call &call, std::string_view plan, size_t bytes) {
  phx_symm *symm = nullptr;
  const phx_device *const device = call.gpu == kHost ? nullptr : &call.on_gpu.device;
  if (bytes != 0) check_core(phx_symm_alloc(call.handle(), device, bytes, 0, &symm));
  return std::make_shared<Arena>(call.group, name_of_plan(plan), call.gpu, symm, bytes);
}

}  // namespace

int64_t arena_number(const Call &call, std::string_view plan, size_t bytes) {
  Arenas &all = all_arenas();
  size_t before = 0;
  {
    const std::shared_lock lock(all.mutex);
    if (const Row *row = all.find(call, plan)) {
      before = row->arena->bytes;
      if (bytes <= before) return row->number;
    }
  }
  agree_on_plan(call, plan, bytes, before);
  ArenaRef arena = make_arena(call, plan, size_to_make(bytes, before));
  const std::unique_lock lock(all.mutex);
  if (Row *row = all.find(call, plan)) {
    row->arena.swap(arena);  // the old one is released after the lock
    return row->number;
  }
  const int64_t number = all.next_number++;
  all.rows.push_back({number, plan.size(), std::move(arena)});
  return number;
}

ArenaRef find_arena(int64_t number) {
  Arenas &all = all_arenas();
  const std::shared_lock lock(all.mutex);
  for (const Row &row : all.rows)
    if (row.number == number) return row.arena;
  return nullptr;
}

void arenas_leave(const Group *group) {
  std::vector<Row> gone;  // released after the lock: that may unmap memory
  Arenas &all = all_arenas();
  const std::unique_lock lock(all.mutex);
  const auto keep = std::stable_partition(all.rows.begin(), all.rows.end(),
                                          [=](const Row &row) { return row.arena->group.get() != group; });
  gone.assign(std::make_move_iterator(keep), std::make_move_iterator(all.rows.end()));
  all.rows.erase(keep, all.rows.end());
}

}  // namespace phxt
