// Two ranks that call a small all_reduce of several builds of the library, in turns drawn anew: what one build costs
// more than another. Compiled and run by detection_cost.py:
//
//   detection_cost TURNS CALLS BYTES LIBRARY...
//
// Prints a line for each library: the median over the turns of the nanoseconds of one call, and the median of its ratio
// to the first library in the same turn.
#include <dlfcn.h>
#include <phalanx/phalanx.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace {

[[noreturn]] void give_up(const char *what) {
  std::fprintf(stderr, "detection_cost: %s\n", what);
  std::_Exit(1);
}

double now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return static_cast<double>(t.tv_sec) * 1e9 + static_cast<double>(t.tv_nsec);
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

// One build, loaded beside the others, with a world and a group of its own.
struct Build {
  void *library = nullptr;
  phx_group *group = nullptr;
  decltype(&phx_all_reduce) all_reduce = nullptr;
  decltype(&phx_barrier) barrier = nullptr;

  template <class Function>
  Function *find(const char *name) {
    auto *found = reinterpret_cast<Function *>(dlsym(library, name));
    if (found == nullptr) give_up(dlerror());
    return found;
  }

  void open(const char *path, int rank, const std::string &store_path) {
    library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) give_up(dlerror());
    phx_store *store = nullptr;
    phx_world *world = nullptr;
    phx_world_params params{};
    params.struct_size = sizeof params;
    params.rank = rank;
    params.size = 2;
    params.timeout_ms = 60000;
    const int32_t both[] = {0, 1};
    if (find<decltype(phx_store_file)>("phx_store_file")(store_path.c_str(), &store) != PHX_OK) give_up("store");
    params.store = store;
    if (find<decltype(phx_world_create)>("phx_world_create")(&params, &world) != PHX_OK) give_up("world");
    if (find<decltype(phx_group_create)>("phx_group_create")(world, "both", both, 2, 0, &group) != PHX_OK)
      give_up("group");
    all_reduce = find<decltype(phx_all_reduce)>("phx_all_reduce");
    barrier = find<decltype(phx_barrier)>("phx_barrier");
  }

  double time(int calls, std::vector<float> *in, std::vector<float> *out) const {
    for (int i = 0; i < calls / 4; ++i) one(in, out);
    if (barrier(group, nullptr, nullptr) != PHX_OK) give_up("barrier");
    const double began = now_ns();
    for (int i = 0; i < calls; ++i) one(in, out);
    return (now_ns() - began) / calls;
  }

  void one(std::vector<float> *in, std::vector<float> *out) const {
    if (all_reduce(group, in->data(), out->data(), in->size(), PHX_DTYPE_F32, PHX_OP_SUM, nullptr, nullptr) != PHX_OK)
      give_up("all_reduce");
  }
};

void run(int rank, int turns, int calls, size_t bytes, const std::vector<const char *> &paths,
         const std::string &store_path) {
  cpu_set_t allowed, mine;
  sched_getaffinity(0, sizeof allowed, &allowed);
  CPU_ZERO(&mine);
  for (int cpu = 0, left = rank; cpu < CPU_SETSIZE; ++cpu)
    if (CPU_ISSET(cpu, &allowed) && left-- == 0) CPU_SET(cpu, &mine);
  if (CPU_COUNT(&mine) == 1) sched_setaffinity(0, sizeof mine, &mine);
  std::vector<Build> builds(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) builds[i].open(paths[i], rank, store_path + std::to_string(i));
  std::vector<float> in(bytes / sizeof(float), 1.0f), out(in.size());
  std::vector<std::vector<double>> times(builds.size()), ratios(builds.size());
  std::vector<size_t> order(builds.size());
  std::iota(order.begin(), order.end(), 0);
  std::mt19937 draw(1);  // the same order on both ranks
  for (int turn = 0; turn < turns; ++turn) {
    std::shuffle(order.begin(), order.end(), draw);
    for (const size_t i : order) times[i].push_back(builds[i].time(calls, &in, &out));
    for (size_t i = 0; i < builds.size(); ++i) ratios[i].push_back(times[i].back() / times[0].back());
  }
  if (rank == 0)
    for (size_t i = 0; i < builds.size(); ++i) std::printf("%.2f %.5f\n", median(times[i]), median(ratios[i]));
}

}  // namespace

int main(int argc, char **argv) {
  if (argc < 5) give_up("usage: detection_cost TURNS CALLS BYTES LIBRARY...");
  const int turns = std::atoi(argv[1]), calls = std::atoi(argv[2]);
  const size_t bytes = std::strtoul(argv[3], nullptr, 10);
  const std::vector<const char *> paths(argv + 4, argv + argc);
  char folder[] = "/tmp/phx-detection-XXXXXX";
  if (mkdtemp(folder) == nullptr) give_up("mkdtemp");
  const std::string store_path = std::string(folder) + "/store";
  const pid_t other = fork();
  run(other == 0 ? 1 : 0, turns, calls, bytes, paths, store_path);
  std::fflush(stdout);
  if (other == 0) std::_Exit(0);
  int status = 0;
  waitpid(other, &status, 0);
  for (size_t i = 0; i < paths.size(); ++i) unlink((store_path + std::to_string(i)).c_str());
  rmdir(folder);
  return status;
}
