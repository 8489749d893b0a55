// How tensors are split among ranks: by rows, the indices of dim 0.
#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "call.h"

namespace phxt {

inline int64_t rows_of(const Operand &in) { return in.dims == 0 ? 1 : in.sizes[0]; }  // a 0-d tensor counts as one row

// The rows that each rank gets.
inline int64_t rows_per_rank(const Call &call, const Operand &input) {
  if (input.dims == 0) call.refuse("the input has no dims, so it cannot be split; give a tensor of at least one dim");
  if (input.sizes[0] % call.group->size != 0)
    call.refuse("dim 0 has size " + std::to_string(input.sizes[0]) + ", which is not divisible by the group size " +
                std::to_string(call.group->size) + "; pad it, split another dim, or use reduce_scatter_v");
  return input.sizes[0] / call.group->size;
}

inline int64_t sum_of(const std::vector<int64_t> &rows) {
  return std::accumulate(rows.begin(), rows.end(), INT64_C(0));
}

// Refuses a list that has not one size for each rank.
inline std::vector<int64_t> check_sizes(const Call &call, std::vector<int64_t> sizes, const char *name = "sizes") {
  if (sizes.size() != static_cast<size_t>(call.group->size))
    call.refuse(std::string(name) + " has " + std::to_string(sizes.size()) + " entries, but the group has " +
                std::to_string(call.group->size) + " ranks");
  for (const int64_t size : sizes)
    if (size < 0) call.refuse(std::string(name) + " has the negative entry " + std::to_string(size));
  return sizes;
}

// Rows of dim 0 for each rank. An empty list is an even split.
inline std::vector<int64_t> check_splits(const Call &call, const char *name, std::vector<int64_t> splits,
                                         int64_t rows) {
  const auto ranks = static_cast<size_t>(call.group->size);
  if (splits.empty()) {
    if (rows % call.group->size != 0)
      call.refuse("dim 0 has size " + std::to_string(rows) + ", which is not divisible by the group size " +
                  std::to_string(ranks) + "; give " + name);
    return std::vector<int64_t>(ranks, rows / call.group->size);
  }
  return check_sizes(call, std::move(splits), name);
}

// Refuses splits of a tensor that do not add up to the size of the dim.
inline void check_sum(const Call &call, const char *name, int64_t sum, int64_t size, int64_t dim) {
  if (sum != size)
    call.refuse(std::string(name) + " add up to " + std::to_string(sum) + ", but dim " + std::to_string(dim) +
                " of the input has size " + std::to_string(size));
}

inline std::vector<size_t> in_elements(const std::vector<int64_t> &rows, const Operand &like) {
  std::vector<size_t> counts;
  counts.reserve(rows.size());
  const size_t row = static_cast<size_t>(like.numel_of_row()) * like.type.lanes;
  for (const int64_t count : rows) counts.push_back(static_cast<size_t>(count) * row);
  return counts;
}

}  // namespace phxt
