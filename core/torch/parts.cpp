#include "parts.h"

#include <algorithm>

#include "rows.h"

namespace phxt {
namespace {

constexpr int64_t kShortRow = 32;  // bytes: ADR 57

// `rows` rows of `row` elements in memory that belongs to another tensor.
Tensor view(char *data, int64_t rows, int64_t row, int64_t stride, const Operand &like) {
  const int64_t sizes[] = {rows, row}, strides[] = {stride, 1};
  const int32_t device = like.gpu == kHost ? aoti_torch_device_type_cpu() : aoti_torch_device_type_cuda();
  AtenTensorHandle made = nullptr;
  check_torch(torch_from_blob(
                  data, 2, sizes, strides, 0, like.dtype, device, like.gpu == kHost ? -1 : like.gpu, &made,
                  aoti_torch_layout_strided(), nullptr, 0, [](void *, void *) {}, nullptr),
              "view a tensor");
  return Tensor(made);
}

int64_t checked(const Call &call, const Operand &like, int64_t dim) {
  if (like.dims == 0) call.refuse("the input has no dims, so it has no parts; give a tensor of at least one dim");
  if (dim < 0 || dim >= like.dims)
    call.refuse("dim is " + std::to_string(dim) + ", but the input has the dims 0 to " + std::to_string(like.dims - 1));
  return dim;
}

}  // namespace

Parts::Parts(const Call &call, const Operand &like, int64_t dim, std::vector<int64_t> sizes, const char *name)
    : name_(name), dim_(checked(call, like, dim)), sizes_(check_sizes(call, std::move(sizes), name)), type_(like.type) {
  for (int64_t i = 0; i < dim_; ++i) outer_ *= like.sizes[i];
  for (int64_t i = dim_ + 1; i < like.dims; ++i) inner_ *= like.sizes[i];
  sum_ = sum_of(sizes_);
}

bool Parts::are_even() const {
  return std::all_of(sizes_.begin(), sizes_.end(), [this](int64_t size) { return size == sizes_[0]; });
}

std::vector<int64_t> Parts::shape(const Operand &like, int64_t size) const {
  std::vector<int64_t> sizes(like.sizes, like.sizes + like.dims);
  sizes[static_cast<size_t>(dim_)] = size;
  return sizes;
}

void Parts::check_own(const Call &call, int64_t own, const std::string &name) const {
  if (const int64_t said = sizes_[static_cast<size_t>(call.group->rank)]; said != own)
    call.refuse(std::string(name_) + " has " + std::to_string(said) + " for this rank, group rank " +
                std::to_string(call.group->rank) + ", but " + name + " is " + std::to_string(own));
}

bool Parts::rows_are_short() const {
  for (const int64_t size : sizes_)
    if (size != 0 && size * inner_ * type_.bytes < kShortRow) return true;
  return false;
}

std::vector<size_t> Parts::counts() const {
  std::vector<size_t> counts;
  counts.reserve(sizes_.size());
  for (const int64_t size : sizes_) counts.push_back(static_cast<size_t>(numel(size)) * type_.lanes);
  return counts;
}

std::vector<phx_block> Parts::blocks(const void *whole) const { return blocks_at(whole, !one_after_another()); }
std::vector<phx_block> Parts::flat_blocks(const void *flat) const { return blocks_at(flat, false); }

std::vector<phx_block> Parts::blocks_at(const void *data, bool in_rows) const {
  std::vector<phx_block> blocks;
  blocks.reserve(sizes_.size());
  char *at = static_cast<char *>(const_cast<void *>(data));
  const size_t stride = static_cast<size_t>(sum_ * inner_) * type_.lanes;
  for (const int64_t size : sizes_) {
    const size_t row = static_cast<size_t>(size * inner_) * type_.lanes;
    const bool has_rows = in_rows && row != 0;
    blocks.push_back({at, static_cast<size_t>(outer_) * row, has_rows ? row : 0, has_rows ? stride : 0});
    at += (in_rows ? 1 : outer_) * size * inner_ * type_.bytes;
  }
  return blocks;
}

void Parts::move(const Operand &flat, const Operand &whole, bool to_whole) const {
  char *part = static_cast<char *>(flat.data), *place = static_cast<char *>(whole.data);
  for (const int64_t size : sizes_) {
    const int64_t row = size * inner_;
    if (outer_ * row == 0) continue;
    const Tensor dense = view(part, outer_, row, row, flat), strided = view(place, outer_, row, sum_ * inner_, flat);
    copy_into(to_whole ? strided : dense, to_whole ? dense : strided);
    part += outer_ * row * type_.bytes;
    place += row * type_.bytes;
  }
}

}  // namespace phxt
