// Chunked two-shot: all_reduce, and reduce to a root.
#pragma once

#include "ops/operation.h"

namespace phx {

// root: the group rank that gets the result; -1 = every one.
OperationPtr make_two_shot(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root);

}  // namespace phx
