// The parts of the ranks in a contiguous tensor along any of its dims. Along dim 0 they lie one after another; along
// another dim each lies in rows, with those of the others in between.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace phxt {

class Parts {
 public:
  // One of `sizes` for each rank, along `dim` of a tensor whose other sizes are those of `like`. Refuses what does not
  // fit; `name` is that of the argument that has the sizes.
  Parts(const Call &call, const Operand &like, int64_t dim, std::vector<int64_t> sizes, const char *name = "sizes");

  int64_t sum() const { return sum_; }                                  // the size of the dim
  int64_t numel(int64_t size) const { return outer_ * size * inner_; }  // of a part, or of the whole
  std::vector<int64_t> shape(const Operand &like, int64_t size) const;  // with that size of the dim
  // Refuses sizes that say something else of this rank than `name`, which is `own`.
  void check_own(const Call &call, int64_t own, const std::string &name) const;

  bool are_even() const;
  bool one_after_another() const { return outer_ <= 1; }
  // Whether the core reads and writes them where they lie. On GPUs it cannot, and short rows torch copies faster.
  bool are_blocks(int32_t gpu) const { return one_after_another() || (gpu == kHost && !rows_are_short()); }
  std::vector<size_t> counts() const;  // of each part, in elements of the core
  std::vector<phx_block> blocks(const void *whole) const;
  std::vector<phx_block> flat_blocks(const void *flat) const;  // one after another
  // Copies parts that lie one after another in `flat` to their places in the whole tensor, and back.
  void place(const Operand &flat, const Operand &whole) const { move(flat, whole, true); }
  void collect(const Operand &whole, const Operand &flat) const { move(flat, whole, false); }

 private:
  bool rows_are_short() const;
  std::vector<phx_block> blocks_at(const void *data, bool in_rows) const;
  void move(const Operand &flat, const Operand &whole, bool to_whole) const;

  const char *const name_;
  const int64_t dim_;
  const std::vector<int64_t> sizes_;
  int64_t outer_ = 1, inner_ = 1, sum_ = 0;
  ElementType type_;
};

}  // namespace phxt
