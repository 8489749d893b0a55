// Speed of the reduction kernels and of the copies on one core, beside what the memory of this host gives.
//
//   cmake -S . -B build && cmake --build build --target bench_kernels && build/bench_kernels
//
// Options, each with a list separated by commas, or "all":
//   --dtype f32,bf16   --op sum,avg   --isa avx512,scalar   --inputs 2,8   --kib 16,1024   (KiB of one input)
//   --rounds 11        how often each is measured; all have their turn in every round
//   --remote           another core writes the inputs before each call, as a peer does; needs two cores
//   --json FILE        all figures, too
//
// A GB is 10^9 bytes read or written by the call: n inputs and one output. "of limit" is the share of the fastest of
// three loops that only read, copy, and copy with non-temporal stores, in the same rounds and on as much memory (with
// --remote: as freshly written by the other core). A plain store reads its line before; no loop here counts that.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include <pthread.h>
#include <sched.h>

#if defined(__x86_64__)
#include <emmintrin.h>
#endif

#include "kernels/copies.h"
#include "kernels/kernels.h"

namespace {

using phx::kernels::CopyUse;
using phx::kernels::ReduceFn;
using phx::kernels::Results;

struct Name {
  const char *name;
  int32_t value;
};
constexpr Name kDtypes[] = {{"f16", PHX_DTYPE_F16},       {"bf16", PHX_DTYPE_BF16},    {"f32", PHX_DTYPE_F32},
                            {"f64", PHX_DTYPE_F64},       {"i8", PHX_DTYPE_I8},        {"u8", PHX_DTYPE_U8},
                            {"i16", PHX_DTYPE_I16},       {"u16", PHX_DTYPE_U16},      {"i32", PHX_DTYPE_I32},
                            {"u32", PHX_DTYPE_U32},       {"i64", PHX_DTYPE_I64},      {"u64", PHX_DTYPE_U64},
                            {"bool", PHX_DTYPE_BOOL},     {"c64", PHX_DTYPE_C64},      {"c128", PHX_DTYPE_C128},
                            {"f8e4m3", PHX_DTYPE_F8E4M3}, {"f8e5m2", PHX_DTYPE_F8E5M2}};
constexpr Name kOps[] = {{"sum", PHX_OP_SUM}, {"avg", PHX_OP_AVG},   {"prod", PHX_OP_PROD},
                         {"min", PHX_OP_MIN}, {"max", PHX_OP_MAX},   {"band", PHX_OP_BAND},
                         {"bor", PHX_OP_BOR}, {"bxor", PHX_OP_BXOR}, {"premul_sum", PHX_OP_PREMUL_SUM}};
constexpr const char *kIsas[] = {"scalar", "avx2", "avx512", "neon"};

struct Options {
  std::string dtypes = "f32,bf16,f16,f8e4m3,c64", ops = "sum", isas = "all", inputs = "2,4,8", kib = "4,128,2048,65536";
  int rounds = 11;
  bool remote = false;
  const char *json = nullptr;
};

std::vector<std::string> split(const std::string &list) {
  std::vector<std::string> parts(1);
  for (char c : list)
    if (c == ',')
      parts.emplace_back();
    else
      parts.back() += c;
  return parts;
}
bool wanted(const std::string &list, const char *name) {
  if (list == "all") return true;
  for (const std::string &part : split(list))
    if (part == name) return true;
  return false;
}

Options parse(int argc, char **argv) {
  Options options;
  for (int i = 1; i < argc; ++i) {
    const std::string name = argv[i];
    if (name == "--remote") {
      options.remote = true;
      continue;
    }
    if (i + 1 == argc) {
      std::fprintf(stderr, "kernels: %s is no option, or lacks its value; see the head of the source\n", argv[i]);
      std::exit(2);
    }
    const char *value = argv[++i];
    if (name == "--dtype") options.dtypes = value;
    if (name == "--op") options.ops = value;
    if (name == "--isa") options.isas = value;
    if (name == "--inputs") options.inputs = value;
    if (name == "--kib") options.kib = value;
    if (name == "--rounds") options.rounds = std::max(1, std::atoi(value));
    if (name == "--json") options.json = value;
  }
  return options;
}

// ---- the limits -------------------------------------------------------------------------------------------------

// 64 bytes at a time, in whatever vectors the target has.
typedef long long Wide __attribute__((vector_size(64), aligned(1), may_alias));

inline __attribute__((always_inline)) void read_lines(const char *from, size_t size) {
  Wide a{}, b{};
  for (size_t i = 0; i + 128 <= size; i += 128) {
    a ^= *reinterpret_cast<const Wide *>(from + i);
    b ^= *reinterpret_cast<const Wide *>(from + i + 64);
  }
  a ^= b;
  asm volatile("" : : "m"(a));
}
inline __attribute__((always_inline)) void copy_lines(char *to, const char *from, size_t size) {
  for (size_t i = 0; i + 64 <= size; i += 64) {
    *reinterpret_cast<Wide *>(to + i) = *reinterpret_cast<const Wide *>(from + i);
    asm volatile("" ::: "memory");  // or the compiler calls memcpy
  }
}
#if defined(__x86_64__)
__attribute__((target("avx512f"))) void read_avx512(const char *from, size_t size) { read_lines(from, size); }
__attribute__((target("avx512f"))) void copy_avx512(char *to, const char *from, size_t size) {
  copy_lines(to, from, size);
}
#endif
void read_plain(const char *from, size_t size) { read_lines(from, size); }
void copy_plain(char *to, const char *from, size_t size) { copy_lines(to, from, size); }
void copy_nontemporal(char *to, const char *from, size_t size) {
#if defined(__x86_64__)
  for (size_t i = 0; i + 16 <= size; i += 16)
    _mm_stream_si128(reinterpret_cast<__m128i *>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i *>(from + i)));
  _mm_sfence();
#else
  copy_plain(to, from, size);
#endif
}
bool has_avx512() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f");
#else
  return false;
