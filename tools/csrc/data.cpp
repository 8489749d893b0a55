#include "data.h"

#include <cstring>

namespace phxb {
namespace {

// A few bits of a multiplicative hash (Knuth, The Art of Computer Programming 3, 6.4): cheap enough for vector
// instructions, and without a period that a misplaced block could hit.
inline uint32_t value_of(uint64_t element, uint32_t phase, int shift) {
  return (static_cast<uint32_t>(element) * 0x9E3779B1u + phase) >> shift;
}

uint32_t phase_of(int rank, uint64_t iteration) {
  return (static_cast<uint32_t>(iteration) * 0x85EBCA77u) ^ (static_cast<uint32_t>(rank + 1) * 0xC2B2AE3Du);
}

// A bfloat16 holds the integers up to 256, and no sum over the ranks may be greater.
int shift_of(int ranks) {
  int bits = 1;
  while (bits < 5 && ((2 << bits) - 1) * ranks <= 256) ++bits;
  return 32 - bits;
}

struct F32 {
  using Stored = float;
  static Stored store(uint32_t value) { return static_cast<float>(value); }
  static double load(Stored stored) { return static_cast<double>(stored); }
};

struct BF16 {
  using Stored = uint16_t;
  static Stored store(uint32_t value) {
    const float wide = static_cast<float>(value);
    uint32_t bits;
    std::memcpy(&bits, &wide, sizeof bits);
    return static_cast<Stored>(bits >> 16);  // exact: small integers
  }
  static double load(Stored stored) {
    const uint32_t bits = static_cast<uint32_t>(stored) << 16;
    float wide;
    std::memcpy(&wide, &bits, sizeof wide);
    return static_cast<double>(wide);
  }
};

// Where the block for or from a rank begins.
uint64_t place_of(const phxb_plan &plan, int rank) { return (plan.count + plan.gap) * static_cast<uint64_t>(rank); }

template <class T>
void fill_as(const phxb_plan &plan, uint64_t iteration, int blocks) {
  const uint32_t phase = phase_of(plan.rank, iteration);
  const int shift = shift_of(plan.ranks);
  for (int block = 0; block < blocks; ++block) {
    auto *in = static_cast<typename T::Stored *>(plan.in) + place_of(plan, block);
    const uint64_t first = plan.count * static_cast<uint64_t>(block);
    for (uint64_t i = 0; i < plan.count; ++i) in[i] = T::store(value_of(first + i, phase, shift));
  }
}

// out[0 .. count) must hold the elements from `first` on of the input of each rank in [from, to), summed.
template <class T>
int32_t compare(const phxb_plan &plan, const typename T::Stored *out, uint64_t offset, uint64_t count, uint64_t first,
                int from, int to, uint64_t iteration, phxb_failure *failure) {
  const int shift = shift_of(plan.ranks);
  uint32_t phases[PHXB_MAX_RANKS];
  for (int rank = from; rank < to; ++rank) phases[rank] = phase_of(rank, iteration);
  constexpr uint64_t kBlock = 1024;  // so that the sums stay in the first-level cache
  uint32_t sums[kBlock];
  for (uint64_t start = 0; start < count; start += kBlock) {
    const uint64_t length = count - start < kBlock ? count - start : kBlock;
    std::memset(sums, 0, sizeof sums);
    for (int rank = from; rank < to; ++rank)
      for (uint64_t i = 0; i < length; ++i) sums[i] += value_of(first + start + i, phases[rank], shift);
    const auto *seen = out + offset + start;
    uint32_t wrong = 0;
    for (uint64_t i = 0; i < length; ++i) wrong |= T::store(sums[i]) != seen[i] ? 1u : 0u;
    for (uint64_t i = 0; wrong && i < length; ++i) {
      if (T::store(sums[i]) == seen[i]) continue;
      if (failure != nullptr) {
        failure->index = offset + start + i;
        failure->expected = sums[i];
        failure->seen = T::load(seen[i]);
      }
      return PHXB_WRONG_RESULT;
    }
  }
  return PHXB_OK;
}

template <class T>
int32_t check_as(const phxb_plan &plan, uint64_t iteration, phxb_failure *failure) {
  const auto *out = static_cast<const typename T::Stored *>(plan.out);
  const uint64_t count = plan.count, mine = count * static_cast<uint64_t>(plan.rank);
  int32_t status = PHXB_OK;
  switch (plan.collective) {
    case PHXB_ALL_REDUCE: return compare<T>(plan, out, 0, count, 0, 0, plan.ranks, iteration, failure);
    case PHXB_REDUCE_SCATTER: return compare<T>(plan, out, 0, count, mine, 0, plan.ranks, iteration, failure);
    case PHXB_BROADCAST: return compare<T>(plan, out, 0, count, 0, plan.root, plan.root + 1, iteration, failure);
    case PHXB_ALL_GATHER:
    case PHXB_ALL_TO_ALL:
      for (int rank = 0; rank < plan.ranks && status == PHXB_OK; ++rank)
        status = compare<T>(plan, out, place_of(plan, rank), count, plan.collective == PHXB_ALL_TO_ALL ? mine : 0, rank,
                            rank + 1, iteration, failure);
      return status;
    default: return PHXB_OK;
  }
}

}  // namespace

bool valid(const phxb_plan &plan) {
  if (plan.struct_size != sizeof plan || plan.collective < PHXB_ALL_REDUCE || plan.collective > PHXB_BARRIER)
    return false;
  if (plan.dtype != PHXB_F32 && plan.dtype != PHXB_BF16) return false;
  if (plan.ranks < 1 || plan.ranks > PHXB_MAX_RANKS || plan.rank < 0 || plan.rank >= plan.ranks) return false;
  if (plan.root < 0 || plan.root >= plan.ranks) return false;
  return plan.collective == PHXB_BARRIER || plan.count == 0 || (plan.in != nullptr && plan.out != nullptr);
}

void fill(const phxb_plan &plan, uint64_t iteration) {
  int blocks = 1;
  switch (plan.collective) {
    case PHXB_BARRIER: return;
    case PHXB_BROADCAST:
      if (plan.rank != plan.root) return;  // what is there is the result of another iteration: wrong until overwritten
      break;
    case PHXB_REDUCE_SCATTER:
    case PHXB_ALL_TO_ALL: blocks = plan.ranks; break;
    default: break;
  }
  plan.dtype == PHXB_F32 ? fill_as<F32>(plan, iteration, blocks) : fill_as<BF16>(plan, iteration, blocks);
}

int32_t check(const phxb_plan &plan, uint64_t iteration, phxb_failure *failure) {
  return plan.dtype == PHXB_F32 ? check_as<F32>(plan, iteration, failure) : check_as<BF16>(plan, iteration, failure);
}

void corrupt(const phxb_plan &plan) {
  if (plan.collective == PHXB_BARRIER || plan.count == 0) return;
  const size_t size = plan.dtype == PHXB_F32 ? 4 : 2;
  static_cast<unsigned char *>(plan.out)[(plan.count - 1) * size] ^= 0x40;
}

}  // namespace phxb
