#include "base/error.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <shared_mutex>

#include "base/abi.h"
#include "base/fork.h"

namespace phx {
namespace {

thread_local ErrorInfo t_last;
thread_local ErrorInfo t_asked;  // owns the strings that copy_error_out last returned

// The log callback of the process.
struct LogSink : private ForkHook {
  // Shared while the callback runs, which may take long, so a fork does not wait for it. Threads run the callback at
  // the same time: one of them may hold a lock that the callback of another waits for, such as the GIL of Python.
  std::shared_mutex mutex;
  phx_log_fn fn = nullptr;
  void *user = nullptr;
  std::atomic<int32_t> min_level{PHX_LOG_ERROR + 1};

 private:
  void after_fork_in_child() override { new (&mutex) std::shared_mutex; }
};
LogSink &log_sink() {
  static LogSink *sink = new LogSink;  // never destroyed: threads may log during exit
  return *sink;
}

}  // namespace

ErrorInfo make_error(phx_status status, const char *operation, int32_t rank, int32_t peer, const char *text) {
  ErrorInfo info;
  info.status = status;
  info.rank = rank;
  info.peer = peer;
  copy_text(info.operation, sizeof info.operation, operation);
  copy_text(info.text, sizeof info.text, text);
  return info;
}

void copy_text(char *dst, size_t size, const char *text) {
  if (size == 0) return;
  size_t length = text == nullptr ? 0 : std::strlen(text);
  if (length >= size) {
    length = size - 1;
    while (length > 0 && (static_cast<unsigned char>(text[length]) & 0xC0) == 0x80) --length;
  }
  if (length > 0) std::memmove(dst, text, length);
  dst[length] = '\0';
}

const ErrorInfo &last_error() { return t_last; }

phx_status set_last_error(const ErrorInfo &info) {
  t_last = info;
  return info.status;
}

Failed fail_v(phx_status status, int error_number, const char *operation, const char *prefix, const char *format,
              va_list args) {
  char text[sizeof ErrorInfo::text];
  copy_text(text, sizeof text, prefix);
  const size_t before = std::strlen(text);
  const int length = std::vsnprintf(text + before, sizeof text - before, format, args);
  const size_t end = before + static_cast<size_t>(std::max(length, 0));
  if (error_number != 0 && end < sizeof text) {
    char reason[128];
    const char *words = strerror_r(error_number, reason, sizeof reason);
    std::snprintf(text + end, sizeof text - end, ": %s (errno %d)", words, error_number);
  }
  ErrorInfo info = make_error(status, operation, -1, -1, text);
  info.sys_errno = error_number;
  return Failed(set_last_error(info));
}

Failed fail(phx_status status, const char *operation, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const Failed failed = fail_v(status, 0, operation, (std::string(operation) + ": ").c_str(), format, args);
  va_end(args);
  return failed;
}

Failed fail_text(phx_status status, const char *operation, const char *format, ...) {
  va_list args;
  va_start(args, format);
  const Failed failed = fail_v(status, 0, operation, "", format, args);
  va_end(args);
  return failed;
}

Failed fail_errno(int error_number, const char *operation, const char *format, ...) {
  phx_status status = PHX_ERR_SYSTEM;
  if (error_number == ENOMEM) status = PHX_ERR_NO_MEMORY;
  if (error_number == EPERM || error_number == EACCES) status = PHX_ERR_PERMISSION;
  va_list args;
  va_start(args, format);
  const Failed failed = fail_v(status, error_number, operation, (std::string(operation) + ": ").c_str(), format, args);
  va_end(args);
  return failed;
}

ErrorInfo &Failed::recorded() { return t_last; }

const Failed &Failed::operation(const char *name) const {
  copy_text(t_last.operation, sizeof t_last.operation, name);
  return *this;
}

const Failed &Failed::in(const char *group, int32_t rank) const {
  if (t_last.group[0] != '\0') return *this;
  copy_text(t_last.group, sizeof t_last.group, group);
  t_last.rank = rank;
  return *this;
}

std::string timed_out(int64_t timeout_ms, const char *origin) {
  return "timed out after " + std::to_string(timeout_ms) + " ms (" + origin + ")";
}

void set_log(phx_log_fn fn, void *user, int32_t min_level) {
  LogSink &sink = log_sink();
  const std::unique_lock<std::shared_mutex> lock(sink.mutex);
  sink.fn = fn;
  sink.user = user;
  sink.min_level.store(fn == nullptr ? PHX_LOG_ERROR + 1 : min_level, std::memory_order_relaxed);
}

phx_status copy_error_out(const ErrorInfo &info, phx_error_info *out, const char *operation) {
  if (&info != &t_asked) t_asked = info;
  phx_error_info shown = PHX_ERROR_INFO_INIT;
  shown.status = info.status;
  shown.rank = info.rank;
  shown.peer = info.peer;
  shown.sequence = info.sequence;
  shown.step = info.step;
  shown.sys_errno = info.sys_errno;
  shown.operation = t_asked.operation;
  shown.group = t_asked.group;
  shown.text = t_asked.text;
  return copy_out(shown, out, operation);
}

bool logs(int32_t level) { return level >= log_sink().min_level.load(std::memory_order_relaxed); }

void log_message(int32_t level, const char *file, int32_t line, const char *format, ...) {
  if (!logs(level)) return;
  LogSink &sink = log_sink();
  char text[1024];
  va_list args;
  va_start(args, format);
  std::vsnprintf(text, sizeof text, format, args);
  va_end(args);
  const std::shared_lock<std::shared_mutex> lock(sink.mutex);
  if (sink.fn != nullptr) sink.fn(sink.user, level, file, line, text);
}

}  // namespace phx
