// A CUDA driver without a GPU, for tests: memfds are its memory, and as long as no kernel runs no processor of the host
// can read them where they are "mapped", so that a test fails if the core tries. Kernels run on threads of the host.
// Only what core/src/gpu/driver.h names, copies, and what tests/support/fake_torch_cuda calls beside it.
//
//   FAKE_CUDA_DEVICES=N      how many GPUs there are (2)
//   FAKE_CUDA_PROCESSORS=N   how many blocks run at once, on each of them (6)
//   FAKE_CUDA_MULTICAST=N    how many GPUs, from the first one on, switches connect (all)
//   FAKE_CUDA_LACKS=prefix   kernels that the image does not have
//   FAKE_CUDA_FAIL=cuMemMap  which function fails, with CUDA_ERROR_UNKNOWN
//   FAKE_CUDA_FAIL_AT=N      from which of its calls on: 1 for the first after the variable is set
//   FAKE_CUDA_KILL=1         it does not fail, but ends the process
//   FAKE_CUDA_FORKS=1        a process forked after it was started may use it
//
// As a real one it does not work in a process that was forked after it was started; streams go with the last reference
// to their context; and to load a kernel waits for all that runs in the context.
//
// Compiled with FAKE_CUDA_OLD it is a driver that does not know multicast.
#include "fake_cuda/state.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <cstring>

#include "fake_cuda/kernels.h"

using namespace phx::cuda;

namespace fake_cuda {

State &state() {
  static State *const all = new State;
  return *all;
}
std::vector<Context> &current_contexts() {
  thread_local std::vector<Context> contexts;
  return contexts;
}
Device current_device() { return static_cast<Device>(reinterpret_cast<intptr_t>(current_contexts().back())) - 1; }
int &capture_mode() {
  thread_local int mode = 0;  // CU_STREAM_CAPTURE_MODE_GLOBAL
  return mode;
}

bool can_be_used(const State &s) {
  return s.started == getpid() || (s.started != 0 && std::getenv("FAKE_CUDA_FORKS") != nullptr);
}
bool any_runs(const State &s) {
  return std::any_of(s.running.begin(), s.running.end(), [](const auto &one) { return one.second != 0; });
}

bool is_captured_out(const State &s) {
  return capture_mode() != kRelaxed && std::any_of(s.captures.begin(), s.captures.end(), [](const auto &one) {
           const Capture &capture = one.second;
           if (capture.by == std::this_thread::get_id()) return capture.mode != kRelaxed;
           return capture_mode() == 0 && capture.mode == 0;
         });
}

bool fails(const char *function) {
  static int calls = 0;
  const char *which = std::getenv("FAKE_CUDA_FAIL");
  if (which == nullptr) calls = 0;  // they are counted anew
  if (which == nullptr || std::strcmp(which, function) != 0) return false;
  const bool now = ++calls >= number("FAKE_CUDA_FAIL_AT", 1);
  if (now && std::getenv("FAKE_CUDA_KILL") != nullptr) raise(SIGKILL);
  return now;
}
int devices() {
  const char *given = std::getenv("FAKE_CUDA_DEVICES");
  return given != nullptr ? std::atoi(given) : 2;
}

void drop(State &s, Handle handle) {
  const auto found = s.physical.find(handle);
  if (--found->second.references != 0) return;
  if (!found->second.multicast) s.allocated -= found->second.size;
  close(found->second.fd);
  s.physical.erase(found);
}

const Physical *behind(State &s, Pointer pointer, size_t size, size_t *offset) {
  auto next = s.mapped.upper_bound(pointer);
  if (next == s.mapped.begin()) return nullptr;
  const auto &[begin, mapping] = *std::prev(next);
  const Physical &memory = s.physical.at(mapping.handle);
  if (!mapping.accessible || memory.multicast || pointer - begin + size > mapping.size) return nullptr;
  *offset = pointer - begin;
  return &memory;
}

void protect(Pointer pointer, const Mapped &mapping, bool readable) {
  mprotect(reinterpret_cast<void *>(static_cast<uintptr_t>(pointer)), mapping.size,
           readable && mapping.accessible ? PROT_READ | PROT_WRITE : PROT_NONE);
}
void count_running(Device device, int change) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.running[device] += change;
  s.ended.notify_all();
  for (const auto &[pointer, mapping] : s.mapped)
    if (!s.physical.at(mapping.handle).multicast) protect(pointer, mapping, any_runs(s));
}

FakeStream &stream_of(Stream stream) {
  if (stream != nullptr) return *reinterpret_cast<FakeStream *>(stream);
  static std::mutex mutex;
  static std::map<Context, FakeStream *> of_context;
  const std::lock_guard<std::mutex> lock(mutex);
  FakeStream *&own = of_context[current_contexts().empty() ? nullptr : current_contexts().back()];
  if (own == nullptr || !own->is_of_this_process()) own = new FakeStream;
  return *own;
}
bool is_gone(const State &s, Stream stream) { return stream != nullptr && s.streams.count(stream) == 0; }

}  // namespace fake_cuda

using namespace fake_cuda;

// What a test asks: physical memory, reservations, mappings, contexts, streams and what else is alive.
FAKE(fake_cuda_alive, ()) {
  State &s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  int contexts = 0;
  for (const auto &[device, references] : s.contexts) contexts += references;
  return static_cast<int>(s.physical.size() + s.reserved.size() + s.mapped.size() + s.streams.size() + s.bound.size() +
                          s.registered.size()) +
         contexts + s.events + s.modules;
}
