// Finds and loads UCX.
#pragma once

#include <string>

#include "net/ucx_api.h"

namespace phx::ucx {

struct Library {
  Api api;
  std::string path;
  unsigned major = 0, minor = 0, release = 0;
};

// The library of the process, which stays loaded. NULL: `problem` says what was tried, why it failed and what to do.
const Library *find_library(std::string *problem);

// The UCX version whose interface the core uses, and the least that it needs.
constexpr unsigned kMajor = 1, kMinor = 13;

}  // namespace phx::ucx
