#include "base/build.h"

#include <algorithm>

#include "phx_fingerprint.h"  // made by cmake/fingerprint.cmake

namespace phx {
namespace {

Build make_build() {
  Build build{};
  const std::string version = PHX_VERSION_STRING, fingerprint = PHX_FINGERPRINT;
  std::memcpy(build.version, version.data(), std::min(version.size(), sizeof build.version));
  std::memcpy(build.fingerprint, fingerprint.data(), std::min(fingerprint.size(), sizeof build.fingerprint));
  return build;
}

std::string printable(const char *text, size_t size) {
  std::string out(text, strnlen(text, size));
  for (char &c : out)
    if (c < ' ' || c > '~') c = '?';
  return out;
}

}  // namespace

const Build &this_build() {
  static const Build build = make_build();
  return build;
}

std::string text_of(const Build &build) {
  return printable(build.version, sizeof build.version) + " (build " +
         printable(build.fingerprint, sizeof build.fingerprint) + ")";
}

}  // namespace phx
