// The parts of the ranks in a contiguous tensor along any of its dims. Along dim 0 they lie one after another; along
// another dim each lies in rows, with those of the others in between.
#pragma once

#include <vector>

#include "call.h"

namespace phxt {

class Parts {
 public:
  // One of `sizes` for each rank, along `dim` of a tensor that has the other sizes of `like`. Refuses what does not
  // fit.
  Parts(const Call &call, const Operand &like, int64_t dim, std::vector<int64_t> sizes);

  int64_t sum() const { return sum_; }                                  // the size of the dim
  int64_t numel(int64_t size) const { return outer_ * size * inner_; }  // of a part, or of the whole
  std::vector<int64_t> shape(const Operand &like, int64_t size) const;  // with that size of the dim
  // Refuses sizes that say something else of this rank than `name`, which is `own`.
  void check_own(const Call &call, int64_t own, const std::string &name) const;

  bool one_after_another() const { return outer_ <= 1; }
  // Whether torch copies parts faster than the core reads or writes them row by row.
  bool rows_are_short() const;
  std::vector<size_t> counts() const;  // of each part, in elements of the core
  std::vector<phx_block> blocks(const Operand &whole) const;
  // Copies parts that lie one after another in `flat` to their places in the whole tensor, and back.
  void place(const Operand &flat, const Operand &whole) const { move(flat, whole, true); }
  void collect(const Operand &whole, const Operand &flat) const { move(flat, whole, false); }

 private:
  void move(const Operand &flat, const Operand &whole, bool to_whole) const;

  const int64_t dim_;
  const std::vector<int64_t> sizes_;
  int64_t outer_ = 1, inner_ = 1, sum_ = 0;
  ElementType type_;
};

}  // namespace phxt
