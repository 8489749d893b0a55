// An array of atomic words that fills whole pages, so that a device can map it without access to other data.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "base/shared_memory.h"

namespace phx {

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
