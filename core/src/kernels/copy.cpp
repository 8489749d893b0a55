// The candidates for large copies, and the plan that says which of them serves what.
//
// No processor's name decides. On some, one string instruction is faster than any loop: its stores need not fetch the
// lines that they fill, nor wait for another core to give them up one after the other. On others loops are faster, and
// stores that bypass the cache fill lines that lie in the caches of others. See docs/explanation/algorithms.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <sstream>

#include "base/sanitizers.h"
#include "kernels/copy_plan.h"
#include "kernels/kernels.h"
#include "kernels/pages.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

namespace phx::kernels {
namespace {

#if defined(__x86_64__)

template <bool kStreaming>
inline void copy_line(char *to, const char *from) {
  const __m128i *line = reinterpret_cast<const __m128i *>(from);
  const __m128i a = _mm_loadu_si128(line), b = _mm_loadu_si128(line + 1);
  const __m128i c = _mm_loadu_si128(line + 2), d = _mm_loadu_si128(line + 3);
  __m128i *target = reinterpret_cast<__m128i *>(to);
  if (kStreaming) {
    _mm_stream_si128(target, a);
    _mm_stream_si128(target + 1, b);
    _mm_stream_si128(target + 2, c);
    _mm_stream_si128(target + 3, d);
  } else {
    _mm_store_si128(target, a);
    _mm_store_si128(target + 1, b);
    _mm_store_si128(target + 2, c);
    _mm_store_si128(target + 3, d);
  }
}

// Copies any number of bytes. Later stores are not reordered before it.
inline size_t copy_string(char *to, const char *from, size_t size) {
  size_t left = size;
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(left) : : "memory");
  return size;
}

// Copies whole lines to an aligned target. Returns how many bytes are done.
template <bool kStreaming>
size_t copy_lines(char *to, const char *from, size_t size) {
  const size_t done = for_lines_by_pages(size, [&](size_t at) { copy_line<kStreaming>(to + at, from + at); });
  if (kStreaming) _mm_sfence();  // streaming stores are not ordered before later stores without it
  return done;
}

// The same in the order of the lines, with one store for each line.
__attribute__((target("avx512f"))) size_t copy_lines_avx512(char *to, const char *from, size_t size) {
  size_t at = 0;
  for (; at + kLine <= size; at += kLine)
    _mm512_store_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
  return at;
}

// The same with stores that bypass the cache, one for each line.
__attribute__((target("avx512f"))) size_t stream_lines_avx512(char *to, const char *from, size_t size) {
  const size_t done = for_lines_by_pages(
      size, [&](size_t at) __attribute__((target("avx512f"))) {
        _mm512_stream_si512(reinterpret_cast<__m512i *>(to + at), _mm512_loadu_si512(from + at));
      });
  _mm_sfence();
  return done;
}

// Copies with `lines`, which copies whole lines to an aligned target and returns how many bytes are done.
template <class Lines>
void copy_aligned(void *to, const void *from, size_t size, const Lines &lines) {
  char *target = static_cast<char *>(to);
  const char *source = static_cast<const char *>(from);
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  if (size < head + kLine) {
    if (size != 0) std::memcpy(target, source, size);
    return;
  }
  std::memcpy(target, source, head);
  target += head, source += head, size -= head;
  const size_t done = lines(target, source, size);
  std::memcpy(target + done, source + done, size - done);
}

template <size_t (*lines)(char *, const char *, size_t)>
void aligned(void *to, const void *from, size_t size) {
  copy_aligned(to, from, size, lines);
}

#endif

void copy_plain(void *to, const void *from, size_t size) {
  if (size != 0) std::memcpy(to, from, size);
}

bool any_processor() { return true; }

constexpr size_t kSlotBytes = size_t{256} << 10;  // a copy of more than this is not from or to a slot

constexpr uint32_t bit(CopyUse use) { return uint32_t{1} << static_cast<uint32_t>(use); }

struct Candidate {
  Copy copy;
  const char *name;
  void (*function)(void *to, const void *from, size_t size);
  bool (*available)();
  uint32_t uses;
};

#if defined(__x86_64__)

bool has_avx512f() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0;
  return has;
}

