// What the files of the driver without a GPU share: what it has, and who may use it. See state.cpp.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "fake_cuda/kernels.h"
#include "gpu/driver.h"

namespace fake_cuda {

using phx::cuda::Context;
using phx::cuda::Device;
using phx::cuda::Event;
using phx::cuda::Handle;
using phx::cuda::Pointer;
using phx::cuda::Result;
using phx::cuda::Stream;

constexpr Result kOk = 0, kInvalidValue = 1, kNotInitialized = 3, kNoDevice = 100, kInvalidContext = 201,
                 kInvalidHandle = 400, kNotFound = 500, kNotReady = 600, kNotPermitted = 800, kCaptureUnsupported = 900,
                 kCaptureIsolation = 905, kCapturedEvent = 907, kUnknown = 999;
constexpr size_t kUnit = size_t{64} << 10;   // larger than a page, as that of a GPU is
constexpr size_t kMemory = size_t{1} << 30;  // of each GPU

struct Physical {
  int fd;
  size_t size;
  int references;  // the handle's and the mappings'
  int device;      // -1: a peer's
  bool multicast;  // fd is a Switch, size that of its memory
  bool fabric;     // it can be had by a fabric handle
};
struct Mapped {
  Handle handle;
  size_t size;
  bool accessible;
  Device device;  // that has access
  void *host;     // where the host sees the same memory; NULL until fake_cuda_host is asked
};

struct Capture {
  int mode;
  std::thread::id by;
};

struct State {
  std::mutex mutex;
  pid_t started = 0;  // the process that did it
  Handle next = 1;
  size_t allocated = 0;
  std::map<Handle, Physical> physical;
  std::map<Pointer, size_t> reserved;
  std::map<Pointer, Mapped> mapped;
  std::map<void *, size_t> registered;
  std::map<std::pair<Handle, Device>, size_t> bound;
  std::map<Stream, Capture> captures;    // that go on
  std::map<const void *, int> launches;  // of each kernel
  std::map<const void *, int> blocks;    // of its last one
  std::map<Device, int> contexts;        // references
  std::map<Stream, Device> streams;
  std::map<Device, std::set<const void *>> loaded;  // kernels
  int events = 0, modules = 0;
  std::map<Device, int> running;  // kernels
  std::map<Device, int> ahead;    // kernels that are on streams, and have not ended
  std::condition_variable ended;  // a kernel
  std::map<Device, Processors> processors;
};
State &state();

// With the state's mutex held:
bool can_be_used(const State &s);
bool fails(const char *function);
bool any_runs(const State &s);
// Whether a capture forbids this thread what waits for the GPU, asks whether it is through, or takes long.
bool is_captured_out(const State &s);
// Streams are gone with their context.
bool is_gone(const State &s, Stream stream);
void drop(State &s, Handle handle);
// The memory behind `size` bytes at `pointer`, from *offset on. NULL: none that may be used.
const Physical *behind(State &s, Pointer pointer, size_t size, size_t *offset);
void protect(Pointer pointer, const Mapped &mapping, bool readable);

int devices();
std::vector<Context> &current_contexts();  // of this thread
Device current_device();                   // there must be a context
int &capture_mode();                       // of this thread
// Kernels can read what the host cannot.
void count_running(Device device, int change);
// The default stream of the current context, which is there from the beginning.
FakeStream &stream_of(Stream stream);

}  // namespace fake_cuda

#define FAKE(function, parameters) extern "C" __attribute__((visibility("default"))) Result function parameters
#define MAY_FAIL(function)                         \
  State &s = state();                              \
  const std::lock_guard<std::mutex> lock(s.mutex); \
  if (fails(#function)) return kUnknown;           \
  if (!can_be_used(s)) return kNotInitialized
