// Where the ranks' blocks lie in a buffer, and the counts of an all_to_all_v.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "ops/operation.h"

namespace phx {

// The blocks of `n` ranks, one after another in a buffer; all values are in elements. With one count for all ranks the
// starts are computed, and no list is stored.
class Blocks {
 public:
  Blocks(size_t count, int n) : largest_(count), total_(count * n) {}
  Blocks(const size_t *counts, int n) : largest_(*std::max_element(counts, counts + n)), starts_(n + 1) {
    for (int i = 0; i < n; ++i) starts_[i + 1] = starts_[i] + counts[i];
    total_ = starts_[n];
  }
  Blocks(const Buffers &buffers, int n) : Blocks(buffers.count, n) {
    if (buffers.counts != nullptr) *this = Blocks(buffers.counts, n);
  }

  size_t start(int rank) const { return starts_.empty() ? rank * largest_ : starts_[rank]; }
  size_t count(int rank) const { return starts_.empty() ? largest_ : starts_[rank + 1] - starts_[rank]; }
  size_t largest() const { return largest_; }
  size_t total() const { return total_; }

 private:
  size_t largest_;
  size_t total_ = 0;
  std::vector<size_t> starts_;  // empty: one count for all
};

// How many elements every rank of an all_to_all_v sends to every other rank. A rank knows only its own counts, so the
// ranks exchange them through the slots in a separate round.
class CountMatrix {
 public:
  // `name`: the name of the call, for errors. `in` and `out`: the blocks of this rank, which the operation keeps alive.
  CountMatrix(Group &group, const char *name, const Blocks &in, const Blocks &out);

  void put(const Lane &lane, uint64_t epoch) const;
  // Precondition: all ranks have called `put`. Returns an error, the same on all ranks, if a sender's count differs
  // from its receiver's. `room`: if not NULL, how many elements the input of each rank may have.
  phx_status read(const Lane &lane, uint64_t epoch, const std::vector<size_t> *room = nullptr);
  // In elements; valid after `read`.
  size_t sent(int from, int to) const { return matrix_[(from * n_ + to) * 2]; }
  size_t most_sent() const { return most_sent_; }

 private:
  size_t expected(int by, int from) const { return matrix_[(by * n_ + from) * 2 + 1]; }
  phx_status check(const std::vector<size_t> *room);

  Group &group_;
  const char *const name_;
  const int n_, self_;
  const Blocks &in_, &out_;
  std::vector<size_t> matrix_;  // [rank][peer][2]: what `rank` sends to `peer`, and what it expects from it
  size_t most_sent_ = 0;
};

}  // namespace phx
