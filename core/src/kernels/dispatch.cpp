// Chooses the instruction set of the reductions and of the random elements once, from what the processor and the
// operating system offer.
#include <cstring>

#if defined(PHX_VECTOR_KERNELS) && defined(__x86_64__)
#include <cpuid.h>
#endif

#include "base/environment.h"
#include "kernels/random.h"
#include "kernels/select.h"

namespace phx::kernels {
namespace {

struct Isa {
  const char *name;
  ReduceFn (*find)(int32_t dtype, int32_t op, Results results);
  random::FillFn (*find_fill)(int32_t kind, int32_t dtype);
  bool (*available)();
};

bool always() { return true; }

#if defined(PHX_VECTOR_KERNELS) && defined(__x86_64__)
// Each function checks all features that the compiler may use in that file; see the flags in core/CMakeLists.txt.
bool has_f16c() {  // not every compiler's __builtin_cpu_supports knows it
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
}
bool has_avx2() {
  static const bool f16c = has_f16c();  // asked once: a virtual machine traps the instruction
  __builtin_cpu_init();
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

constexpr Isa kIsas[] = {  // the best first
#if defined(PHX_VECTOR_KERNELS) && defined(__x86_64__)
    {"avx512", &find_avx512, &random::find_avx512, &has_avx512},
    {"avx2", &find_avx2, &random::find_avx2, &has_avx2},
#elif defined(PHX_VECTOR_KERNELS) && defined(__aarch64__)
    {"neon", &find_neon, &random::find_scalar, &always},  // the compiler vectorizes the random elements
#endif
    {"scalar", &find_scalar, &random::find_scalar, &always}};

// The best available instruction set; if PHALANX_ISA names one, the best from that one on, to test the others or to
// rule out a kernel.
const Isa &choose() {
  const char *limit = read_variable<variable("PHALANX_ISA")>();
  const Isa *isa = kIsas;
  for (const Isa &candidate : kIsas)
    if (limit != nullptr && std::strcmp(candidate.name, limit) == 0) isa = &candidate;
  while (!isa->available()) ++isa;
  return *isa;
}

const Isa &active() {
  static const Isa &chosen = choose();
  return chosen;
}

const Isa *available(const char *name) {
  for (const Isa &candidate : kIsas)
    if (std::strcmp(candidate.name, name) == 0) return candidate.available() ? &candidate : nullptr;
  return nullptr;
}

}  // namespace

ReduceFn find_reduce(int32_t dtype, int32_t op, Results results) { return active().find(dtype, op, results); }

ReduceFn find_reduce_isa(const char *isa, int32_t dtype, int32_t op, Results results) {
  const Isa *usable = available(isa);
  return usable != nullptr ? usable->find(dtype, op, results) : nullptr;
}

const char *active_isa() { return active().name; }

std::string isa_problem() {
  const char *const limit = read_variable<variable("PHALANX_ISA")>();
  if (limit == nullptr || *limit == '\0' || std::strcmp(limit, active_isa()) == 0) return "";
  std::string known;
  for (const Isa &candidate : kIsas) known += (known.empty() ? "" : ", ") + std::string(candidate.name);
  return std::string("PHALANX_ISA is '") + limit +
         "', which this processor or this build does not have; this build knows " + known + ". '" + active_isa() +
         "' is used.";
}

}  // namespace phx::kernels

namespace phx::random {

FillFn find_fill(int32_t kind, int32_t dtype) { return kernels::active().find_fill(kind, dtype); }

FillFn find_fill_isa(const char *isa, int32_t kind, int32_t dtype) {
  const kernels::Isa *usable = kernels::available(isa);
  return usable != nullptr ? usable->find_fill(kind, dtype) : nullptr;
}

}  // namespace phx::random
