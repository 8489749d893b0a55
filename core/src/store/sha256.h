// SHA-256 (FIPS 180-4) and HMAC-SHA256 (RFC 2104), for the proof that a TCP client knows the token of its store.
#pragma once

#include <array>
#include <cstdint>
#include <string>

namespace phx::store {

using Digest = std::array<uint8_t, 32>;

// The bytes of a value without pointers and padding, for a message or a key.
template <class Value>
std::string bytes_of(const Value &value) {
  return {reinterpret_cast<const char *>(&value), sizeof value};
}

Digest sha256(std::string message);
Digest hmac_sha256(std::string key, const std::string &message);

// Takes the same time wherever the two differ, so that a guesser learns nothing from it.
bool equal_in_constant_time(const Digest &a, const Digest &b);

}  // namespace phx::store