// FSRM: string instructions that are not slow to start. The processor says so whether or not they beat loops.
bool has_short_strings() {
  static const bool has = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) != 0 && (d & 1u << 4) != 0;
  }();
  return has;
}

#if defined(PHX_SANITIZED)  // sanitizers do not see the accesses of inline assembly
bool has_strings() { return false; }
#else
bool has_strings() { return true; }
#endif

constexpr uint32_t kInCache = bit(CopyUse::kAny) | bit(CopyUse::kPutOneWay) | bit(CopyUse::kReadOneWay);
constexpr uint32_t kExchanges = bit(CopyUse::kExchange) | bit(CopyUse::kExchangeAround);
constexpr uint32_t kAround = bit(CopyUse::kPutOneWay) | bit(CopyUse::kAroundCache);

// Strings may not read what one rank writes again and again and others only read. Now and then, for seconds, some
// processors fall into a state in which such a reader takes twice as long, which no measurement of milliseconds shows.
constexpr Candidate kCandidates[kCopyCount] = {
    {Copy::kMemcpy, "memcpy", &copy_plain, &any_processor, kInCache},
    {Copy::kPages, "pages", &aligned<copy_lines<false>>, &any_processor, kInCache | kExchanges},
    {Copy::kLines, "lines", &aligned<copy_lines_avx512>, &has_avx512f, kInCache},
    {Copy::kString, "string", &aligned<copy_string>, &has_strings,
     bit(CopyUse::kAny) | bit(CopyUse::kPutOneWay) | bit(CopyUse::kAroundCache) | kExchanges},
    {Copy::kStream, "stream", &aligned<copy_lines<true>>, &any_processor, kAround},
    {Copy::kStreamLines, "stream_lines", &aligned<stream_lines_avx512>, &has_avx512f, kAround},
};

#else

constexpr uint32_t kAllUses = (uint32_t{1} << kCopyUses) - 1;
bool never() { return false; }

constexpr Candidate kCandidates[kCopyCount] = {
    {Copy::kMemcpy, "memcpy", &copy_plain, &any_processor, kAllUses},
    {Copy::kPages, "pages", &copy_plain, &never, 0},
    {Copy::kLines, "lines", &copy_plain, &never, 0},
    {Copy::kString, "string", &copy_plain, &never, 0},
    {Copy::kStream, "stream", &copy_plain, &never, 0},
    {Copy::kStreamLines, "stream_lines", &copy_plain, &never, 0},
};

#endif

constexpr const char *kUseNames[kCopyUses] = {"any",          "put_one_way", "read_one_way",
                                              "around_cache", "exchange",    "exchange_around"};

const Candidate &candidate(Copy copy) { return kCandidates[static_cast<size_t>(copy)]; }

std::atomic<CopyOrigin> origin_of_plan{CopyOrigin::kFeatures};

[[maybe_unused]] const bool begins_by_features = (use_plan(plan_by_features(), CopyOrigin::kFeatures), true);

}  // namespace

std::atomic<Copy> chosen_copies[kCopyUses][kCopyClasses];  // memcpy until this library is initialized
Rivals rivals[kCopyUses][kCopyClasses];

bool copy_is_for(Copy copy, CopyUse use) {
  return (candidate(copy).uses & bit(use)) != 0 && candidate(copy).available();
}

bool is_usable(const CopyPlan &plan) {
  for (size_t use = 0; use < kCopyUses; ++use)
    for (const Copy copy : plan.of[use])
      if (static_cast<size_t>(copy) >= kCopyCount || !copy_is_for(copy, static_cast<CopyUse>(use))) return false;
  return true;
}

CopyPlan plan_by_features() {
  CopyPlan plan{};
#if defined(__x86_64__)
  const bool short_strings = has_strings() && has_short_strings(), strings = short_strings && has_avx512f();
  const Copy around = has_avx512f() ? Copy::kStreamLines : Copy::kStream;
  for (size_t i = 0; i < kCopyClasses; ++i) {
    const Copy loop = i == 0 ? Copy::kMemcpy : Copy::kPages;
    plan.at(CopyUse::kAny, i) = strings ? Copy::kString : loop;
    plan.at(CopyUse::kPutOneWay, i) = has_avx512f() ? plan.at(CopyUse::kAny, i) : around;
    plan.at(CopyUse::kReadOneWay, i) = strings ? Copy::kLines : loop;
    plan.at(CopyUse::kAroundCache, i) = short_strings && i == kCopyClasses - 1 ? Copy::kString : around;
    plan.at(CopyUse::kExchange, i) = strings ? Copy::kString : Copy::kPages;
    plan.at(CopyUse::kExchangeAround, i) = short_strings ? Copy::kString : Copy::kPages;
  }
#endif
  return plan;
}

