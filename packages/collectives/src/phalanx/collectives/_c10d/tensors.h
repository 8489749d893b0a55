// Tensors as the core takes them: addresses of contiguous memory of the CPU or of a GPU, dtypes and reductions by
// number.
#pragma once

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <mutex>
#include <vector>

#include "work.h"

namespace phalanx {

// The elements of a call. Dtypes that the core does not have are moved as bytes.
struct Elements {
  int32_t dtype;
  size_t count;
  size_t item;  // bytes of an element
};
Elements elements_of(const at::Tensor &tensor);
// `numel` elements of the dtype of the tensor.
Elements elements_of(const at::Tensor &tensor, int64_t numel);
// The elements of a tensor that is reduced. Raises NotImplementedError if the core does not have its dtype.
Elements reduced_elements(const at::Tensor &tensor, const char *what);

struct Reduction {
  int32_t op;
  double scale;
};
Reduction reduction_of(const c10d::ReduceOp &op, const char *what);

// Raises ValueError unless it is a dense tensor on the CPU or on a GPU.
void check_tensor(const at::Tensor &tensor, const char *what);
// Raises ValueError unless both have the same dtype.
void check_same_dtype(const at::Tensor &a, const at::Tensor &b, const char *what);
// The only tensor of a list; raises ValueError if the list has another length.
at::Tensor &only(std::vector<at::Tensor> &tensors, const char *what);

// Whether two tensors are the same elements of memory, read in the same way.
bool same_view(const at::Tensor &a, const at::Tensor &b);
// Whether two tensors of a list, by their positions, may share memory that a call writes, because it writes the same
// values through both.
using MayShare = c10::function_ref<bool(size_t, size_t)>;
// Whether some of the tensors that a call writes share memory. Raises RuntimeError in the words of torch if two tensors
// share memory and may not: the result would depend on the order of the writes.
bool share_memory(const std::vector<at::Tensor> &written, MayShare may_share);

// The address of a tensor's elements. `buffers` keeps the tensors that are needed, and copies results back. Raises
// RuntimeError in the words of torch if two elements of a tensor that is written lie in one place, or if tensors of a
// list share memory.
const void *readable(const at::Tensor &tensor, Buffers &buffers);
void *writable(const at::Tensor &tensor, Buffers &buffers);  // its old contents are not needed
void *readable_and_writable(const at::Tensor &tensor, Buffers &buffers);
// The input, or a copy of it if it overlaps the output.
const void *copy_if_overlapping(const void *in, size_t in_bytes, const void *out, size_t out_bytes, Buffers &buffers);

// Memory for tensors of lists that the core cannot read or write where they lie. It is kept for later calls, up to a
// limit; no call gets it before the work that uses it is complete.
class Scratch {
 public:
  at::Tensor take(size_t bytes);

 private:
  std::mutex mutex_;
  at::Tensor kept_;
};

// The tensors of a list, which have one dtype, as blocks for the core: on the CPU where they lie, also as rows with a
// stride; on GPUs, where the core takes no lists of blocks, one after another in one buffer.
struct List {
  std::vector<phx_block> blocks;
  int32_t dtype = 0;
  size_t item = 0;    // bytes of an element
  bool flat = false;  // they lie in one buffer
  void *start() const { return blocks.empty() ? nullptr : blocks[0].data; }
  bool even() const;  // whether all have the same number of elements
  std::vector<size_t> counts() const;
};
List readable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers);
List writable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers);
List in_one_buffer(const std::vector<at::Tensor> &tensors, Buffers &buffers);  // written, on the CPU too
// Copies inputs that overlap the outputs. An input that is the same as the output `own` is not copied; -1: there is
// none.
void copy_overlapping(List &inputs, const List &outputs, int own, Buffers &buffers);
// A list of one tensor, whose address is `data`.
List alone(const at::Tensor &tensor, const void *data);

// The device of all buffers; the CPU if there are none. Raises ValueError if they are on several devices.
at::Device device_of(const Buffers &buffers, const char *what);

int64_t numel_of(at::TensorList tensors);

}  // namespace phalanx
