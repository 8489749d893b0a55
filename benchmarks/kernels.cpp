// Speed of the reduction kernels on one core, next to memcpy: GB/s per dtype, op, instruction set, number of inputs and
// size.
//
//   g++ -std=gnu++17 -O3 -ffp-contract=off -Icore/include -Icore/src -c core/src/kernels/dispatch.cpp
//   core/src/kernels/reduce_scalar.cpp g++ -std=gnu++17 -O3 -ffp-contract=off -mavx2 -mfma -mf16c -Icore/include
//   -Icore/src -c core/src/kernels/reduce_avx2.cpp g++ -std=gnu++17 -O3 -ffp-contract=off -mavx512f -mavx512bw
//   -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512
//       -Icore/include -Icore/src -c core/src/kernels/reduce_avx512.cpp
//   g++ -std=gnu++17 -O3 -Icore/include -Icore/src benchmarks/kernels.cpp dispatch.o reduce_*.o -o kernels
//   ./kernels [DTYPE [OP [ISA]]]      for example: ./kernels bf16 sum avx512; "all" for any; without arguments a
//   selection
//
// A GB is 10^9 bytes read or written by the call: n inputs and one output; for memcpy one and one. The three sizes are
// those of all buffers together: one that fits in the first-level cache, one in the second, and one in neither.
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels/kernels.h"

namespace {

struct Name {
  const char *name;
  int32_t value;
  size_t bytes;
  bool selected;
};
constexpr Name kDtypes[] = {{"f16", PHX_F16, 2, true},  {"bf16", PHX_BF16, 2, true}, {"f32", PHX_F32, 4, true},
                            {"f64", PHX_F64, 8, false}, {"i8", PHX_I8, 1, false},    {"u8", PHX_U8, 1, false},
                            {"i16", PHX_I16, 2, false}, {"u16", PHX_U16, 2, false},  {"i32", PHX_I32, 4, true},
                            {"u32", PHX_U32, 4, false}, {"i64", PHX_I64, 8, false},  {"u64", PHX_U64, 8, false},
                            {"bool", PHX_BOOL, 1, true}};
constexpr Name kOps[] = {
    {"sum", PHX_SUM, 0, true},  {"avg", PHX_AVG, 0, true},    {"prod", PHX_PROD, 0, false},
    {"min", PHX_MIN, 0, false}, {"max", PHX_MAX, 0, true},    {"band", PHX_BAND, 0, false},
    {"bor", PHX_BOR, 0, false}, {"bxor", PHX_BXOR, 0, false}, {"premul_sum", PHX_PREMUL_SUM, 0, false}};
constexpr const char *kIsas[] = {"scalar", "avx2", "avx512"};
constexpr int kInputs[] = {2, 3, 4, 8};
constexpr size_t kFootprints[] = {24 << 10, 1 << 20, 512 << 20};

double now() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

// The best of several runs of some milliseconds each: other work on the machine only ever makes it slower.
template <class Body>
double gigabytes_per_second(size_t bytes, Body &&body) {
  size_t calls = 1;
  double best = 0;
  for (int run = 0; run < 7; ++run) {
    const double start = now();
    for (size_t i = 0; i < calls; ++i) body();
    const double took = now() - start;
    const double rate = 1e-9 * static_cast<double>(bytes) * static_cast<double>(calls) / took;
    if (rate > best) best = rate;
    if (took < 4e-3) calls = calls * static_cast<size_t>(5e-3 / (took + 1e-7) + 1);
  }
  return best;
}

void row(const char *dtype, const char *op, const char *isa, int n) {
  std::printf("%-6s%-11s%-8s%3d", dtype, op, isa, n);
}

bool wanted(const Name &name, const char *argument) {
  if (argument == nullptr) return name.selected;
  return std::strcmp(argument, "all") == 0 || std::strcmp(argument, name.name) == 0;
}

}  // namespace

int main(int argc, char **argv) {
  const char *dtype_wish = argc > 1 ? argv[1] : nullptr, *op_wish = argc > 2 ? argv[2] : nullptr;
  const char *isa_wish = argc > 3 && std::strcmp(argv[3], "all") != 0 ? argv[3] : nullptr;
  // A page between buffers: equal offsets in their pages would let a load wait for the store to another buffer.
  std::vector<char> memory(kFootprints[2] + 64 * 4096, 0);
  std::printf("%-6s%-11s%-8s%3s", "dtype", "op", "isa", "n");
  for (size_t footprint : kFootprints) std::printf("%9zu KiB", footprint >> 10);
  std::printf("   (GB/s; active: %s)\n", phx::kernels::active_isa());

  row("", "memcpy", "", 1);
  for (size_t footprint : kFootprints) {
    const size_t bytes = footprint / 2;
    std::printf("%13.1f", gigabytes_per_second(2 * bytes, [&] {
                  std::memcpy(memory.data() + bytes + 4160, memory.data(), bytes);
                  asm volatile("" ::: "memory");
                }));
  }
  std::printf("\n");

  for (const Name &dtype : kDtypes)
    for (const Name &op : kOps)
      for (const char *isa : kIsas)
        for (int n : kInputs) {
          const phx::kernels::ReduceFn fn = phx::kernels::find_reduce_isa(isa, dtype.value, op.value);
          if (fn == nullptr || !wanted(dtype, dtype_wish) || !wanted(op, op_wish)) continue;
          if (isa_wish != nullptr && std::strcmp(isa, isa_wish) != 0) continue;
          row(dtype.name, op.name, isa, n);
          for (size_t footprint : kFootprints) {
            const size_t bytes = footprint / static_cast<size_t>(n + 1) / 64 * 64;
            std::vector<const void *> in;
            for (int k = 0; k <= n; ++k) in.push_back(memory.data() + static_cast<size_t>(k) * (bytes + 4096 + 64));
            char *out = memory.data() + static_cast<size_t>(n) * (bytes + 4096 + 64);
            std::printf("%13.1f", gigabytes_per_second(bytes * static_cast<size_t>(n + 1),
                                                       [&] { fn(out, in.data(), n, bytes / dtype.bytes, n, 0.5); }));
            std::fflush(stdout);
          }
          std::printf("\n");
        }
  return 0;
}
