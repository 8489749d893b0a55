// Which of the candidates copies what: a plan, chosen by measuring (group/measure_copies.h), else by the features of
// the processor. It decides about speed alone, so ranks and threads may hold different plans for a moment.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <string>

#include "base/sanitizers.h"
#include "base/ticks.h"
#include "kernels/rivals.h"

namespace phx::kernels {

// The rows of the table in copy.cpp.
enum class Copy : uint8_t {
  kMemcpy,
  kPages,        // four pages side by side (pages.h)
  kLines,        // in the order of the lines, with one AVX-512 store for each
  kString,       // rep movsb
  kStream,       // stores that bypass the cache, four pages side by side
  kStreamLines,  // the same with one AVX-512 store for each line
};
inline constexpr size_t kCopyCount = 6;

enum class CopyUse : uint8_t {
  kAny,             // into slots that are exchanged, out of slots, within a rank
  kPutOneWay,       // into a slot that others only read; where to begin, see Rivals
  kReadOneWay,      // out of such a slot
  kAroundCache,     // results that would not stay in the cache until they are read; likewise from kSlotBytes on
  kExchange,        // both copies of an exchange; kPages: in one pass over the slot
  kExchangeAround,  // the same where the result would not stay in the cache; kPages: with stores that
                    // bypass it; likewise
};
inline constexpr size_t kCopyUses = 6;

// Below kSmallCopyBytes every copy is memcpy, inlined by the caller.
inline constexpr size_t kSmallCopyBytes = size_t{16} << 10;
inline constexpr size_t kCopyClasses = 3;
inline size_t copy_class(size_t size) { return size_t{size >= size_t{96} << 10} + size_t{size > size_t{256} << 10}; }

#if defined(__x86_64__) && !defined(PHX_SANITIZED)  // sanitizers slow some candidates more than others
inline constexpr bool kMeasuresCopies = true;
#else
inline constexpr bool kMeasuresCopies = false;
#endif

struct CopyPlan {
  Copy of[kCopyUses][kCopyClasses];
  Copy &at(CopyUse use, size_t of_class) { return of[static_cast<size_t>(use)][of_class]; }
  Copy at(CopyUse use, size_t of_class) const { return of[static_cast<size_t>(use)][of_class]; }
};

enum class CopyOrigin : uint8_t { kFeatures, kKept, kMeasured };  // kKept: measured earlier since the host was booted

// Whether this processor and build have the candidate, and it may serve that use.
bool copy_is_for(Copy copy, CopyUse use);
bool is_usable(const CopyPlan &plan);  // on this processor; the plan may come from a peer
// The plan for a processor with these features, of which nothing was measured.
CopyPlan plan_by_features();

// The plan of this process and where it came from. Loads and stores are relaxed.
CopyPlan current_plan();
CopyOrigin copy_origin();
void use_plan(const CopyPlan &plan, CopyOrigin origin);

// A plan as words: "any" -> "memcpy,pages,string". False: some word is missing, or names what cannot be used here.
std::map<std::string, std::string> words_of_plan(const CopyPlan &plan);
bool plan_of_words(const std::map<std::string, std::string> &words, CopyPlan *out);

// Copies with that candidate, which copy_is_for allows for some use. Later stores are not reordered before it.
void copy_with(Copy copy, void *to, const void *from, size_t size);
// An exchange (kernels.h) with that candidate for CopyUse::kExchange, or kExchangeAround if it is `streaming`.
void exchange_with(Copy copy, void *out, void *slot, const void *next, size_t size, bool streaming);

extern std::atomic<Copy> chosen_copies[kCopyUses][kCopyClasses];
inline Copy chosen_copy(CopyUse use, size_t size) {
  return chosen_copies[static_cast<size_t>(use)][copy_class(size)].load(std::memory_order_relaxed);
}

// Runs `run` with the one of two candidates that has been faster lately for copies of that use and size.
extern Rivals rivals[kCopyUses][kCopyClasses];
template <class Run>
void run_faster(CopyUse use, size_t size, Copy first, Copy second, const Run &run) {
  Rivals &both = rivals[static_cast<size_t>(use)][copy_class(size)];
  const Rivals::Turn turn = both.next();
  const uint64_t begin = ticks();
  run(turn.second ? second : first);
  both.took(turn, ((ticks() - begin) << 10) / size);
}

}  // namespace phx::kernels
