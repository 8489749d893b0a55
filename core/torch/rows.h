// How tensors are dealt to ranks: by rows, the indices of dim 0.
#pragma once

#include "call.h"

namespace phxt {

inline int64_t rows_of(const Operand &in) { return in.dims == 0 ? 1 : in.sizes[0]; }  // a 0-d tensor counts as one row

// The rows that each rank gets.
inline int64_t rows_per_rank(const Call &call, const Operand &input) {
  if (input.dims == 0) call.refuse("input has no dimension to scatter along; it must have at least one");
  if (input.sizes[0] % call.group->size != 0)
    call.refuse("input dimension 0 has size " + std::to_string(input.sizes[0]) +
                ", which must be a multiple of group_size " + std::to_string(call.group->size));
  return input.sizes[0] / call.group->size;
}

}  // namespace phxt
