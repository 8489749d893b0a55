// Which build of the library this is.
#pragma once

#include <cstring>
#include <string>

namespace phx {

// Two builds may share memory and messages only if they are equal: layouts, thresholds and algorithms are all part of
// what ranks must have in common. It is never changed in size or layout, because builds that differ read it of each
// other.
struct Build {
  char version[16];      // such as "0.1.0", cut off if it is longer; zeros behind
  char fingerprint[16];  // of the sources, in hexadecimal digits (cmake/fingerprint.cmake)

  bool operator==(const Build &other) const { return std::memcmp(this, &other, sizeof *this) == 0; }
  bool operator!=(const Build &other) const { return !(*this == other); }
};
static_assert(sizeof(Build) == 32);

const Build &this_build();
// Such as "0.1.0 (build 1a2b3c4d5e6f7081)". Safe for whatever bytes a peer sent.
std::string text_of(const Build &build);

}  // namespace phx
