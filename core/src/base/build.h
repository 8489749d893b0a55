// Which build of the library this is.
#pragma once

#include <cstring>
#include <string>

namespace phx {

// Two builds may share memory and messages only if they are equal: ranks must have the same layouts, thresholds and
// algorithms. The size and layout of this struct never change, because different builds read each other's.
struct Build {
  char version[16];      // such as "0.1.0", truncated, or padded with zeros
  char fingerprint[16];  // a hash of the sources in hexadecimal digits (cmake/fingerprint.cmake)

  bool operator==(const Build &other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
  bool operator!=(const Build &other) const { return !(*this == other); }
};
static_assert(sizeof(Build) == 32);

const Build &this_build();
// Text such as "0.1.0 (build 1a2b3c4d5e6f7081)". Unprintable bytes, which a peer may have sent, become "?".
std::string text_of(const Build &build);

}  // namespace phx
