// Copies structs of the C API in and out for callers whose version of a struct may be shorter or longer.
#pragma once

#include <cstring>

#include "base/error.h"
#include "phalanx/carrier.h"
#include "phalanx/cuda.h"
#include "phalanx/tuning.h"

namespace phx {

// Every public struct.
// clang-format off
#define PHX_STRUCTS(X)                                                                         \
  X(phx_device) X(phx_error_info) X(phx_store_ops) X(phx_world_params) X(phx_group_info)       \
  X(phx_group_options) X(phx_allocator_ops) X(phx_mem_info) X(phx_symm_info) X(phx_team)       \
  X(phx_options) X(phx_block) X(phx_call) X(phx_message) X(phx_gpu_options) X(phx_group_stats) \
  X(phx_tuning) X(phx_gpu_tuning) X(phx_carrier_ops)
// clang-format on

// The public name of a struct, for errors.
template <class T>
constexpr const char *struct_name();
#define PHX_NAME(type)                        \
  template <>                                 \
  constexpr const char *struct_name<type>() { \
    return #type;                             \
  }
PHX_STRUCTS(PHX_NAME)
#undef PHX_NAME

// Fields that the caller's version lacks stay as they are in `out`, which must hold the defaults. Fields that this
// version does not know must be zero: a caller that sets them expects something that this library would not do.
template <class T>
phx_status read_in(const T *in, T *out, const char *operation) {
  uint32_t size = 0;
  std::memcpy(&size, in, sizeof size);
  if (size < sizeof size || size > sizeof(T) * 16)
    return fail(PHX_ERR_ABI, operation, "struct_size is %u; set it to sizeof(%s), as its initializer does", size,
                struct_name<T>());
  std::memcpy(static_cast<void *>(out), in, size < sizeof(T) ? size : sizeof(T));
  const char *const bytes = reinterpret_cast<const char *>(in);
  for (uint32_t i = sizeof(T); i < size; ++i)
    if (bytes[i] != 0)
      return fail(PHX_ERR_INVALID, operation,
                  "byte %u of %s is %d, but this version of phalanx knows its first %zu bytes only; later ones must "
                  "be 0",
                  i, struct_name<T>(), static_cast<int>(static_cast<unsigned char>(bytes[i])), sizeof(T));
  return PHX_OK;
}

// Copies a struct out to a caller. Fields that this version does not know become zero. T starts with struct_size.
template <class T>
phx_status copy_out(const T &value, T *out, const char *operation) {
  if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "the out-parameter is NULL");
  uint32_t size = 0;
  std::memcpy(&size, out, sizeof size);
  if (size < sizeof size || size > sizeof(T) * 16)
    return fail(PHX_ERR_ABI, operation, "struct_size is %u; set it to sizeof the struct before the call", size);
  const size_t shared = size < sizeof(T) ? size : sizeof(T);
  std::memcpy(reinterpret_cast<char *>(out) + sizeof size, reinterpret_cast<const char *>(&value) + sizeof size,
              shared - sizeof size);
  std::memset(reinterpret_cast<char *>(out) + shared, 0, size - shared);
  return PHX_OK;
}

}  // namespace phx
