// Which collectives on symmetric memory of GPUs use NVLink switches, and with which kernel.
#pragma once

#include <string>

#include "ops/call.h"

namespace phx {

struct MultimemWay {
  std::string kernel;  // empty: the call does not use the switches
  size_t times = 1;    // how many elements of the kernel are one element of the call
  cuda::Spread spread{};
  bool shares = false;  // each rank reduces only its part of the elements
};

// How a checked call uses the switches, the same on all ranks. Refuses a call that requires switches that cannot do it.
MultimemWay choose_multimem(Call &call, Symm &symm, size_t offset);
// Refuses a call that requires the switches, for collectives that never use them.
void refuse_multimem(Call &call);

}  // namespace phx
