// Matrix products into memory that is given, without autograd: on the host past torch's dispatcher, on a GPU through
// it, as there is no other way into a library that CPU builds of torch do not have.
#pragma once

#include "tensors.h"

namespace phxt {

void multiply(const Tensor &a, const Tensor &b, const Tensor &out);
void multiply_batches(const Tensor &a, const Tensor &b, const Tensor &out);
void multiply_and_add(const Tensor &bias, const Tensor &a, const Tensor &b, const Tensor &out);

}  // namespace phxt
