// The PHALANX_* environment variables: one row for each, of the core and of all packages.
//
// The core reads its own through read_variable, which accepts only names of the table. phx_environment() gives the
// table to Python, to `phalanx doctor` and to the documentation.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <string>
#include <string_view>

namespace phx {

struct Variable {
  const char *name;
  const char *reader;  // which distribution reads it; "internal": only tests and developers of Phalanx set it
  const char *values;
  const char *fallback;  // what holds where it is not set
  const char *meaning;
};
inline constexpr const char *kInternal = "internal";

inline constexpr Variable kVariables[] = {
    {"PHALANX_BENCH_PEERS", "phalanx-tools", "a folder", "phalanx/bench-peers in the cache folder",
     "Where `phalanx bench --make-peers` installs the libraries that it compares with."},
    {"PHALANX_COMPILE", "phalanx-inductor-plugin", "NAME=VALUE ..., separated by spaces", "empty",
     "Changes the defaults of the options that the plug-in for `torch.compile` has."},
    {"PHALANX_CUDA_KERNELS", "phalanx-core", "a file", "the kernels in the library",
     "The compiled GPU kernels to load in place of those in the library."},
    {"PHALANX_DUMP", "phalanx-core", "an existing folder", "no dumps",
     "Where each rank writes its flight recorder when a group fails; `phalanx trace` reads these files."},
    {"PHALANX_HOST_ID", "phalanx-core", "0 to 2^64 - 1", "the host is detected",
     "Ranks with different numbers count as ranks of different hosts, so they do not share memory."},
    {"PHALANX_ISA", "phalanx-core", "avx512, avx2, neon or scalar", "the best that the processor has",
     "The best instruction set that reductions may use."},
    {"PHALANX_LIBRARY", "phalanx-core", "a file", "the library in the installed package",
     "The libphalanx.so.0 that Python loads."},
    {"PHALANX_NATIVE", "phalanx-collectives", "a folder, or empty", "phalanx/native in the cache folder",
     "Where the compiled parts of the packages are kept. Empty: none is compiled or loaded."},
    {"PHALANX_PROGRESS", "phalanx-core", "0 or 1", "0",
     "1: a thread advances operations that were started while the rank computes."},
    {"PHALANX_RECORDER_ENTRIES", "phalanx-core", "a number, the same on all ranks", "256",
     "How many collectives of each channel the flight recorder keeps."},
    {"PHALANX_REDUCTION_ORDER", "phalanx-core", "hosts or ranks, the same on all ranks", "hosts",
     "The order in which a group on several hosts adds up. `ranks`: the order of the ranks, so that sums have the bits "
     "of one host."},
    {"PHALANX_SOCKET_IFNAME", "phalanx-core", "names of interfaces, separated by commas", "the route to the store",
     "The network interface through which ranks of other hosts reach this one."},
    {"PHALANX_TUNING", "phalanx-core", "a file, or empty", "phalanx/tuning in the cache folder",
     "The table that `phalanx tune` writes and new groups read. Empty: the built-in values hold."},
    {"PHALANX_UCX", "phalanx-core", "a file", "the system's UCX, or the wheel libucx-cu12",
     "The libucp.so.0 of UCX through which groups that span hosts move data."},
    {"PHALANX_WAIT_WARNING_S", "phalanx-core", "seconds; 0: never", "10",
     "After how long a wait for other ranks is reported in the log: again after 3 and 6 times as long, and then every "
     "6 times."},
    // What only tests and developers set.
    {"PHALANX_EXAMPLE_TOKEN", kInternal, "16 characters or more", "none",
     "The token of the store in examples/hosts.c."},
    {"PHALANX_FAILPOINT", kInternal, "CALL.STEP@TIMES=ACTION", "none",
     "Fails a rank at a numbered step, in a library that is built for it."},
    {"PHALANX_FAILPOINT_LOG", kInternal, "a file", "none", "Where a rank that fails so writes the time."},
    {"PHALANX_FIRST_COUNT", kInternal, "0 to 2^32 - 1, the same on all ranks", "0",
     "Where the counters in shared memory begin: tests reach their wrap with it."},
    {"PHALANX_GPU_BUILD", kInternal, "a folder", "build-gpu", "The build folder of benchmarks/gpu.sh."},
    {"PHALANX_TEST_CACHE", kInternal, "a folder", "phalanx/tests in the cache folder",
     "Where tests keep what they compile."},
    {"PHALANX_TEST_FULL", kInternal, "0 or 1", "0", "1: tests run all cases and not a sample."},
    {"PHALANX_TEST_HUGE", kInternal, "0 or 1", "0", "1: tests also run the cases that need much memory or time."},
};
inline constexpr size_t kVariableCount = sizeof kVariables / sizeof kVariables[0];

// The row of that name; kVariableCount if there is none.
constexpr size_t variable(std::string_view name) {
  size_t i = 0;
  while (i < kVariableCount && kVariables[i].name != name) ++i;
  return i;
}

// The value; NULL if it is not set. read_variable<variable("PHALANX_ISA")>()
template <size_t Row>
const char *read_variable() {
  static_assert(Row < kVariableCount, "this variable has no row in kVariables");
  return std::getenv(kVariables[Row].name);
}

// The names of the PHALANX_* variables that are set but have no row, each with the known name that is closest to it:
// "PHALANX_TUNE (did you mean PHALANX_TUNING?)". Empty if there are none.
std::string unknown_variables();

// PHALANX_WAIT_WARNING_S in nanoseconds; 0: no wait is reported. Read once. *problem: see warn_about_environment.
int64_t wait_warning_ns();
std::string wait_warning_problem();

}  // namespace phx
