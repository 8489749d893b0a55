// Pairwise exchange through shared lines.
#pragma once

#include "ops/operation.h"

namespace phx {

// Whether it beats putting everything and taking everything, for calls in which a rank sends `bytes` to each peer.
bool exchange_pays(const Plan &plan, size_t bytes);

OperationPtr make_exchange(const Plan &plan, const Buffers &buffers);  // all_to_all
OperationPtr make_exchange_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction);
OperationPtr make_exchange_of_two(const Plan &plan, const Buffers &buffers);  // all_gather of two ranks

}  // namespace phx
