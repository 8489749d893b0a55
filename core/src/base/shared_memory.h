// Sealed memfd segments: created here, or received from a peer and verified before they are mapped.
#pragma once

#include <memory>

#include "base/fd.h"
#include "phalanx/phalanx.h"

namespace phx {

size_t page_bytes();
size_t round_up(size_t size, size_t unit);

// A shared, writable view of one memfd, which is unmapped with the last reference.
struct SharedMapping {
  void *base = nullptr;
  size_t size = 0;
  char *bytes() const { return static_cast<char *>(base); }
  SharedMapping() = default;
  SharedMapping(const SharedMapping &) = delete;
  SharedMapping &operator=(const SharedMapping &) = delete;
  ~SharedMapping();
};
using SharedMappingRef = std::shared_ptr<SharedMapping>;

// A zeroed memfd of `size` bytes (at least one page, and whole pages) that can neither shrink, grow nor lose its seals.
phx_status create_segment(const char *operation, const char *label, size_t size, Fd *out);

// Refuses a file that is not a memfd of ordinary pages, is shorter than `size`, or could be shortened later: touching
// it could end this process with SIGBUS.
phx_status verify_segment(const char *operation, int fd, size_t size);

// Makes these pages of a segment resident now rather than at first touch. This is cheaper than page by page, and a host
// without memory gives PHX_ERR_NO_MEMORY here, where a first touch would end the process. Kernels before 5.14 cannot do
// it; there the pages become resident at first touch.
phx_status populate(const char *operation, void *begin, size_t bytes);

// Maps the first `size` bytes, and populates the first `prefault_bytes` of them.
phx_status map_segment(const char *operation, int fd, size_t size, size_t prefault_bytes, SharedMappingRef *out);

}  // namespace phx
