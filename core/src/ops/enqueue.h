// The collectives on memory of GPUs: chooses the kernel for a call and launches it.
#pragma once

#include "gpu/launch.h"
#include "ops/call.h"

namespace phx {

// Whether an all_reduce uses the LL protocol, in which a rank reads no input but its own. The same on all ranks.
bool fits_lines(const Call &call, const Symm &symm);
// Puts a checked call on its stream. `inputs`: where the inputs lie, if that may differ between ranks; NULL: at
// `offset` in the blocks of all ranks.
phx_status enqueue(Call &call, Symm &symm, size_t offset, const cuda::Inputs *inputs, phx_work **work);

// A kernel that reduces. Dtypes and ops that give the same bits share one.
struct Reducer {
  int32_t dtype;  // 0: there is none
  int32_t op;
  size_t times;  // how many elements of the kernel are one element of the call
};

// ---- multimem.cpp: which collectives use NVLink switches, and with which kernel

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

// ---- on_gpu.cpp: collectives on ordinary GPU memory, which put the copies and kernels of a call on its stream

// Puts a checked call on its stream.
phx_status put_on_gpu(Call &call, const Volume &volume, phx_work **work);
// Puts the calls of a list on the stream one after the other.
phx_status put_on_gpu(Call &all, const std::vector<CoalescedCall> &calls, phx_work **work);

}  // namespace phx
