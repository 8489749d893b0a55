#include "base/failpoint.h"

#ifdef PHX_FAILPOINTS

#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/deadline.h"
#include "base/environment.h"

namespace phx {
namespace {

struct Failpoint {
  std::string where;  // "all_reduce.4"; empty: none
  long times = 1;
  std::string action;

  Failpoint() {
    const char *text = read_variable<variable("PHALANX_FAILPOINT")>();
    const char *equals = text != nullptr ? std::strchr(text, '=') : nullptr;
    if (equals == nullptr) return;
    where.assign(text, equals);
    action = equals + 1;
    const size_t at = where.find('@');
    if (at == std::string::npos) return;
    times = std::atol(where.c_str() + at + 1);
    where.resize(at);
  }
};

void limit(decltype(RLIMIT_NOFILE) resource, rlim_t value) {
  rlimit limits;
  getrlimit(resource, &limits);
  limits.rlim_cur = value;
  setrlimit(resource, &limits);
}

rlim_t lowest_free_fd() {
  const int fd = dup(STDERR_FILENO);
  close(fd);
  return static_cast<rlim_t>(fd);
}

rlim_t address_space() {
  long pages = 0;
  FILE *file = std::fopen("/proc/self/statm", "re");
  if (file == nullptr || std::fscanf(file, "%ld", &pages) != 1) pages = 0;
  if (file != nullptr) std::fclose(file);
  return static_cast<rlim_t>(pages) * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

void log_passing(const std::string &where) {
  const char *path = read_variable<variable("PHALANX_FAILPOINT_LOG")>();
  if (path == nullptr) return;
  const int fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  const std::string line = std::to_string(now_ns()) + " " + where + "\n";
  if (fd >= 0 && write(fd, line.data(), line.size()) < 0) std::perror("PHALANX_FAILPOINT_LOG");
  if (fd >= 0) close(fd);
}

}  // namespace

void pass_failpoint(const char *name, int step) {
  static const Failpoint wanted;
  if (wanted.where.empty() || wanted.where != std::string(name) + "." + std::to_string(step)) return;
  static std::atomic<long> passed{0};
  if (passed.fetch_add(1) + 1 != wanted.times) return;
  log_passing(wanted.where);
  if (wanted.action == "kill") kill(getpid(), SIGKILL);
  if (wanted.action == "stop") kill(getpid(), SIGSTOP);
  if (wanted.action == "nofile") limit(RLIMIT_NOFILE, lowest_free_fd());
  if (wanted.action == "nomem") limit(RLIMIT_AS, address_space());
  if (wanted.action.rfind("sleep:", 0) == 0)
    usleep(static_cast<useconds_t>(std::atol(wanted.action.c_str() + 6)) * 1000);
}

}  // namespace phx

#endif
