// The functions of libphalanx that the backend calls, of the library that phalanx.core loaded.
#pragma once

#include <phalanx/cuda.h>
#include <phalanx/phalanx.h>

#include <cstdint>
#include <string>
#include <unordered_map>

namespace phalanx {

#define PHALANX_CORE_FUNCTIONS(X) \
  X(all_reduce)                   \
  X(all_gather)                   \
  X(all_gather_blocks)            \
  X(all_gather_v)                 \
  X(reduce_scatter)               \
  X(reduce_scatter_blocks)        \
  X(reduce_scatter_v)             \
  X(all_to_all)                   \
  X(all_to_all_blocks)            \
  X(all_to_all_v)                 \
  X(broadcast)                    \
  X(reduce)                       \
  X(gather)                       \
  X(gather_blocks)                \
  X(scatter)                      \
  X(scatter_blocks)               \
  X(coalesced)                    \
  X(send)                         \
  X(recv)                         \
  X(messages)                     \
  X(abi_version)                  \
  X(struct_size)                  \
  X(last_error)                   \
  X(barrier)                      \
  X(group_get_error)              \
  X(group_refuse)                 \
  X(group_release)                \
  X(group_revoke)                 \
  X(group_set_timeout)            \
  X(window_create)                \
  X(window_flush)                 \
  X(window_get)                   \
  X(window_get_signals)           \
  X(window_memory)                \
  X(window_put)                   \
  X(window_release)               \
  X(window_wait_signal)           \
  X(work_test)                    \
  X(work_expire)                  \
  X(work_wait)                    \
  X(work_get_source)              \
  X(work_retain)                  \
  X(work_release)

struct Core {
#define X(name) decltype(&phx_##name) name = nullptr;
  PHALANX_CORE_FUNCTIONS(X)
#undef X
};

// Makes the table from addresses by name, such as "phx_all_reduce". Throws c10::Error if an address is missing, or if
// the library was built from another header.
Core load_core(const std::unordered_map<std::string, uintptr_t> &addresses);

}  // namespace phalanx