CopyPlan current_plan() {
  CopyPlan plan{};
  for (size_t use = 0; use < kCopyUses; ++use)
    for (size_t i = 0; i < kCopyClasses; ++i) plan.of[use][i] = chosen_copies[use][i].load(std::memory_order_relaxed);
  return plan;
}

CopyOrigin copy_origin() { return origin_of_plan.load(std::memory_order_relaxed); }

void use_plan(const CopyPlan &plan, CopyOrigin origin) {
  for (size_t use = 0; use < kCopyUses; ++use)
    for (size_t i = 0; i < kCopyClasses; ++i) chosen_copies[use][i].store(plan.of[use][i], std::memory_order_relaxed);
  for (auto &of_use : rivals)
    for (Rivals &both : of_use) both.restart();
  origin_of_plan.store(origin, std::memory_order_relaxed);
}

std::map<std::string, std::string> words_of_plan(const CopyPlan &plan) {
  std::map<std::string, std::string> words;
  for (size_t use = 0; use < kCopyUses; ++use)
    for (const Copy copy : plan.of[use]) {
      std::string &word = words[kUseNames[use]];
      word.append(word.empty() ? "" : ",").append(candidate(copy).name);
    }
  return words;
}

bool plan_of_words(const std::map<std::string, std::string> &words, CopyPlan *out) {
  for (size_t use = 0; use < kCopyUses; ++use) {
    const auto word = words.find(kUseNames[use]);
    if (word == words.end()) return false;
    std::istringstream names(word->second);
    std::string name;
    size_t i = 0;
    for (; std::getline(names, name, ','); ++i) {
      const Candidate *found = std::begin(kCandidates);
      while (found != std::end(kCandidates) && name != found->name) ++found;
      if (i == kCopyClasses || found == std::end(kCandidates)) return false;
      if (!copy_is_for(found->copy, static_cast<CopyUse>(use))) return false;
      out->of[use][i] = found->copy;
    }
    if (i != kCopyClasses) return false;
  }
  return true;
}

void copy_with(Copy copy, void *to, const void *from, size_t size) { candidate(copy).function(to, from, size); }

thread_local size_t copied_bytes = 0;

void copy_streaming(void *to, const void *from, size_t size) {
  copied_bytes += size;
  const Copy first = chosen_copy(CopyUse::kAroundCache, size);
  const Copy second = first != Copy::kString ? Copy::kString : chosen_copy(CopyUse::kAroundCache, kSlotBytes);
  if (size <= kSlotBytes || first == second || !copy_is_for(second, CopyUse::kAroundCache))
    return copy_with(first, to, from, size);
  run_faster(CopyUse::kAroundCache, size, first, second, [&](Copy copy) { copy_with(copy, to, from, size); });
}

void copy_wide(void *to, const void *from, size_t size) {
  copied_bytes += size;
  copy_with(chosen_copy(CopyUse::kAny, size), to, from, size);
}

void copy_one_way(void *to, const void *from, size_t size) {
  copied_bytes += size;
  copy_with(chosen_copy(CopyUse::kReadOneWay, size), to, from, size);
}

void put_one_way(void *to, const void *from, size_t size) {
  copied_bytes += size;
  const Copy first = chosen_copy(CopyUse::kPutOneWay, size),
             around = chosen_copy(CopyUse::kAroundCache, std::min(size, kSlotBytes));
  const Copy second = first == around ? chosen_copy(CopyUse::kAny, size) : around;
  if (first == second) return copy_with(first, to, from, size);
  run_faster(CopyUse::kPutOneWay, size, first, second, [&](Copy copy) { copy_with(copy, to, from, size); });
}

}  // namespace phx::kernels
