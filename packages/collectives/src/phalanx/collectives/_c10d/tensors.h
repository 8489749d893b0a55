// Tensors as the core takes them: addresses of contiguous memory of the CPU or of a GPU, dtypes and reductions by
// number.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <functional>
#include <mutex>
#include <vector>

#include "work.h"

namespace phalanx {

// What moves: `count` of these elements. Dtypes that the core has not got move as bytes.
struct Elements {
  int32_t dtype;
  size_t count;
};
Elements elements_of(const at::Tensor &tensor);
// As many of them as that: `numel` elements of the tensor.
Elements elements_of(const at::Tensor &tensor, int64_t numel);
// Of a tensor that is reduced: its dtype must be one of the core's.
int32_t reduced_dtype(const at::Tensor &tensor);

struct Reduction {
  int32_t op;
  double scale;
};
Reduction reduction_of(const c10d::ReduceOp &op);

// Raises ValueError unless it is a dense tensor on the CPU or on a GPU.
void check_tensor(const at::Tensor &tensor, const char *what);
// Raises ValueError unless both have the same dtype.
void check_same_dtype(const at::Tensor &a, const at::Tensor &b);
// The one tensor of a list.
at::Tensor &only(std::vector<at::Tensor> &tensors, const char *what);

// Whether two tensors are the same elements of memory, read in the same way.
bool same_view(const at::Tensor &a, const at::Tensor &b);
// Whether two tensors of a list, by their positions, may share memory that a call writes, because it writes the same
// values through both.
using MayShare = std::function<bool(size_t, size_t)>;
// Whether some of the tensors, which a call writes, share memory. Raises RuntimeError in the words of torch where two
// do that may not: what is written would depend on the order.
bool share_memory(const std::vector<at::Tensor> &written, const MayShare &may_share);

// Addresses. What they need is kept, and copied back, by `buffers`. A tensor that is written must not have two elements
// in one place, and the tensors of a list must not share memory: RuntimeError in the words of torch.
const void *readable(const at::Tensor &tensor, Buffers &buffers);
void *writable(const at::Tensor &tensor, Buffers &buffers);  // its old contents are not needed
void *readable_and_writable(const at::Tensor &tensor, Buffers &buffers);
// The input, or a copy of it if it overlaps the output.
const void *apart(const void *in, size_t in_bytes, const void *out, size_t out_bytes, Buffers &buffers);

// Memory for the tensors of lists that the core cannot take where they lie. It is kept for later calls, up to a limit;
// a work that is not complete has it to itself.
class Scratch {
 public:
  at::Tensor take(size_t bytes);

 private:
  std::mutex mutex_;
  at::Tensor kept_;
};

// The tensors of a list, of one dtype, as the core takes them: on the CPU where they lie, rows included; on GPUs, where
// the core takes no lists of blocks, one after another in one buffer.
struct List {
  std::vector<phx_block> blocks;
  int32_t dtype = 0;
  bool flat = false;  // they lie in one buffer
  void *start() const { return blocks.empty() ? nullptr : blocks[0].data; }
  bool even() const;  // whether all have the same number of elements
  std::vector<size_t> counts() const;
};
List readable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers);
List writable(const std::vector<at::Tensor> &tensors, Scratch &scratch, Buffers &buffers);
List in_one_buffer(const std::vector<at::Tensor> &tensors, Buffers &buffers);  // written, on the CPU too
// Copies inputs that overlap the outputs, but for one that is just the output `own` where that is not negative.
void keep_apart(List &inputs, const List &outputs, int own, Buffers &buffers);
// One tensor, of which `data` is the address, as a list.
List alone(const at::Tensor &tensor, const void *data);

// Where all of it is; the CPU where there is nothing. Raises ValueError where that is several devices.
at::Device device_of(const Buffers &buffers, const char *what);

size_t bytes_of(const Elements &elements);
int64_t numel_of(const std::vector<at::Tensor> &tensors);

}  // namespace phalanx
