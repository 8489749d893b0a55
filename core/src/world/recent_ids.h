// The last numbers that were put in: of a bounded count, in memory that does not grow.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace phx {

class RecentIds {
 public:
  static constexpr size_t kCount = 1024;

  void insert(uint64_t id) {  // not 0
    if (count(id) != 0) return;
    ids_[next_] = id;
    next_ = (next_ + 1) % kCount;
  }
  void erase(uint64_t id) {
    const auto found = std::find(ids_.begin(), ids_.end(), id);
    if (found != ids_.end()) *found = 0;
  }
  size_t count(uint64_t id) const { return std::find(ids_.begin(), ids_.end(), id) != ids_.end() ? 1 : 0; }

 private:
  std::array<uint64_t, kCount> ids_{};
  size_t next_ = 0;
};

}  // namespace phx
