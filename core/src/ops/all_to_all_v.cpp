// all_to_all with a count per pair of ranks.
//
// Round 0 publishes each rank's counts; then everybody knows the whole matrix, checks that both sides of every pair
// agree (so that all ranks fail alike if not), and derives how many rounds of data follow.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "group/lane.h"
#include "ops/operation.h"

namespace phx {
namespace {

class AllToAllV final : public Operation {
 public:
  AllToAllV(const Plan &plan, const Buffers &buffers, const size_t *in_counts, const size_t *out_counts)
      : Operation(buffers, total(in_counts, plan.lane.group_size()) * buffers.item),
        n_(plan.lane.group_size()),
        self_(plan.lane.group_rank()),
        in_counts_(in_counts, in_counts + n_),
        out_counts_(out_counts, out_counts + n_) {
    rounds = 2;  // at least, until round 0 tells: nothing may be started behind it before then
    segment_ = elements_in(plan.lane.slot_bytes() / n_, b_.item);
    in_starts_ = starts(in_counts_);
    out_starts_ = starts(out_counts_);
  }

  bool takes_input_at_once() const override { return false; }  // data moves only after round 0

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *slot = lane.data(self_, epoch);
    if (round == 0) {
      for (int i = 0; i < n_; ++i) {
        const uint64_t pair[2] = {in_counts_[i], out_counts_[i]};
        std::memcpy(slot + i * sizeof pair, pair, sizeof pair);
      }
      kernels::demote(slot, n_ * 2 * sizeof(uint64_t));
      return;
    }
    for (int to = 0; to < n_; ++to) {
      const size_t done = (round - 1) * segment_;
      put_bytes(slot + to * segment_ * b_.item, b_.in + (in_starts_[to] + done) * b_.item,
                length(in_counts_[to], round) * b_.item);
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) return read_counts(lane, epoch);
    const size_t done = (round - 1) * segment_;
    for (int i = 0; i < n_; ++i) {
      const int from = (self_ + i) % n_;
      copy_bytes(b_.out + (out_starts_[from] + done) * b_.item, lane.data(from, epoch) + self_ * segment_ * b_.item,
                 length(out_counts_[from], round) * b_.item);
    }
    return PHX_OK;
  }

 private:
  static size_t total(const size_t *counts, int n) {
    size_t sum = 0;
    for (int i = 0; i < n; ++i) sum += counts[i];
    return sum;
  }
  static std::vector<size_t> starts(const std::vector<size_t> &counts) {
    std::vector<size_t> result(counts.size());
    for (size_t i = 1; i < counts.size(); ++i) result[i] = result[i - 1] + counts[i - 1];
    return result;
  }

  size_t length(size_t count, uint32_t round) const {
    const size_t done = (round - 1) * segment_;
    return count > done ? std::min(segment_, count - done) : 0;
  }

  uint64_t published_count(const Lane &lane, uint64_t epoch, int rank, int peer, int side) const {
    uint64_t value;
    std::memcpy(&value, lane.data(rank, epoch) + (peer * 2 + side) * sizeof value, sizeof value);
    return value;
  }

  phx_status read_counts(const Lane &lane, uint64_t epoch) {
    uint64_t most = 0;
    for (int from = 0; from < n_; ++from) {
      for (int to = 0; to < n_; ++to) {
        const uint64_t sent = published_count(lane, epoch, from, to, 0);
        const uint64_t expected = published_count(lane, epoch, to, from, 1);
        if (sent != expected)
          return fail(PHX_ERR_MISMATCH, "all_to_all_v",
                      "all_to_all_v: group rank %d sends %" PRIu64 " elements to group rank %d, which expects %" PRIu64
                      ". in_counts[j] on rank i must equal out_counts[i] on rank j.",
                      from, sent, to, expected);
        most = std::max(most, sent);
      }
    }
    if (most / segment_ >= UINT32_MAX)
      return fail(PHX_ERR_MISMATCH, "all_to_all_v", "all_to_all_v: a count of %" PRIu64 " is more than memory can hold",
                  most);
    rounds = 1 + static_cast<uint32_t>((most + segment_ - 1) / segment_);
    return PHX_OK;
  }

  const int n_;
  const int self_;
  const std::vector<size_t> in_counts_, out_counts_;
  std::vector<size_t> in_starts_, out_starts_;
  size_t segment_ = 0;  // elements of a slot for each rank
};

}  // namespace

OperationPtr make_all_to_all_v(const Plan &plan, const Buffers &buffers, const size_t *in_counts,
                               const size_t *out_counts) {
  return std::make_unique<AllToAllV>(plan, buffers, in_counts, out_counts);
}

}  // namespace phx
