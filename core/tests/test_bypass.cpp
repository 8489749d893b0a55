// Results of about the limit are stored around the caches where that is faster, call by call.
#include "ops/bypass.h"

#include "check.h"

using phx::Bypass;
using phx::BypassUse;
using phx::kernels::Copy;

namespace {

constexpr size_t kLimit = 8 << 20;
constexpr int kCalls = 400;

// How many of `calls` calls stored their results around the caches. Those take `around` ticks, the others `cached`.
int around_of(BypassUse use, size_t bytes, int calls, uint64_t cached, uint64_t around) {
  int found = 0;
  for (int i = 0; i < calls; ++i) {
    Bypass bypass(use, bytes, kLimit);
    const Bypass::Clock clock(bypass);
    found += bool{bypass};
    const uint64_t end = phx::ticks() + (bypass ? around : cached);
    while (phx::ticks() < end) {
    }
  }
  return found;
}

#if defined(__x86_64__)
constexpr bool kHasWays = true;
#else
constexpr bool kHasWays = false;  // copies: nothing but memcpy
#endif

}  // namespace

TEST(small_results_stay_in_the_caches_and_have_no_contest) {
  CHECK(around_of(BypassUse::kGather, kLimit / 4 - 1, kCalls, 2000, 10) == 0);
  CHECK(around_of(BypassUse::kGather, 0, 1, 0, 0) == 0);
}

TEST(very_large_results_go_around_the_caches) {
  CHECK(around_of(BypassUse::kSymmReduce, 2 * kLimit, kCalls, 10, 2000) == kCalls);
  CHECK(around_of(BypassUse::kGather, 2 * kLimit, kCalls, 10, 2000) == (kHasWays ? kCalls : 0));
  CHECK(around_of(BypassUse::kGather, SIZE_MAX, 1, 10, 10) == kHasWays);
}

TEST(in_between_the_faster_one_is_found_whoever_begins) {
  for (const size_t bytes : {kLimit / 4, kLimit / 2, kLimit, 2 * kLimit - 1}) {
    around_of(BypassUse::kExchangeReduce, bytes, kCalls, 20000, 2000);
    CHECK(around_of(BypassUse::kExchangeReduce, bytes, kCalls, 20000, 2000) > kCalls * 9 / 10);
    around_of(BypassUse::kSymmReduce, bytes, kCalls, 2000, 20000);
    CHECK(around_of(BypassUse::kSymmReduce, bytes, kCalls, 2000, 20000) < kCalls / 10);
  }
}

TEST(a_rank_that_stores_no_results_leaves_the_contests_alone) {
  for (int i = 0; i < kCalls; ++i) {
    Bypass bypass(BypassUse::kTwoShot, kLimit, kLimit, false);
    CHECK(!bypass && bypass.copy() == Copy::kMemcpy);
  }
}

int main(int argc, char **argv) { return check::run_all(argc, argv); }
