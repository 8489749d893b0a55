// Sealed memfd segments: made here, or received from a peer and verified before they are mapped.
#pragma once

#include <memory>

#include "base/fd.h"
#include "phalanx/phalanx.h"

namespace phx {

size_t page_bytes();
size_t round_up(size_t size, size_t unit);

// A shared, writable view of one memfd.
struct SharedMapping {
  void *base = nullptr;
  size_t size = 0;
  char *bytes() const { return static_cast<char *>(base); }
};
using SharedMappingRef = std::shared_ptr<SharedMapping>;  // unmapped with the last reference

// A zeroed memfd of `size` bytes (a multiple of the page, at least one) that can neither shrink, grow nor lose its
// seals.
phx_status create_segment(const char *operation, const char *label, size_t size, Fd *out);

// Refuses what is no memfd of ordinary pages, is shorter than `size` or could be shortened later: touching it could
// then kill us.
phx_status verify_segment(const char *operation, int fd, size_t size);

// Makes the pages of these bytes of a segment resident now rather than at first touch: cheaper than page by page, and
// a host that has no memory left shows as PHX_ERR_NO_MEMORY here, where a first touch would end the process. Kernels
// before 5.14 cannot, and the pages come at first touch.
phx_status populate(const char *operation, void *begin, size_t bytes);

// Maps the first `size` bytes, and populates the first `prefault_bytes` of them.
phx_status map_segment(const char *operation, int fd, size_t size, size_t prefault_bytes, SharedMappingRef *out);

}  // namespace phx
