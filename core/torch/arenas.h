// Arenas: symmetric memory in which a compiled graph lays out the tensors of its collectives.
//
// An arena belongs to a context, a group and a plan, and lives until the group is removed (phxt_group_remove). Its
// memory lives longer where a tensor lies in it: each one holds it, also the memory that the arena had before it grew.
#pragma once

#include "call.h"

namespace phxt {

struct Arena {  // never changes: growth puts another one in its place
  Arena(GroupRef of, std::string_view plan_name, int32_t on, phx_symm *owned, size_t size)
      : group(std::move(of)), plan(plan_name), gpu(on), symm(owned), bytes(size) {}
  Arena(const Arena &) = delete;
  Arena &operator=(const Arena &) = delete;
  ~Arena() { phx_symm_release(symm); }
  const GroupRef group;
  const std::string plan;  // its name
  const int32_t gpu;       // where its memory is, or kHost
  phx_symm *const symm;    // the blocks of all ranks; NULL of 0 bytes
  const size_t bytes;      // of each block
};
using ArenaRef = std::shared_ptr<const Arena>;

// The number of the arena of this plan, where the call's tensors lie, with at least so many bytes, for as long as it
// lives. Collective where there is none, or it has fewer: then the ranks compare plan and bytes (agreement.h) before it
// is made or grows.
int64_t arena_number(const Call &call, std::string_view plan, size_t bytes);

ArenaRef find_arena(int64_t number);  // empty when there is none

void arenas_leave(const Group *group);  // its arenas go

}  // namespace phxt
