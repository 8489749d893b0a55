// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the proof that a TCP client knows the token of its store.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace phx::store {

using Digest = std::array<uint8_t, 32>;

class Sha256 {
 public:
  Sha256();
  void update(const void *data, size_t size);
  Digest finish();  // ends the message: no update after it

 private:
  void absorb(const uint8_t *block);

  std::array<uint32_t, 8> state_;
  std::array<uint8_t, 64> block_;
  size_t filled_ = 0;  // bytes of block_
  uint64_t total_ = 0;
};

class HmacSha256 {
 public:
  HmacSha256(const void *key, size_t key_size);
  void update(const void *data, size_t size) { inner_.update(data, size); }
  Digest finish();

 private:
  Sha256 inner_;
  std::array<uint8_t, 64> outer_pad_;
};

// Takes the same time wherever the two differ, so that a guesser learns nothing from it.
bool equal_in_constant_time(const Digest &a, const Digest &b);

}  // namespace phx::store
