// What torch's allocator for GPUs calls to fill a memory pool: symmetric memory of the world that the thread has
// entered. No Python here, as torch calls with its lock held.
#include <dlfcn.h>

#include <map>
#include <mutex>

#include "base/fork.h"
#include "phalanx_torch.h"

namespace {

struct Segment {
  phx_world *world;
  uint64_t number;
};
struct Segments {  // never destroyed: torch may give memory back while the process exits
  phx::AcrossForks<std::mutex> mutex;
  std::map<const void *, Segment> by_address;
  uint64_t last = 0;
};
Segments &segments() {
  static Segments *const made = new Segments;
  return *made;
}
thread_local phx_world *entered = nullptr;

// The thread that gives a segment back is through with it on this stream, but the stream may not be; and memory is
// unmapped at once.
void wait_for(void *stream) {
  using Wait = int (*)(void *stream);
  static void *const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);  // which the core has loaded
  static const Wait wait = driver ? reinterpret_cast<Wait>(dlsym(driver, "cuStreamSynchronize")) : nullptr;
  if (wait) wait(stream);
}

}  // namespace

extern "C" {

phx_world *phxt_pool_enter(phx_world *world) {
  phx_world *const before = entered;
  entered = world;
  return before;
}

void *phxt_pool_alloc(int64_t size, int32_t device, void *) {
  if (entered == nullptr || size < 0) return nullptr;
  const phx_device place{PHX_DEVICE_CUDA, device};
  void *made = nullptr;
  if (phx_mem_alloc(entered, &place, static_cast<size_t>(size), &made) != PHX_OK) return nullptr;
  Segments &all = segments();
  const std::lock_guard lock(all.mutex);
  all.by_address[made] = {entered, ++all.last};
  return made;
}

void phxt_pool_free(void *pointer, int64_t, int32_t, void *stream) {
  phx_world *world = nullptr;
  {
    Segments &all = segments();
    const std::lock_guard lock(all.mutex);
    const auto found = all.by_address.find(pointer);
    if (found == all.by_address.end()) return;
    world = found->second.world;
    all.by_address.erase(found);
  }
  wait_for(stream);
  phx_mem_free(world, pointer);
}

uint64_t phxt_pool_segment(const void *pointer) {
  Segments &all = segments();
  const std::lock_guard lock(all.mutex);
  const auto found = all.by_address.find(pointer);
  return found == all.by_address.end() ? 0 : found->second.number;
}

uint64_t phxt_pool_count(const phx_world *world) {
  Segments &all = segments();
  const std::lock_guard lock(all.mutex);
  uint64_t count = 0;
  for (const auto &[address, segment] : all.by_address) count += segment.world == world ? 1 : 0;
  return count;
}

}  // extern "C"
