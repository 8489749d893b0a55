// Which collectives on symmetric memory of GPUs go by NVLink switches, and with which kernel.
#pragma once

#include <string>

#include "ops/call.h"

namespace phx {

struct MultimemWay {
  std::string kernel;  // empty: another way
  size_t times = 1;    // elements of the kernel for each of the call
  cuda::Spread spread{};
  bool shares = false;  // each rank does its part of the elements
};

// How a checked call uses the switches, the same on all ranks. A call that asks for them where they cannot is refused.
MultimemWay choose_multimem(Call &call, Symm &symm, size_t offset);
// For a call that cannot use them at all.
void refuse_multimem(Call &call);

}  // namespace phx