#endif
}

// ---- measuring --------------------------------------------------------------------------------------------------

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void pin(int core) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(static_cast<size_t>(core), &set);
  pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

// Another core that writes what the next call shall read.
class Writer {
 public:
  Writer() : thread_([this] { run(); }) {}
  ~Writer() {
    turn_.store(kStop, std::memory_order_release);
    thread_.join();
  }
  void write(char *at, size_t size) {
    at_ = at;
    size_ = size;
    turn_.store(kWrite, std::memory_order_release);
    while (turn_.load(std::memory_order_acquire) != kIdle) {
    }
  }

 private:
  enum { kIdle, kWrite, kStop };
  void run() {
    pin(1);
    for (;;) {
      const int turn = turn_.load(std::memory_order_acquire);
      if (turn == kStop) return;
      if (turn != kWrite) continue;
      std::memset(at_, 0, size_);
      turn_.store(kIdle, std::memory_order_release);
    }
  }
  std::atomic<int> turn_{kIdle};
  char *at_ = nullptr;
  size_t size_ = 0;
  std::thread thread_;
};

struct Way {
  std::string what, isa;
  int inputs;
  std::function<void()> call;
  bool is_limit;
  std::vector<double> rates = {};  // GB/s, one per round
  double median() {
    std::sort(rates.begin(), rates.end());
    return rates[rates.size() / 2];
  }
};

// One turn: some milliseconds of calls, or with a writer single calls after fresh inputs.
double turn(const Way &way, size_t each, Writer *writer, char *memory, size_t stride) {
  const size_t bytes = each * static_cast<size_t>(way.inputs + (way.what == "read" ? 0 : 1));
  const size_t calls = std::max<size_t>(1, ((writer != nullptr ? size_t{4} : size_t{24}) << 20) / bytes);
  double took = 0;
  if (writer == nullptr) {
    way.call();  // brings the caches into the state that the calls leave them in
    const double start = now();
    for (size_t i = 0; i < calls; ++i) way.call();
    took = now() - start;
  } else {
    for (size_t i = 0; i < calls; ++i) {
      writer->write(memory, stride * static_cast<size_t>(way.inputs - 1) + each);
      const double start = now();
      way.call();
      took += now() - start;
    }
  }
  return 1e-9 * static_cast<double>(bytes * calls) / took;
}

}  // namespace

