// The order in which copies walk through memory. The hardware prefetcher follows one stream in each 4 KiB page, so a
// copy that walks through one page at a time waits for memory, or for another core's cache, most of the time. Four
// pages side by side nearly double the rate.
#pragma once

#include <cstddef>

namespace phx::kernels {

inline constexpr size_t kLine = 64;

// Calls `line` with the offset of each whole line of `size` bytes. Returns how many bytes these lines have. Always
// inlined, so that `line` may use the instruction set for which the caller is compiled.
template <class Line>
[[gnu::always_inline]] inline size_t for_lines_by_pages(size_t size, const Line &line) {
  constexpr size_t kPage = 4096, kPages = 4;
  size_t at = 0;
  for (; at + kPages * kPage <= size; at += kPages * kPage)
    for (size_t i = 0; i < kPage; i += kLine)
      for (size_t page = 0; page < kPages; ++page) line(at + page * kPage + i);
  for (; at + kLine <= size; at += kLine) line(at);
  return at;
}

}  // namespace phx::kernels
