// Error reporting: every failing call fills one thread-local ErrorInfo and returns its status.
#pragma once

#include <cstdarg>
#include <string>

#include "phalanx/phalanx.h"

namespace phx {

// An error as it is stored and sent to other ranks of the same build. copy_error_out makes it a public phx_error_info.
struct ErrorInfo {
  uint32_t struct_size = sizeof(ErrorInfo);
  int32_t status = PHX_OK;
  int32_t rank = -1;
  int32_t peer = -1;
  uint64_t sequence = 0;
  int32_t step = 0;
  int32_t sys_errno = 0;
  char operation[32] = {};
  char group[64] = {};
  char text[640] = {};
};

ErrorInfo make_error(phx_status status, const char *operation, int32_t rank, int32_t peer, const char *text);

// Copies `text` into `dst`, cutting it at a UTF-8 boundary where it is too long. `size` is the size of `dst`.
void copy_text(char *dst, size_t size, const char *text);

// The thread's last error.
const ErrorInfo &last_error();
phx_status set_last_error(const ErrorInfo &info);  // returns info.status

// Restores the thread's last error at the end of a scope in which other calls may fail.
class KeptError {
 public:
  KeptError() = default;
  KeptError(const KeptError &) = delete;
  KeptError &operator=(const KeptError &) = delete;
  ~KeptError() { set_last_error(info_); }
  const ErrorInfo &info() const { return info_; }

 private:
  const ErrorInfo info_ = last_error();
};

// The status of a failed call. Its functions add details to the thread's last error, which is that of this call:
//   return fail(PHX_ERR_TIMEOUT, operation, "...").peer(rank);
class Failed {
 public:
  explicit Failed(phx_status status) : status_(status) {}
  operator phx_status() const { return status_; }
  const Failed &operation(const char *name) const;
  const Failed &rank(int32_t rank) const { return set(&ErrorInfo::rank, rank); }
  const Failed &peer(int32_t rank) const { return set(&ErrorInfo::peer, rank); }
  const Failed &sequence(uint64_t number) const { return set(&ErrorInfo::sequence, number); }
  const Failed &step(int32_t number) const { return set(&ErrorInfo::step, number); }
  // The group in which the error happened, and the rank that reports it. An error that names a group is left alone.
  const Failed &in(const char *group, int32_t rank) const;

 private:
  static ErrorInfo &recorded();  // the thread's last error
  template <class Value>
  const Failed &set(Value ErrorInfo::*member, Value value) const {
    recorded().*member = value;
    return *this;
  }

  phx_status status_;
};

// Records an error of this thread and returns `status`. `operation` is the public name without "phx_", with which the
// text begins.
__attribute__((format(printf, 3, 4))) Failed fail(phx_status status, const char *operation, const char *format, ...);
// The same without the name in the text.
__attribute__((format(printf, 3, 4))) Failed fail_text(phx_status status, const char *operation, const char *format,
                                                       ...);
// The same as `fail` for a failed system call: the status follows from `error_number`, whose text is appended.
__attribute__((format(printf, 3, 4))) Failed fail_errno(int error_number, const char *operation, const char *format,
                                                        ...);
// The common part of them. The text begins with `prefix`. `error_number`: 0 if no system call has failed.
Failed fail_v(phx_status status, int error_number, const char *operation, const char *prefix, const char *format,
              va_list args);

// "timed out after 4000 ms (the timeout of the group)": part of the text of every PHX_ERR_TIMEOUT, built only here.
// `origin` names the setting of the limit. Groups, worlds and stores have their own `timed_out`, which passes it.
std::string timed_out(int64_t timeout_ms, const char *origin);
inline constexpr const char *kLimitOfCall = "the timeout_ms of this call";

void set_log(phx_log_fn fn, void *user, int32_t min_level);  // `fn` NULL: no log
bool logs(int32_t level);                                    // whether a line of that level reaches a callback
// Copies an error out to a caller. The strings stay valid until the thread's next call of this function.
phx_status copy_error_out(const ErrorInfo &info, phx_error_info *out, const char *operation);

void log_message(int32_t level, const char *file, int32_t line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
#define PHX_LOG(level, ...) ::phx::log_message(level, __FILE__, __LINE__, __VA_ARGS__)

// Returns the status of `call` from this function unless it is PHX_OK.
#define PHX_TRY(call)                                                               \
  do {                                                                              \
    if (const phx_status phx_tried = (call); phx_tried != PHX_OK) return phx_tried; \
  } while (0)

}  // namespace phx
