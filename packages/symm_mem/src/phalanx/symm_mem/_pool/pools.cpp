#include "pools.h"

#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pthread.h>

#include <atomic>
#include <iterator>
#include <map>
#include <mutex>
#include <utility>

namespace phalanx_pool {
namespace {

// A forked child shares the pages of its parent, so it takes no piece of them.
std::atomic<unsigned> generation{0};

}  // namespace

class Pool {
 public:
  explicit Pool(Source from) : source(std::move(from)) {}
  const Source source;
  const unsigned made_in = generation.load();
  Heap heap;  // guarded by State::mutex, as is open
  bool open = true;
};

namespace {

struct Place {
  PoolRef pool;
  Heap::Index index;
};

// Never destroyed: storages may end after all static objects.
struct State {
  std::mutex mutex;                    // never held while waiting, above all for the GIL
  std::map<uintptr_t, Place> places;   // of the segments of all pools, by address
  c10::DeleterFnPtr others = nullptr;  // frees memory of the previous allocator
};

State &state() {
  static State *const one = new State;
  return *one;
}

uintptr_t number(const void *pointer) { return reinterpret_cast<uintptr_t>(pointer); }

// The caller holds the mutex. Returns the segment's owner, for Source::release after the mutex is released.
void *remove(const PoolRef &pool, Heap::Index index) {
  state().places.erase(number(pool->heap.segments().at(index).base));
  return pool->heap.remove(index);
}

void release_empty(const PoolRef &pool, bool keep_open) {
  std::vector<void *> owners;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    pool->open = keep_open;
    for (const Heap::Index index : pool->heap.empty_segments()) owners.push_back(remove(pool, index));
  }
  for (void *const owner : owners) pool->source.release(owner);
}

// The pools of a thread, the one in use first.
struct Entered {
  PoolRef pool;
  Entered *below;
};
thread_local Entered *top = nullptr;

// The source of segments may allocate tensors itself.
class Outside {
 public:
  Outside() : top_(std::exchange(top, nullptr)) {}
  ~Outside() { top = top_; }
  Outside(const Outside &) = delete;
  Outside &operator=(const Outside &) = delete;

 private:
  Entered *top_;
};

void *take(const PoolRef &pool, size_t nbytes) {
  size_t wanted = 0;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    if (void *const found = pool->heap.take(nbytes)) return found;
    wanted = pool->heap.next_segment(nbytes);
  }
  const Outside outside;
  const Source::Segment made = pool->source.make(wanted);
  if (made.base == nullptr) {
    c10::profiledCPUMemoryReporter().OutOfMemory(nbytes);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "phalanx memory pool: can't allocate memory: you tried to allocate ",
                     nbytes, " bytes, and a segment of ", wanted, " bytes cannot be had: ", made.failure);
  }
  const std::lock_guard<std::mutex> lock(state().mutex);
  const Heap::Index index = pool->heap.add(made.base, wanted, made.owner);
  state().places[number(made.base)] = {pool, index};
  return pool->heap.take(nbytes);  // this segment has room, so there is a piece whatever other threads took
}

// The deleter of every storage of a pool, for any thread, with or without the GIL.
void put_back(void *pointer) {
  c10::profiledCPUMemoryReporter().Delete(pointer);  // first: then another thread may take the piece
  PoolRef pool;
  void *owner = nullptr;
  {
    std::unique_lock<std::mutex> lock(state().mutex);
    const auto next = state().places.upper_bound(number(pointer));
    const auto found = next == state().places.begin() ? next : std::prev(next);
    if (found == next ||
        number(pointer) - found->first >= found->second.pool->heap.segments().at(found->second.index).size_bytes) {
      const c10::DeleterFnPtr others = state().others;  // memory from raw_allocate outside of pools
      lock.unlock();
      others(pointer);
      return;
    }
    pool = found->second.pool;
    const Heap::Index index = found->second.index;
    bool empty = false;
    if (pool->heap.put_back(index, pointer, &empty) && empty && !pool->open) owner = remove(pool, index);
  }
  if (owner != nullptr) pool->source.release(owner);
}

// The allocator of torch: it uses the pool of the thread, or else the previous allocator.
class Front final : public c10::Allocator {
 public:
  explicit Front(c10::Allocator *previous) : previous_(previous) {}

  c10::DataPtr allocate(size_t nbytes) override {
    const Entered *const entered = top;
    if (entered == nullptr || entered->pool->made_in != generation.load(std::memory_order_relaxed))
      return previous_->allocate(nbytes);
    void *const taken = take(entered->pool, nbytes);
    c10::profiledCPUMemoryReporter().New(taken, nbytes);
    return {taken, taken, &put_back, c10::Device(c10::DeviceType::CPU)};
  }

  // For raw_deallocate, which does not say where the memory came from.
  c10::DeleterFnPtr raw_deleter() const override { return previous_->raw_deleter() != nullptr ? &put_back : nullptr; }

  void copy_data(void *to, const void *from, size_t nbytes) const override { default_copy_data(to, from, nbytes); }

 private:
  c10::Allocator *const previous_;
};

// Keeps the state consistent in the child, whatever other threads of the parent did.
void before_fork() { state().mutex.lock(); }
void after_fork() { state().mutex.unlock(); }
void after_fork_in_child() {
  generation.fetch_add(1);
  after_fork();
}

}  // namespace

PoolRef open_pool(Source source) { return std::make_shared<Pool>(std::move(source)); }

void close_pool(const PoolRef &pool) { release_empty(pool, false); }

void trim(const PoolRef &pool) { release_empty(pool, true); }

Segments segments(const PoolRef &pool) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  Segments found;
  for (const auto &[index, each] : pool->heap.segments())
    found.emplace_back(number(each.base), each.size_bytes, each.used_bytes);
  return found;
}

uint64_t layout(const PoolRef &pool) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return pool->heap.layout();
}

void *enter(PoolRef pool) {
  top = new Entered{std::move(pool), top};
  return top;
}

bool leave(void *entered) {
  if (entered != top) return false;
  const std::unique_ptr<Entered> gone(top);
  top = gone->below;
  return true;
}

bool install() {
  static Front *const front = [] {
    c10::Allocator *const previous = c10::GetCPUAllocator();
    state().others = previous->raw_deleter();
    pthread_atfork(before_fork, after_fork, after_fork_in_child);
    auto *const made = new Front(previous);               // torch keeps it for ever
    std::atomic_thread_fence(std::memory_order_release);  // other threads may read torch's pointer to it at once
    c10::SetCPUAllocator(made);
    return made;
  }();
  return c10::GetCPUAllocator() == front;
}

}  // namespace phalanx_pool
