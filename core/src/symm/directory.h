// The symmetric allocations of this process, of all worlds, by address and by the processes that share them.
//
// With it a collective of any group finds out that its peers can read its input in place, whichever group the
// rendezvous was with, as long as both groups have the same processes in the same order.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>

#include "base/fork.h"
#include "symm/symm.h"

namespace phx {

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
  static Name name_of(const Symm &symm) { return {symm.members(), symm.group_rank(), symm.key()}; }

  mutable AcrossForks<std::mutex> mutex_;
  std::multimap<const char *, Row> by_base_;
  std::map<Name, Row> by_name_;
  std::atomic<size_t> count_{0};
};

}  // namespace phx
