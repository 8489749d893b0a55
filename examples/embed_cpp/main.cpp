// Two processes add their vectors: the smallest complete program on libphalanx.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "phalanx/phalanx.h"

namespace {

constexpr int kRanks = 2;
constexpr size_t kCount = 1000;

// [check]
// Every call that can fail returns a status; the text of the last error says what to do about it.
void must(phx_status status) {
  if (status == PHX_OK) return;
  std::fprintf(stderr, "%s: %s\n", phx_status_name(status), phx_last_error());
  std::exit(1);
}
// [check end]

// [rank]
// What every rank does. `path` is a file that all ranks can see: through it they find each other.
int run(int rank, const std::string &path) {
  phx_store *store = nullptr;
  must(phx_store_file(path.c_str(), &store));

  phx_world_params params{};
  params.struct_size = sizeof params;
  params.rank = rank;
  params.size = kRanks;
  params.store = store;
  params.timeout_ms = 30000;  // no wait is unbounded
  phx_world *world = nullptr;
  must(phx_world_create(&params, &world));

  const int32_t ranks[kRanks] = {0, 1};
  phx_group *group = nullptr;
  must(phx_group_create(world, "everyone", ranks, kRanks, 0, &group));

  std::vector<float> values(kCount);
  for (size_t i = 0; i < kCount; ++i) values[i] = static_cast<float>((rank + 1) * static_cast<int>(i));
  must(phx_all_reduce(group, values.data(), values.data(), kCount, PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr));

  size_t wrong = 0;
  for (size_t i = 0; i < kCount; ++i) wrong += values[i] != static_cast<float>(3 * i);  // 1 * i + 2 * i
  std::printf("rank %d (pid %d): the sum of element 10 is %g; %zu of %zu elements are wrong\n", rank,
              static_cast<int>(getpid()), static_cast<double>(values[10]), wrong, kCount);

  phx_group_release(group);
  phx_world_release(world);
  phx_store_release(store);
  return wrong == 0 ? 0 : 1;
}
// [rank end]

}  // namespace

// [main]
int main() {
  std::string directory =
      (std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") + std::string("/phalanx-embed-XXXXXX");
  if (mkdtemp(directory.data()) == nullptr) return 1;
  const std::string path = directory + "/store";

  const pid_t child = fork();  // before any call of phalanx: a world does not survive a fork
  if (child < 0) return 1;
  if (child == 0) std::exit(run(1, path));
  int result = run(0, path);

  int status = 0;
  if (waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) result = 1;
  unlink(path.c_str());
  rmdir(directory.c_str());
  return result;
}
// [main end]
