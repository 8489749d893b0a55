// GatheredRanges: the same part of every rank's block, as one contiguous range.
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "symm/symm.h"

namespace phx {
namespace {

constexpr size_t kIdle = 8;  // how many unused ranges stay mapped

phx_status make(const char *operation, void *const *blocks, size_t count, size_t offset, size_t bytes, char **out) {
  const size_t all = bytes * count;
  void *const base = mmap(nullptr, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return fail_errno(errno, operation, "could not reserve %zu bytes of addresses", all);
  char *const range = static_cast<char *>(base);
  for (size_t i = 0; i < count; ++i) {
    // With an old size of 0, mremap maps shared pages a second time and leaves the first mapping, without a descriptor.
    char *const from = static_cast<char *>(blocks[i]) + offset;
    if (mremap(from, 0, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, range + i * bytes) != MAP_FAILED) continue;
    const int error = errno;
    munmap(range, all);
    if (error == EINVAL)  // the pages are not shared
      return fail(PHX_ERR_UNSUPPORTED, operation,
                  "the allocator of this memory cannot map it a second time; use Phalanx's own allocator");
    return fail_errno(error, operation, "could not map %zu bytes of a block a second time", bytes);
  }
  (void)populate(operation, range, all);  // best effort: fills the page tables of pages that exist already
  *out = range;
  return PHX_OK;
}

}  // namespace

GatheredRanges::~GatheredRanges() {
  for (const Range &range : ranges_) munmap(range.base, range.all);
}

phx_status GatheredRanges::map(const char *operation, void *const *blocks, size_t count, size_t offset, size_t bytes,
                               void **out) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto known = std::find_if(ranges_.begin(), ranges_.end(),
                                  [=](const Range &range) { return range.offset == offset && range.bytes == bytes; });
  if (known != ranges_.end()) {
    ranges_.splice(ranges_.begin(), ranges_, known);
  } else {
    ranges_.push_front({nullptr, offset, bytes, bytes * count, 0});
    const phx_status status = make(operation, blocks, count, offset, bytes, &ranges_.front().base);
    if (status != PHX_OK) {
      ranges_.pop_front();
      return status;
    }
  }
  ++ranges_.front().users;
  *out = ranges_.front().base;
  return PHX_OK;
}

phx_status GatheredRanges::unmap(const char *operation, const void *pointer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto used = std::find_if(ranges_.begin(), ranges_.end(),
                                 [=](const Range &range) { return range.base == pointer && range.users != 0; });
  if (used == ranges_.end())
    return fail(PHX_ERR_NOT_FOUND, operation,
                "%p was not returned by phx_symm_map_gathered on this handle, or was already unmapped", pointer);
  if (--used->users == 0) leave_idle(kIdle);
  return PHX_OK;
}

void GatheredRanges::leave_idle(size_t most) {
  size_t idle = 0;
  for (auto range = ranges_.begin(); range != ranges_.end();) {
    if (range->users != 0 || ++idle <= most) {
      ++range;
      continue;
    }
    munmap(range->base, range->all);
    range = ranges_.erase(range);
  }
}

bool GatheredRanges::begins(const void *pointer, size_t offset, size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::any_of(ranges_.begin(), ranges_.end(), [=](const Range &range) {
    return range.base == pointer && range.offset == offset && range.bytes == bytes;
  });
}

}  // namespace phx
