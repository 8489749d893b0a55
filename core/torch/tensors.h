// What a collective needs to know of a tensor: where its elements lie, how many, and which dtype of the core they are.
#pragma once

#include <string>
#include <vector>

#include "handles.h"

namespace phxt {

enum class Reducible : uint8_t { never, sums, always };

// How the core sees one element of a torch dtype. Complex numbers are two floats, which sums may add up as such. A
// dtype that the core does not have (float8, ...) can still be moved, as bytes.
struct ElementType {
  int32_t code;    // PHX_*
  uint32_t lanes;  // core elements in one torch element
  uint32_t bytes;  // of one torch element
  Reducible reduce;
  const char *name;  // as torch says it
};
ElementType element_type(int32_t torch_dtype);

struct Range {  // of addresses
  uintptr_t begin = 0, end = 0;
  bool overlaps(const Range &other) const { return begin < other.end && other.begin < end; }
};

constexpr int32_t kHost = -1;       // in place of the number of a GPU
constexpr int32_t kElsewhere = -2;  // neither the host nor a GPU

// A contiguous tensor, or a contiguous copy of one with strides. `sizes` belongs to the tensor it was read from.
struct Operand {
  Tensor copy;  // set when the tensor itself was not contiguous
  void *data = nullptr;
  ElementType type{};
  int32_t dtype = 0;  // torch's
  int32_t gpu = kHost;
  int64_t dims = 0;
  const int64_t *sizes = nullptr;
  int64_t numel = 0;

  size_t bytes() const { return static_cast<size_t>(numel) * type.bytes; }
  size_t count() const { return static_cast<size_t>(numel) * type.lanes; }  // in elements of the core
  Range range() const { return {reinterpret_cast<uintptr_t>(data), reinterpret_cast<uintptr_t>(data) + bytes()}; }
  int64_t numel_of_row() const;  // elements in one index of dim 0
};

// Waits for work of ours that is still to write into these bytes of the tensor: on a GPU the current stream does.
void settle(const Tensor &tensor, const Range &range);
constexpr Range kEverything{0, UINTPTR_MAX};

bool on_cpu(const Tensor &tensor);
int32_t gpu_of(const Tensor &tensor);  // its number, kHost or kElsewhere
std::string device_name(int32_t gpu);
bool is_contiguous(const Tensor &tensor);
// All of these first wait for work of ours that is still to write into the tensor, which lies on this GPU.
Operand read_operand(const Tensor &tensor, int32_t gpu);  // to be read only: data is not to be written
// To be written; the caller copies back where `copy` is set. Refuses a tensor with two elements in one place.
Operand write_operand(const Tensor &tensor, int32_t gpu);
// As torch says it.
constexpr const char *kSharedOutputs =
    "unsupported operation: more than one element of the written-to tensor refers to a single memory location. Please "
    "clone() the tensor before performing the operation.";
void make_private(Operand &operand, const Tensor &tensor);  // puts a copy in its place

Tensor empty(const int64_t *sizes, int64_t dims, int32_t torch_dtype, int32_t gpu);
inline Tensor empty(const std::vector<int64_t> &sizes, int32_t torch_dtype, int32_t gpu) {
  return empty(sizes.data(), static_cast<int64_t>(sizes.size()), torch_dtype, gpu);
}
std::vector<int64_t> with_dim0(const Operand &like, int64_t dim0);  // the sizes of `like` with another dim 0
void *mutable_data(const Tensor &tensor);
void copy_into(const Tensor &target, const Tensor &source);

// Gradients are the business of an op, not of its parts.
struct NoGrad {
  bool before = aoti_torch_grad_mode_is_enabled();
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  NoGrad(const NoGrad &) = delete;
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before); }
};

// First byte of the storage of a tensor, which identifies it. 0 when it has none.
uintptr_t storage_base(const Tensor &tensor);

}  // namespace phxt
