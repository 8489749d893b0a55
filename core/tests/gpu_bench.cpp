// Not a test: what collectives on memory of a GPU take, with ranks as threads that share one; and where there are
// several, with a GPU for each, what NVLink switches change. Prints a JSON object.
//
//   gpu_bench [--quick] [--device N]
//
// Each figure is that of a graph of many launches, replayed on all ranks at once: from a meeting of the ranks on the
// host until every stream is through, the median of several replays. Where the driver has no graphs (fake_cuda/)
// launches take their place. What came out is compared with what must.
#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <string>

#include "gpu.h"
#include "ranks.h"

namespace {

using Clock = std::chrono::steady_clock;
using phx::cuda::Stream;
struct OpaqueGraph;
using Graph = OpaqueGraph *;

phx_device device{PHX_DEVICE_CUDA, 0};
bool quick = false;

double micros(Clock::duration time) { return std::chrono::duration<double, std::micro>(time).count(); }
double median(std::vector<double> all) {
  std::sort(all.begin(), all.end());
  return all[all.size() / 2];
}

// The driver's graphs, where it has them.
struct Graphs {
  int (*begin)(Stream, int) = gpu::symbol<int(Stream, int)>("cuStreamBeginCapture_v2");
  int (*end)(Stream, Graph *) = gpu::symbol<int(Stream, Graph *)>("cuStreamEndCapture");
  int (*make)(Graph *, Graph,
              unsigned long long) = gpu::symbol<int(Graph *, Graph, unsigned long long)>("cuGraphInstantiateWithFlags");
  int (*launch)(Graph, Stream) = gpu::symbol<int(Graph, Stream)>("cuGraphLaunch");
  int (*drop)(Graph) = gpu::symbol<int(Graph)>("cuGraphDestroy");
  int (*drop_made)(Graph) = gpu::symbol<int(Graph)>("cuGraphExecDestroy");
  bool there() const { return begin && end && make && launch && drop && drop_made; }
};

class Meeting {
 public:
  explicit Meeting(int size) : size_(size) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const int turn = turn_;
    if (++here_ == size_) {
      here_ = 0;
      ++turn_;
      changed_.notify_all();
    }
    changed_.wait(lock, [&] { return turn_ != turn; });
  }

 private:
  const int size_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int here_ = 0, turn_ = 0;
};

// One rank: a block, memory for results, a stream.
struct Rank {
  phx_world *world;
  phx_group *group;
  phx_symm *symm = nullptr;
  void *block = nullptr, *out = nullptr;
  Stream stream = nullptr;
  gpu::Gpu gpu;

  Rank(phx_world *of, size_t bytes, size_t out_bytes, phx_device on = device)
      : world(of), group(ranks::make_group(of)), gpu(on.index) {
    CHECK_OK(phx_mem_alloc(world, &on, bytes, &block));
    CHECK_OK(phx_mem_alloc(world, &on, out_bytes, &out));
    CHECK_OK(phx_symm_rendezvous(group, block, 0, &symm));
    CHECK(gpu.driver().stream_create(&stream, phx::cuda::kNonBlocking) == 0);
  }
  ~Rank() {
    gpu.driver().stream_destroy(stream);
    phx_symm_release(symm);
    phx_mem_free(world, out);
    phx_mem_free(world, block);
    phx_group_release(group);
  }
  Rank(const Rank &) = delete;
  Rank &operator=(const Rank &) = delete;
  gpu::Options options(int64_t timeout_ms = 20000) const {
    gpu::Options made;
    made.timeout_ms = timeout_ms;
    made.scale = 1;
    made.stream = stream;
    return made;
  }
};

// Microseconds of one of `times` calls of `once` on all ranks, which replay them together.
template <class Once>
double time_of(const Rank &me, Meeting &meeting, int times, Once once) {
  static const Graphs graphs;
  Graph graph = nullptr, made = nullptr;
  if (graphs.there()) {
    CHECK(graphs.begin(me.stream, 1) == 0);  // CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    for (int i = 0; i < times; ++i) once();
    CHECK(graphs.end(me.stream, &graph) == 0 && graphs.make(&made, graph, 0) == 0);
  }
  std::vector<double> all;
  for (int round = 0; round < (quick ? 3 : 9); ++round) {
    meeting.wait();
    const auto begun = Clock::now();
    if (graphs.there())
      CHECK(graphs.launch(made, me.stream) == 0);
    else
      for (int i = 0; i < times; ++i) once();
    CHECK(me.gpu.driver().stream_wait(me.stream) == 0);
    meeting.wait();
    if (round > 0) all.push_back(micros(Clock::now() - begun) / times);
  }
  if (graphs.there()) CHECK(graphs.drop_made(made) == 0 && graphs.drop(graph) == 0);
  return median(all);
}

