// Memory for large tensors of the host. What earlier tensors gave back is used again: to touch fresh pages takes longer
// than to move the data.
#pragma once

#include <cstddef>

#include "handles.h"

namespace phxt {

constexpr size_t kLargeTensor = size_t{4} << 20;  // bytes; smaller ones are torch's own

// A contiguous tensor in such memory, which it gives back at its end. Its storage cannot be resized. An empty Tensor
// where there is no memory, or it would be more than what is kept at most.
Tensor large_tensor(const int64_t *sizes, const int64_t *strides, int64_t dims, int32_t torch_dtype, size_t bytes);

// Asks for huge pages under memory that is to be touched for the first time: one fault for each 4 KiB would cost as
// much as moving the data. A hint: nothing depends on it.
void expect_first_touch(void *data, size_t size);

}  // namespace phxt
