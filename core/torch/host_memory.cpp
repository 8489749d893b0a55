// Free blocks are in the order in which they came back. The system may take their pages at any time (MADV_FREE): it
// does when memory becomes short, and until then no page has to be touched again.
#include "host_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace phxt {
namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kMostKept = size_t{256} << 20;  // bytes in free blocks, of the process

struct Block {
  void *data;
  size_t bytes;  // a multiple of kHugePage
};

struct FreeBlocks {  // never destroyed: tensors end while the process exits
  phx::AcrossForks<std::mutex> mutex;
  std::vector<Block> blocks;
  size_t bytes = 0;

  // No tensor allocates when it ends.
  FreeBlocks() { blocks.reserve(kMostKept / kLargeTensor + 1); }

  Block remove(std::vector<Block>::iterator at) {
    const Block block = *at;
    blocks.erase(at);
    bytes -= block.bytes;
    return block;
  }
};
FreeBlocks &free_blocks() {
  static FreeBlocks *const made = new FreeBlocks;
  return *made;
}

Block map_block(size_t bytes) {
  // A huge page lies at a multiple of its size: as much more is mapped, and what lies around goes again.
  void *const mapped = mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return {nullptr, 0};
  const auto begin = reinterpret_cast<uintptr_t>(mapped);
  const uintptr_t aligned = (begin + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned != begin) munmap(mapped, aligned - begin);
  if (aligned != begin + kHugePage) munmap(reinterpret_cast<void *>(aligned + bytes), begin + kHugePage - aligned);
  expect_first_touch(reinterpret_cast<void *>(aligned), bytes);
  return {reinterpret_cast<void *>(aligned), bytes};
}

Block take_block(size_t bytes) {
  const size_t whole = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  if (whole > kMostKept) return {nullptr, 0};
  {
    FreeBlocks &free = free_blocks();
    const std::lock_guard lock(free.mutex);
    // The one that came back last may still be in a cache. At most a quarter is left unused.
    const auto found = std::find_if(free.blocks.rbegin(), free.blocks.rend(), [&](const Block &block) {
      return block.bytes >= whole && block.bytes - whole <= whole / 4;
    });
    if (found != free.blocks.rend()) return free.remove(std::next(found).base());
  }
  return map_block(whole);
}

void give_back(void *data, void *bytes) {
  const Block block{data, reinterpret_cast<size_t>(bytes)};
  madvise(block.data, block.bytes, MADV_FREE);
  FreeBlocks &free = free_blocks();
  std::unique_lock lock(free.mutex);
  free.blocks.push_back(block);
  free.bytes += block.bytes;
  while (free.bytes > kMostKept) {
    const Block oldest = free.remove(free.blocks.begin());
    lock.unlock();
    munmap(oldest.data, oldest.bytes);
    lock.lock();
  }
}

}  // namespace

Tensor large_tensor(const int64_t *sizes, const int64_t *strides, int64_t dims, int32_t torch_dtype, size_t bytes) {
  const Block block = take_block(bytes);
  if (block.data == nullptr) return {};
  AtenTensorHandle made = nullptr;
  void *const context = reinterpret_cast<void *>(block.bytes);
  const AOTITorchError error =
      torch_from_blob(block.data, dims, sizes, strides, 0, torch_dtype, aoti_torch_device_type_cpu(), -1, &made,
                      aoti_torch_layout_strided(), nullptr, 0, give_back, context);
  if (error != 0) give_back(block.data, context);
  check_torch(error, "allocate a tensor");
  return Tensor(made);
}

void expect_first_touch(void *data, size_t size) {
  if (size < kLargeTensor) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + size) / page * page;
  madvise(reinterpret_cast<void *>(begin), end - begin, MADV_HUGEPAGE);
}

}  // namespace phxt
