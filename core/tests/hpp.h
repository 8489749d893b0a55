// Ranks of tests of phalanx.hpp: threads of this process, each with a world.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "check.h"
#include "phalanx/phalanx.hpp"

namespace hpp {

using Body = std::function<void(phalanx::World &world)>;

#if !PHALANX_PRIVATE_RESULTS
inline void as_threads(int size, const Body &body, const phalanx::WorldOptions &options = {}) {
  const phalanx::Store store = phalanx::Store::memory();
  std::vector<std::thread> threads;
  std::atomic<int> failures{0};
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([&, rank] {
      try {
        phalanx::World world = phalanx::World::create(rank, size, store, options);
        body(world);
      } catch (const std::exception &error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        ++failures;
      }
    });
  for (std::thread &thread : threads) thread.join();
  CHECK(failures == 0);
}

// The error that `body` throws.
template <class Body>
phalanx::Error thrown(Body body) {
  try {
    body();
  } catch (const phalanx::Error &error) {
    return error;
  }
  check::failed(__FILE__, __LINE__, "nothing was thrown");
  return phalanx::Error(PHX_OK, "", "");
}
#endif

inline bool says(const phalanx::Error &error, phx_status status, const char *words) {
  return error.status() == status && std::strstr(error.what(), words) != nullptr;
}

}  // namespace hpp
