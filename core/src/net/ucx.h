// The carrier that ships with the library: UCX, found at run time.
#pragma once

#include <string>

#include "phalanx/carrier.h"

namespace phx {

// The directory of a libucp.so.0 that is tried after PHALANX_UCX and the system's (the Python package passes that of
// the wheel libucx). NULL: none. Without effect once a library is loaded.
void set_ucx_hint(const char *path);

// The table of UCX. NULL, with the thread's error: no usable UCX is found.
const phx_carrier_ops *ucx_carrier();

// What ucx_carrier() finds, for `phalanx doctor`.
struct UcxFacts {
  std::string path;        // of libucp.so.0; empty: it is not found
  std::string version;     // "1.13.1"
  std::string problem;     // why it is not found or cannot be used
  std::string transports;  // what a group would use: "tcp/eth0 tcp/lo"
};
UcxFacts ucx_facts();

}  // namespace phx
