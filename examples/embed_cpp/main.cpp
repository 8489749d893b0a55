// Two processes add their vectors: a whole program on libphalanx.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <phalanx/phalanx.hpp>
#include <vector>

int main() try {
  char folder[] = "/tmp/phalanx-XXXXXX";
  if (mkdtemp(folder) == nullptr) return 1;
  const int rank = fork() == 0 ? 1 : 0;  // a world does not survive a fork, so fork first
  // The ranks find each other through a file. Data moves through shared memory.
  const auto store = phalanx::Store::file(folder + std::string("/store"));
  const auto world = phalanx::World::create(rank, 2, store);
  const auto group = world.group("everyone");
  std::vector<float> values(1000, static_cast<float>(rank + 1));
  group.all_reduce(values, values);
  std::printf("rank %d: 1 + 2 = %g\n", rank, static_cast<double>(values[999]));
  if (rank == 1) return 0;
  int status = 0;
  wait(&status);
  std::filesystem::remove_all(folder);
  return status == 0 && values[999] == 3 ? 0 : 1;
} catch (const phalanx::Error &error) {
  std::fprintf(stderr, "%s\n", error.what());  // says which rank failed, and what to do
  return 1;
}
