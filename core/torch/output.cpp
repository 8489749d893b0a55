// Checks of an `out` argument.
#include "output.h"

namespace phxt {

Operand caller_output(const Call &call, const Tensor &out, const Operand &like, int64_t numel) {
  const int32_t gpu = gpu_of(out);
  if (gpu != call.gpu) call.refuse("input is on " + device_name(call.gpu) + ", but out is on " + device_name(gpu));
  Operand result = write_operand(out, gpu);
  if (result.dtype != like.dtype)
    call.refuse(std::string("out must have the dtype of input, but input is ") + like.type.name + " and out " +
                result.type.name);
  if (result.numel != numel)
    call.refuse("out must have " + std::to_string(numel) + " elements, but has " + std::to_string(result.numel));
  return result;
}

}  // namespace phxt
