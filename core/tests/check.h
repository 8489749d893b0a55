// A very small test frame: TEST(name) { ... CHECK(...) } in any number, and a main that runs them all.
// `program FILTER` runs those whose name contains FILTER. A failed CHECK reports and ends its test.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <vector>

#include "phalanx/cuda.h"
#include "phalanx/phalanx.h"
#include "phalanx/random.h"
#include "phalanx/tuning.h"

// phx_barrier with a timeout.
inline phx_status barrier_within(phx_group *group, int64_t timeout_ms) {
  phx_options options = PHX_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return phx_barrier(group, &options, nullptr);
}

namespace check {

struct Case {
  const char *name;
  void (*run)();
};
inline std::vector<Case> &cases() {
  static std::vector<Case> all;
  return all;
}
struct Register {
  Register(const char *name, void (*run)()) { cases().push_back({name, run}); }
};
struct Failure : std::exception {};
struct Skipped : std::exception {};

// Ends a test that cannot run here; `why` names the missing thing.
[[noreturn]] inline void skip(const char *why) {
  std::fprintf(stderr, "    skipped: %s\n", why);
  throw Skipped{};
}

inline void failed(const char *file, int line, const std::string &what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  throw Failure{};
}

inline int run_all(int argc, char **argv) {
  int passed = 0, bad = 0, skipped = 0;
  for (const Case &c : cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    std::fprintf(stderr, "  %s\n", c.name);
    try {
      c.run();
      ++passed;
    } catch (const Skipped &) {
      ++skipped;
    } catch (const Failure &) {
      std::fprintf(stderr, "FAILED %s\n", c.name);
      ++bad;
    } catch (const std::exception &error) {
      std::fprintf(stderr, "FAILED %s: %s\n", c.name, error.what());
      ++bad;
    }
  }
  std::printf("%d passed, %d failed, %d skipped\n", passed, bad, skipped);
  return bad == 0 && passed + skipped > 0 ? 0 : 1;
}

}  // namespace check

#define TEST(name)                                              \
  static void name();                                           \
  static const ::check::Register register_##name(#name, &name); \
  static void name()
#define CHECK(condition)                                                            \
  do {                                                                              \
    if (!(condition)) ::check::failed(__FILE__, __LINE__, "CHECK(" #condition ")"); \
  } while (0)
// A phx call that must succeed.
#define CHECK_OK(call)                                                                                    \
  do {                                                                                                    \
    const phx_status check_status = (call);                                                               \
    if (check_status != PHX_OK)                                                                           \
      ::check::failed(__FILE__, __LINE__,                                                                 \
                      std::string(#call ": ") + phx_status_name(check_status) + ": " + phx_last_error()); \
  } while (0)
// A phx call that must fail with `status` and with `words` somewhere in its text.
#define CHECK_FAILS(status, words, call)                                                                      \
  do {                                                                                                        \
    const phx_status check_status = (call);                                                                   \
    if (check_status != (status) || std::strstr(phx_last_error(), words) == nullptr)                          \
      ::check::failed(__FILE__, __LINE__,                                                                     \
                      std::string(#call ": got ") + phx_status_name(check_status) + ": " + phx_last_error() + \
                          "; expected " #status " with '" + words + "'");                                     \
  } while (0)
