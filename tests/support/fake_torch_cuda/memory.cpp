#include "memory.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <vector>

#include "driver.h"

namespace fake_torch {
namespace {

struct Block {
  driver::Pointer pointer;
  size_t bytes;
  c10::DeviceIndex device;
  c10::StreamId stream;              // whose it is
  uint64_t capture;                  // made in this capture, whose graph keeps it; 0: in none
  std::set<c10::StreamId> used_on;   // besides its own
  std::vector<driver::Event> until;  // freed, but in use before these
};
using Key = std::tuple<c10::DeviceIndex, c10::StreamId, uint64_t, size_t>;

struct Pool {
  std::mutex mutex;
  std::map<Key, std::vector<Block *>> free;
};
Pool &pool() {
  static Pool *const made = new Pool;
  return *made;
}
std::atomic<uint64_t> captures{0};

driver::Pointer make_memory(c10::DeviceIndex device, size_t bytes) {
  driver::AllocationProperties properties{};
  properties.type = driver::kPinned;
  properties.handle_types = driver::kFileDescriptor;
  properties.location = {driver::kOnDevice, device};
  driver::Handle handle = 0;
  driver::Pointer pointer = 0;
  FAKE_CHECK(cuMemCreate(&handle, bytes, &properties, 0));
  FAKE_CHECK(cuMemAddressReserve(&pointer, bytes, 0, 0, 0));
  FAKE_CHECK(cuMemMap(pointer, bytes, 0, handle, 0));
  FAKE_CHECK(cuMemRelease(handle));
  const driver::AccessDescription access{{driver::kOnDevice, device}, driver::kReadWrite};
  FAKE_CHECK(cuMemSetAccess(pointer, bytes, &access, 1));
  return pointer;
}

size_t whole_units(size_t bytes) {
  size_t unit = 0;
  driver::AllocationProperties properties{};
  FAKE_CHECK(cuMemGetAllocationGranularity(&unit, &properties, driver::kSmallestGranularity));
  return (bytes + unit - 1) / unit * unit;
}

bool is_over(Block &block) {
  for (driver::Event event : block.until)
    if (cuEventQuery(event) != 0) return false;
  for (driver::Event event : block.until) cuEventDestroy_v2(event);
  block.until.clear();
  return true;
}

Block *take_block(size_t bytes) {
  const c10::DeviceIndex device = current_device();
  const c10::Stream stream = current_stream(device);
  const uint64_t capture = is_capturing(stream) ? captures.load() : 0;
  Pool &all = pool();
  const std::lock_guard<std::mutex> lock(all.mutex);
  std::vector<Block *> &blocks = all.free[{device, stream.id(), capture, bytes}];
  const auto found = std::find_if(blocks.rbegin(), blocks.rend(), [](Block *block) { return is_over(*block); });
  if (found == blocks.rend()) return new Block{make_memory(device, bytes), bytes, device, stream.id(), capture, {}, {}};
  Block *const block = *found;
  blocks.erase(std::prev(found.base()));
  return block;
}

void give_back(void *context) {
  auto *const block = static_cast<Block *>(context);
  const InContext in_context(block->device);
  for (const c10::StreamId stream : block->used_on) {
    driver::Event event = nullptr;
    if (cuEventCreate(&event, driver::kUntimed) != 0) continue;
    cuEventRecord(event, reinterpret_cast<driver::Stream>(stream));
    block->until.push_back(event);
  }
  block->used_on.clear();
  Pool &all = pool();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.free[{block->device, block->stream, block->capture, block->bytes}].push_back(block);
}

struct Allocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device device(c10::DeviceType::CUDA, current_device());
    if (bytes == 0) return {nullptr, nullptr, c10::detail::deleteNothing, device};
    Block *const block = take_block(whole_units(bytes));
    return {reinterpret_cast<void *>(static_cast<uintptr_t>(block->pointer)), block, give_back, device};
  }
  void copy_data(void *to, const void *from, size_t bytes) const override {
    wait_for(current_stream(current_device()));
    std::memmove(host_address(to), host_address(from), bytes);
  }
};

}  // namespace

c10::Allocator *allocator() {
  static Allocator *const made = new Allocator;
  return made;
}

void record_stream(const c10::DataPtr &data, const c10::Stream &stream) {
  if (data.get_deleter() != give_back) return;
  auto *const block = static_cast<Block *>(data.get_context());
  const std::lock_guard<std::mutex> lock(pool().mutex);
  if (stream.id() != block->stream) block->used_on.insert(stream.id());
}

void next_capture() { ++captures; }

void *host_address(const void *data) {
  void *host = nullptr;
  if (data != nullptr) FAKE_CHECK(fake_cuda_host(pointer_of(data), &host));
  return host;
}

static const bool registered = (c10::SetAllocator(c10::DeviceType::CUDA, allocator(), 1), true);

}  // namespace fake_torch

extern "C" {

// Gives the memory that nobody uses back to the driver.
__attribute__((visibility("default"))) void fake_torch_empty_cache() {
  using namespace fake_torch;
  Pool &all = pool();
  const std::lock_guard<std::mutex> lock(all.mutex);
  for (auto &[key, blocks] : all.free) {
    if (std::get<2>(key) != 0) continue;  // a graph may use it
    const auto gone = std::partition(blocks.begin(), blocks.end(), [](Block *block) { return !is_over(*block); });
    for (auto one = gone; one != blocks.end(); ++one) {
      cuMemUnmap((*one)->pointer, (*one)->bytes);
      cuMemAddressFree((*one)->pointer, (*one)->bytes);
      delete *one;
    }
    blocks.erase(gone, blocks.end());
  }
}

}  // extern "C"
