// Memory for others: sealed memfd segments, created here, or received from a peer and verified before they are mapped,
// and words for a device.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

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

// An array of atomic words that fills whole pages, so that a device can map it without access to other data.
class PageWords {
 public:
  using Word = std::atomic<int32_t>;

  explicit PageWords(size_t count)
      : bytes_(round_up(count * sizeof(Word), page_bytes())), words_(static_cast<Word *>(allocate(bytes_))) {
    for (size_t i = 0; i < bytes_ / sizeof(Word); ++i) new (&words_[i]) Word(0);
  }
  Word &operator[](size_t index) const { return words_[index]; }
  Word *data() const { return words_.get(); }
  size_t bytes() const { return bytes_; }

 private:
  struct Free {
    void operator()(Word *words) const { operator delete(words, std::align_val_t(page_bytes())); }
  };
  static void *allocate(size_t bytes) { return operator new(bytes, std::align_val_t(page_bytes())); }

  size_t bytes_;
  std::unique_ptr<Word[], Free> words_;
};

}  // namespace phx
