// Error reporting: every failing call fills one thread-local phx_error_info and returns its status.
#pragma once

#include <string>

#include "phalanx/phalanx.h"

namespace phx {

// An empty record: status OK, no rank, no peer, no text.
phx_error_info make_error_info();

// Copies `text` into `dst`, cutting it at a UTF-8 boundary where it is too long. `size` is that of `dst`.
void copy_text(char *dst, size_t size, const char *text);

// The thread's last error.
const phx_error_info &last_error();
phx_status set_last_error(const phx_error_info &info);  // returns info.status

// Records an error of this thread and returns `status`. `operation` is the public name without "phx_".
__attribute__((format(printf, 3, 4))) phx_status fail(phx_status status, const char *operation, const char *format,
                                                      ...);
// Likewise for a failed system call: appends the text of `error_number` and records it.
__attribute__((format(printf, 3, 4))) phx_status fail_errno(int error_number, const char *operation, const char *format,
                                                            ...);

// "timed out after 4000 ms (the timeout of the group)": in the text of every PHX_ERR_TIMEOUT, and built here only.
// `origin`: what set the limit. Groups, worlds and stores have a `timed_out` that knows it.
std::string timed_out(int64_t timeout_ms, const char *origin);
inline constexpr const char *kLimitOfCall = "the timeout_ms of this call";

// Adds where it happened to the thread's last error: nothing else of it changes.
void amend_last_error(const char *operation, const char *group, int32_t rank, int32_t peer);

// Copies a struct out to a caller whose version of it may be shorter. T starts with struct_size.
template <class T>
phx_status copy_out(const T &value, T *out, const char *operation);

void set_log(phx_log_fn fn, void *user, int32_t min_level);  // NULL: none
void log_message(int32_t level, const char *file, int32_t line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define PHX_LOG(level, ...) ::phx::log_message(level, __FILE__, __LINE__, __VA_ARGS__)

}  // namespace phx

#include <cstring>

template <class T>
phx_status phx::copy_out(const T &value, T *out, const char *operation) {
  if (out == nullptr) return fail(PHX_ERR_INVALID, operation, "%s: the out-parameter is NULL", operation);
  uint32_t size = 0;
  std::memcpy(&size, out, sizeof size);
  if (size < sizeof size || size > sizeof(T) * 16)
    return fail(PHX_ERR_ABI, operation, "%s: struct_size is %u; set it to sizeof the struct before the call", operation,
                size);
  const size_t shared = size < sizeof(T) ? size : sizeof(T);
  std::memcpy(reinterpret_cast<char *>(out) + sizeof size, reinterpret_cast<const char *>(&value) + sizeof size,
              shared - sizeof size);
  return PHX_OK;
}
