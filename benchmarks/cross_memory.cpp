// What cross-memory attach gives on this host: GB/s of process_vm_readv from a peer that has just written the data.
// The reason why Phalanx does not use it; see docs/adr/0013-measured-and-left-out.md.
//
//   c++ -O2 -o cross_memory benchmarks/cross_memory.cpp && ./cross_memory
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

struct Shared {
  std::atomic<int> asked, done;
  std::atomic<size_t> size;
};

double now_us() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e6 + static_cast<double>(t.tv_nsec) * 1e-3;
}

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(core, &set);
  sched_setaffinity(0, sizeof set, &set);
}

[[noreturn]] void write_for_ever(Shared *shared, char *data) {
  pin(1);
  for (int round = 0;;) {
    while (shared->asked.load() == round) sched_yield();
    round = shared->asked.load();
    std::memset(data, round, shared->size.load());
    shared->done.store(round);
  }
}

}  // namespace

int main() {
  constexpr size_t kMost = size_t{64} << 20;
  constexpr int kRounds = 30;
  char *theirs = static_cast<char *>(std::malloc(kMost)), *mine = static_cast<char *>(std::malloc(kMost));
  std::memset(theirs, 1, kMost);
  std::memset(mine, 1, kMost);
  void *page = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (page == MAP_FAILED) return std::perror("mmap"), 1;
  auto *shared = new (page) Shared{};
  const pid_t peer = fork();
  if (peer == 0) write_for_ever(shared, theirs);
  pin(0);
  int status = 0, round = 0;
  for (const size_t size :
       {size_t{64} << 10, size_t{256} << 10, size_t{1} << 20, size_t{4} << 20, size_t{16} << 20, kMost}) {
    std::vector<double> times;
    for (int i = 0; i < kRounds && status == 0; ++i) {
      shared->size.store(size);
      shared->asked.store(++round);
      while (shared->done.load() != round) sched_yield();
      const iovec to{mine, size}, from{theirs, size};
      const double start = now_us();
      if (process_vm_readv(peer, &to, 1, &from, 1, 0) != static_cast<ssize_t>(size)) {
        std::perror("process_vm_readv (not permitted here?)");
        status = 1;
      }
      times.push_back(now_us() - start);
    }
    std::sort(times.begin(), times.end());
    if (status == 0)
      std::printf("%9zu bytes %9.1f us %6.1f GB/s\n", size, times[times.size() / 2],
                  static_cast<double>(size) / times[times.size() / 2] / 1e3);
  }
  kill(peer, SIGKILL);
  waitpid(peer, nullptr, 0);
  return status;
}
