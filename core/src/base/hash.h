// Hashes for keys and for records that ranks compare. The results are the same on every machine.
#pragma once

#include <cstddef>
#include <cstdint>

namespace phx {

// FNV-1a.
inline uint64_t hash_bytes(const void *data, size_t size, uint64_t seed = 0xcbf29ce484222325ull) {
  for (const auto *bytes = static_cast<const unsigned char *>(data); size > 0; ++bytes, --size)
    seed = (seed ^ *bytes) * 0x100000001b3ull;
  return seed;
}
// Hashes a word at a time, which is faster: for code on the path of every call.
template <size_t kWords>
uint64_t hash_words(const uint64_t (&words)[kWords]) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (const uint64_t word : words) {
    hash = (hash ^ word) * 0x9e3779b97f4a7c15ull;
    hash ^= hash >> 32;
  }
  return hash;
}

}  // namespace phx