// The input of a rank: small integers, so that sums of float32 are exact.
std::vector<unsigned char> input(int rank, size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
  std::vector<unsigned char> bytes(count * sizeof(float));
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}
float summed(int n, size_t i) {
  float sum = 0;
  for (int rank = 0; rank < n; ++rank) sum += static_cast<float>((i * 7 + static_cast<size_t>(rank) * 13) % 101);
  return sum;
}

class Report {
 public:
  void add(const std::string &row) { rows_ += (rows_.empty() ? "\n  " : ",\n  ") + row; }
  void add(const char *what, int n, size_t bytes, double us) {
    char row[160];
    std::snprintf(row, sizeof row, R"({"what": "%s", "ranks": %d, "bytes": %zu, "us": %.3f})", what, n, bytes, us);
    add(row);
  }
  void print() const { std::printf("[%s\n]\n", rows_.c_str()); }

 private:
  std::string rows_;
};

// Bytes per second of the driver's own copy: what is read and what is written.
double copy_rate(const Rank &me, size_t bytes) {
  auto *const copy = gpu::symbol<int(unsigned long long, unsigned long long, size_t, Stream)>("cuMemcpyDtoDAsync_v2");
  if (copy == nullptr) return 0;
  std::vector<double> all;
  for (int round = 0; round < 7; ++round) {
    const auto begun = Clock::now();
    for (int i = 0; i < 10; ++i)
      CHECK(copy(reinterpret_cast<uintptr_t>(me.out), reinterpret_cast<uintptr_t>(me.block), bytes, me.stream) == 0);
    CHECK(me.gpu.driver().stream_wait(me.stream) == 0);
    all.push_back(micros(Clock::now() - begun) / 10);
  }
  return 2 * static_cast<double>(bytes) / median(all) * 1e6;
}

