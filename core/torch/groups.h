// Which group a name means: (context, name) -> phx_group. A context is one rank of this process.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "phalanx/phalanx.h"

namespace phxt {

struct Group {
  ~Group() { phx_group_release(handle); }
  phx_group *handle;
  std::string name;
  int32_t rank;  // of this process in the group
  int32_t size;
  uint64_t eager_bytes;  // input up to this size has been taken when a start returns
  // Which tensors come here: phxt_group_serve.
  mutable std::atomic<bool> serves_cpu{true}, serves_cuda{false};
};
using GroupRef = std::shared_ptr<const Group>;

uint64_t current_context();
GroupRef find_group(uint64_t context, std::string_view name);  // empty when there is none
inline GroupRef find_group(std::string_view name) { return find_group(current_context(), name); }

}  // namespace phxt
