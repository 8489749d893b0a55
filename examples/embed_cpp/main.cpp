// Two processes add their vectors: the smallest complete program on libphalanx.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "phalanx/phalanx.hpp"

namespace {

constexpr int kRanks = 2;
constexpr size_t kCount = 1000;

// [rank]
// What every rank does. `path` is a file that all ranks can see: through it they find each other.
int run(int rank, const std::string &path) {
  phalanx::WorldOptions options;
  options.timeout = std::chrono::seconds(30);  // no wait is unbounded
  const auto world = phalanx::World::create(rank, kRanks, phalanx::Store::file(path), options);
  const auto group = world.group("everyone");

  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>((rank + 1) * static_cast<int>(i));
  group.all_reduce(values, values);

  size_t wrong = 0;
  for (size_t i = 0; i < kCount; ++i) wrong += values[i] != static_cast<float>(3 * i);  // 1 * i + 2 * i
  std::printf("rank %d (pid %d): the sum of element 10 is %g; %zu of %zu elements are wrong\n", rank,
              static_cast<int>(getpid()), static_cast<double>(values[10]), wrong, kCount);
  return wrong == 0 ? 0 : 1;
}
// [rank end]

// [check]
// What fails throws phalanx::Error, whose text says what to do about it.
int checked(int rank, const std::string &path) {
  try {
    return run(rank, path);
  } catch (const phalanx::Error &error) {
    std::fprintf(stderr, "%s: %s\n", error.status_name(), error.what());
    return 1;
  }
}
// [check end]

}  // namespace

// [main]
int main() {
  std::string directory =
      (std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + std::string("/phalanx-embed-XXXXXX");
  if (mkdtemp(directory.data()) == nullptr) return 1;
  const std::string path = directory + "/store";

  const pid_t child = fork();  // before any call of phalanx: a world does not survive a fork
  if (child < 0) return 1;
  if (child == 0) std::exit(checked(1, path));
  int result = checked(0, path);

  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) result = 1;
  unlink(path.c_str());
  rmdir(directory.c_str());
  return result;
}
// [main end]
