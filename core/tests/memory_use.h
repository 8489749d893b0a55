// What memory this process uses, as the kernel counts it.
#pragma once

#include <cstdio>
#include <cstring>

#include "base/sanitizers.h"

namespace memory_use {

// A sanitizer has a heap of its own, and mappings, so what it is compiled into cannot be measured.
#ifdef PHX_SANITIZED
constexpr bool kCounts = false;
#else
constexpr bool kCounts = true;
#endif

// The number of KiB in the line of `file` that begins with `key`; -1 without such a line.
inline long kib(const char *file, const char *key) {
  FILE *stream = std::fopen(file, "r");
  if (stream == nullptr) return -1;
  char line[256];
  long value = -1;
  while (value < 0 && std::fgets(line, sizeof line, stream) != nullptr)
    if (std::strncmp(line, key, std::strlen(key)) == 0) (void)std::sscanf(line + std::strlen(key), "%ld", &value);
  std::fclose(stream);
  return value;
}

}  // namespace memory_use
