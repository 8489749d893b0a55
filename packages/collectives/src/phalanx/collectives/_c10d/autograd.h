// Autograd kernels of the ops of c10d: see autograd.cpp.
#pragma once

namespace phalanx {

// Adds them to torch's dispatcher, for the whole process.
void add_autograd_kernels();

}  // namespace phalanx