int main(int argc, char **argv) {
  const Options options = parse(argc, argv);
  std::vector<size_t> sizes, counts;
  for (const std::string &kib : split(options.kib)) sizes.push_back(std::strtoul(kib.c_str(), nullptr, 10) << 10);
  for (const std::string &n : split(options.inputs)) counts.push_back(std::strtoul(n.c_str(), nullptr, 10));
  const size_t most_inputs = *std::max_element(counts.begin(), counts.end());
  // A page and a line between buffers: equal offsets in their pages would let loads wait for stores to another buffer.
  const size_t most = *std::max_element(sizes.begin(), sizes.end()) + 4096 + 64;
  std::vector<char> storage(most * (most_inputs + 1) + 64, 0);
  char *const memory = storage.data() + (64 - reinterpret_cast<uintptr_t>(storage.data()) % 64) % 64;
  Writer *const writer = options.remote ? new Writer : nullptr;
  if (options.remote) pin(0);
  std::FILE *json = options.json != nullptr ? std::fopen(options.json, "w") : nullptr;
  if (json != nullptr)
    std::fprintf(json, "{\"unit\": \"GB/s\", \"remote\": %s, \"rounds\": %d, \"active_isa\": \"%s\", \"rows\": [",
                 options.remote ? "true" : "false", options.rounds, phx::kernels::active_isa());
  const char *comma = "";

  for (size_t each : sizes) {
    const size_t stride = each + 4096 + 64;
    std::vector<Way> ways;
    char *const second = memory + stride;
    const bool avx512 = has_avx512();
    (void)avx512;
#if defined(__x86_64__)
    const auto read = avx512 ? read_avx512 : read_plain;
    const auto copy = avx512 ? copy_avx512 : copy_plain;
#else
    const auto read = read_plain;
    const auto copy = copy_plain;
#endif
    ways.push_back({"read", "", 1, [=] { read(memory, each); }, true});
    ways.push_back({"copy", "", 1, [=] { copy(second, memory, each); }, true});
    ways.push_back({"copy non-temporal", "", 1, [=] { copy_nontemporal(second, memory, each); }, true});
    ways.push_back({"memcpy", "", 1,
                    [=] {
                      std::memcpy(second, memory, each);
                      asm volatile("" ::: "memory");
                    },
                    false});
    ways.push_back({"copy_wide", "", 1, [=] { phx::kernels::copy_for(CopyUse::kAny, second, memory, each); }, false});
    ways.push_back(
        {"copy_streaming", "", 1, [=] { phx::kernels::copy_for(CopyUse::kAroundCache, second, memory, each); }, false});
    for (const Name &dtype : kDtypes)
      for (const Name &op : kOps)
        for (const char *isa : kIsas)
          for (size_t n : counts)
            for (bool streaming : {false, true}) {
              if (!wanted(options.dtypes, dtype.name) || !wanted(options.ops, op.name) || !wanted(options.isas, isa))
                continue;
              const ReduceFn plain = phx::kernels::find_reduce_isa(isa, dtype.value, op.value);
              const ReduceFn fn = phx::kernels::find_reduce_isa(isa, dtype.value, op.value,
                                                                streaming ? Results::kStreamed : Results::kStored);
              if (fn == nullptr || (streaming && fn == plain)) continue;
              std::vector<const void *> in;
              for (size_t k = 0; k < n; ++k) in.push_back(memory + k * stride);
              char *const out = memory + n * stride;
              const int inputs = static_cast<int>(n);
              const size_t elements = each / phx_dtype_size(dtype.value);
              ways.push_back({std::string(dtype.name) + " " + op.name + (streaming ? " streaming" : ""), isa, inputs,
                              [=] { fn(out, in.data(), inputs, elements, inputs, 0.5); }, false});
            }

    for (int round = 0; round < options.rounds; ++round)
      for (size_t i = 0; i < ways.size(); ++i) {
        Way &way = ways[(i + static_cast<size_t>(round)) % ways.size()];
        way.rates.push_back(turn(way, each, writer, memory, stride));
      }

    double limit = 0;
    for (Way &way : ways)
      if (way.is_limit) limit = std::max(limit, way.median());
    std::printf("\n%zu KiB each%s; limit %.1f GB/s\n%-24s%-8s%6s%10s%10s\n", each >> 10,
                options.remote ? ", written by another core" : "", limit, "", "isa", "inputs", "GB/s", "of limit");
    for (Way &way : ways) {
      const double rate = way.median();
      std::printf("%-24s%-8s%6d%10.1f%9.0f%%\n", way.what.c_str(), way.isa.c_str(), way.inputs, rate,
                  100 * rate / limit);
      if (json != nullptr)
        std::fprintf(json,
                     "%s\n  {\"what\": \"%s\", \"isa\": \"%s\", \"inputs\": %d, \"bytes_each\": %zu, "
                     "\"median\": %.2f, \"least\": %.2f, \"most\": %.2f, \"of_limit\": %.3f}",
                     comma, way.what.c_str(), way.isa.c_str(), way.inputs, each, rate, way.rates.front(),
                     way.rates.back(), rate / limit);
      comma = ",";
    }
    std::fflush(stdout);
  }
  if (json != nullptr) {
    std::fprintf(json, "\n]}\n");
    std::fclose(json);
  }
  delete writer;
  return 0;
}