void measure(int n, Report &report) {
  Meeting meeting(n);
  const size_t largest = quick ? size_t{1} << 16 : size_t{256} << 20;
  const std::vector<size_t> sizes =
      quick ? std::vector<size_t>{1 << 12, 1 << 16}
            : std::vector<size_t>{1 << 10, 16 << 10, 256 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20};
  ranks::as_threads(n, [&](int rank, phx_world *world) {
    const Rank me(world, largest, largest * static_cast<size_t>(quick ? n : 1));
    const gpu::Options options = me.options();
    const auto tell = [&](const char *what, size_t bytes, double us) {
      if (rank == 0) report.add(what, n, bytes, us);
    };
    const int many = quick ? 5 : 100;
    tell("barrier", 0,
         time_of(me, meeting, many, [&] { CHECK_OK(phx_symm_enqueue_barrier(me.symm, 0, 0, me.stream)); }));
    for (const size_t bytes : sizes) {
      const size_t count = bytes / sizeof(float), part = count / static_cast<size_t>(n);
      const int times =
          quick ? 3 : static_cast<int>(std::max<size_t>(4, std::min<size_t>(100, (size_t{1} << 28) / bytes)));
      me.gpu.write(me.block, input(rank, count));
      meeting.wait();
      tell("all_reduce", bytes, time_of(me, meeting, times, [&] {
             CHECK_OK(phx_symm_all_reduce(me.symm, 0, me.out, count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
           }));
      std::vector<float> seen(count);
      std::memcpy(seen.data(), me.gpu.read(me.out, bytes).data(), bytes);
      for (size_t i = 0; i < count; ++i) CHECK(seen[i] == summed(n, i));
      tell("reduce_scatter", bytes, time_of(me, meeting, times, [&] {
             CHECK_OK(phx_symm_reduce_scatter(me.symm, 0, me.out, part, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
           }));
      tell("all_gather", bytes, time_of(me, meeting, times, [&] {
             CHECK_OK(phx_symm_all_gather(me.symm, 0, me.out, part, PHX_DTYPE_F32, &options, nullptr));
           }));
      tell("all_to_all", bytes, time_of(me, meeting, times, [&] {
             CHECK_OK(phx_symm_all_to_all(me.symm, 0, me.out, part, PHX_DTYPE_F32, &options, nullptr));
           }));
      tell("broadcast", bytes, time_of(me, meeting, times, [&] {
             CHECK_OK(phx_symm_broadcast(me.symm, 0, count, PHX_DTYPE_F32, 0, &options, nullptr));
           }));
      // In place, of zeros: they stay.
      me.gpu.write(me.block, std::vector<unsigned char>(bytes, 0));
      meeting.wait();
      const double us = time_of(me, meeting, times, [&] {
        CHECK_OK(phx_symm_all_reduce(me.symm, 0, me.block, count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
      });
      tell("all_reduce in place", bytes, us);
      const double copied = copy_rate(me, bytes);
      if (rank == 0 && copied > 0) {  // every rank reads as much as a block holds, and writes as much
        char row[200];
        std::snprintf(
            row, sizeof row,
            R"({"what": "all_reduce in place, part of the rate of a copy", "ranks": %d, "bytes": %zu, "ratio": %.3f})",
            n, bytes, 2.0 * n * static_cast<double>(bytes) / us * 1e6 / copied);
        report.add(row);
      }
      meeting.wait();
    }
  });
}

// A GPU for each rank. Where switches connect them, each collective once as ever, and once by them.
void measure_apart(int n, Report &report) {
  Meeting meeting(n);
  const size_t largest = quick ? size_t{1} << 16 : size_t{256} << 20;
  const std::vector<size_t> sizes =
      quick ? std::vector<size_t>{1 << 16} : std::vector<size_t>{16 << 10, 256 << 10, 1 << 20, 16 << 20, 256 << 20};
  ranks::as_threads(n, [&](int rank, phx_world *world) {
    const Rank me(world, 2 * largest, largest, {PHX_DEVICE_CUDA, rank});
    phx_team team{};
    team.struct_size = sizeof team;
    CHECK_OK(phx_symm_get_team(me.symm, &team));
    if (rank == 0 && team.multicast == nullptr)
      report.add(R"({"what": "no multicast", "ranks": )" + std::to_string(n) + "}");
    char *const shared = static_cast<char *>(me.block) + largest;
    for (const int32_t algo : std::initializer_list<phx_algo>{PHX_ALGO_TWO_SHOT, PHX_ALGO_MULTIMEM}) {
      if (algo == PHX_ALGO_MULTIMEM && team.multicast == nullptr) continue;
      gpu::Options options = me.options();
      options.algo = algo;
      const std::string how = algo == PHX_ALGO_MULTIMEM ? ", a GPU each, multimem" : ", a GPU each";
      const auto tell = [&](const char *what, size_t bytes, double us) {
        if (rank == 0) report.add((what + how).c_str(), n, bytes, us);
      };
      for (const size_t bytes : sizes) {
        const size_t count = bytes / sizeof(float), part = count / static_cast<size_t>(n);
        const int times =
            quick ? 3 : static_cast<int>(std::max<size_t>(4, std::min<size_t>(100, (size_t{1} << 28) / bytes)));
        me.gpu.write(me.block, input(rank, count));
        meeting.wait();
        tell(
            "reduce_scatter", bytes, time_of(me, meeting, times, [&] {
              CHECK_OK(phx_symm_reduce_scatter(me.symm, 0, me.out, part, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
            }));
        std::vector<float> seen(part);
        std::memcpy(seen.data(), me.gpu.read(me.out, part * sizeof(float)).data(), part * sizeof(float));
        for (size_t i = 0; i < part; ++i) CHECK(seen[i] == summed(n, static_cast<size_t>(rank) * part + i));
        // Ordinary ones fetch, as their results lie nowhere in symmetric memory.
        void *const gathered = algo == PHX_ALGO_MULTIMEM ? static_cast<void *>(shared) : me.out;
        tell("all_gather", bytes, time_of(me, meeting, times, [&] {
               CHECK_OK(phx_symm_all_gather(me.symm, 0, gathered, part, PHX_DTYPE_F32, &options, nullptr));
             }));
        me.gpu.write(me.block, std::vector<unsigned char>(bytes, 0));  // they stay
        meeting.wait();
        tell("all_reduce in place", bytes, time_of(me, meeting, times, [&] {
               CHECK_OK(phx_symm_all_reduce(me.symm, 0, me.block, count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
             }));
        tell("all_reduce of bfloat16 in place", bytes, time_of(me, meeting, times, [&] {
               CHECK_OK(
                   phx_symm_all_reduce(me.symm, 0, me.block, 2 * count, PHX_DTYPE_BF16, PHX_OP_SUM, &options, nullptr));
             }));
        if (algo == PHX_ALGO_MULTIMEM)
          tell("broadcast", bytes, time_of(me, meeting, times, [&] {
                 CHECK_OK(phx_symm_broadcast(me.symm, 0, count, PHX_DTYPE_F32, 0, &options, nullptr));
               }));
        meeting.wait();
      }
    }
  });
}

// The same bits each time. D: launches that only differ in when their blocks run.
void replay(Report &report) {
  Meeting meeting(2);
  const size_t count = 4096;
  const int times = 100, replays = quick ? 3 : 10000;
  ranks::as_threads(2, [&](int rank, phx_world *world) {
    const Rank me(world, count * 4, count * 4);
    const gpu::Options options = me.options();
    std::vector<unsigned char> noise(count * 4);
    uint32_t state = 12345u + static_cast<uint32_t>(rank);
    for (size_t i = 0; i < count; ++i) {
      state = state * 1664525u + 1013904223u;
      const float value = static_cast<float>(state) / 65537.0F;
      std::memcpy(&noise[i * 4], &value, 4);
    }
    me.gpu.write(me.block, noise);
    meeting.wait();
    const auto once = [&] {
      CHECK_OK(phx_symm_all_reduce(me.symm, 0, me.out, count, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    };
    once();
    CHECK(me.gpu.driver().stream_wait(me.stream) == 0);
    const std::vector<unsigned char> first = me.gpu.read(me.out, count * 4);
    int differing = 0;
    for (int i = 0; i < replays / 100 + 1; ++i) {
      time_of(me, meeting, times, once);
      if (me.gpu.read(me.out, count * 4) != first) ++differing;
    }
    if (rank == 0) {
      char row[160];
      std::snprintf(row, sizeof row, R"({"what": "looks at a result that was replayed", "looks": %d, "differing": %d})",
                    replays / 100 + 1, differing);
      report.add(row);
    }
  });
}

// From the death of a rank until the kernel that waits for it has ended.
double after_a_death() {
  int pipe_ends[2];
  CHECK(pipe(pipe_ends) == 0);
  ranks::as_processes(2, [&](int rank, phx_world *world) {
    const Rank me(world, 4096, 4096);
    const gpu::Options options = me.options(60000);
    if (rank == 0) CHECK_OK(phx_symm_all_reduce(me.symm, 0, me.out, 100, PHX_DTYPE_F32, PHX_OP_SUM, &options, nullptr));
    CHECK_OK(phx_barrier(me.group, nullptr, nullptr));
    if (rank == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
      const auto now = Clock::now();
      (void)!write(pipe_ends[1], &now, sizeof now);
      raise(SIGKILL);
    }
    me.gpu.driver().stream_wait(me.stream);
    const auto now = Clock::now();
    (void)!write(pipe_ends[1], &now, sizeof now);
  });
  Clock::time_point died, ended;
  CHECK(read(pipe_ends[0], &died, sizeof died) == sizeof died &&
        read(pipe_ends[0], &ended, sizeof ended) == sizeof ended);
  return micros(ended - died);
}

}  // namespace

int main(int argc, char **argv) {
  gpu::give_streams_queues_of_their_own();
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--device") == 0 && i + 1 < argc) device.index = std::atoi(argv[++i]);
  }
  try {
    Report report;
    report.add("death of a rank", 2, 0, after_a_death());  // first: what forks must not have started the driver
    for (const int n : quick ? std::vector<int>{2} : std::vector<int>{2, 4, 8}) measure(n, report);
    for (const int n : quick ? std::vector<int>{2} : std::vector<int>{2, 4, 8})
      if (n <= gpu::count()) measure_apart(n, report);
    replay(report);
    report.print();
    return 0;
  } catch (const std::exception &) {
    return 1;  // the check that failed has said so
  }
}
