// all_reduce of small inputs, and the choice of the algorithm.
//
// One-shot: every rank copies its input into its slot and reduces the slots of all ranks. One barrier; each rank reads
// (n-1) times the input.
#include <algorithm>

#include "group/lane.h"
#include "ops/areas.h"
#include "ops/operation.h"
#include "phalanx/tuning.h"

namespace phx {
namespace {

class OneShotAllReduce final : public Operation {
 public:
  OneShotAllReduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction)
      : Operation(buffers, buffers.count * buffers.item), reduction_(reduction), blocking_(plan.blocking) {
    reach = b_.count * b_.item;
  }

  void put(const Lane &lane, uint32_t, uint64_t epoch) override {
    put_bytes(lane.data(lane.group_rank(), epoch), b_.in, b_.count * b_.item);
  }

  phx_status take(const Lane &lane, uint32_t, uint64_t epoch) override {
    const int n = lane.group_size();
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n; ++i) inputs[i] = lane.data(i, epoch);
    if (blocking_) inputs[lane.group_rank()] = b_.in;  // nearer than the slot: see put_bytes
    reduction_.fn(b_.out, inputs, n, b_.count, n, reduction_.scale);
    return PHX_OK;
  }

 private:
  const Reduction reduction_;
  const bool blocking_;
};

}  // namespace

int32_t choose_all_reduce(const Plan &plan, size_t bytes, int32_t algo) {
  const size_t limit = algo == PHX_ALGO_ONE_SHOT ? plan.lane.slot_bytes()
                       : algo == PHX_ALGO_TWO_SHOT
                           ? 0
                           : std::min<size_t>(plan.tuning.one_shot_bytes, plan.lane.slot_bytes());
  return bytes <= limit ? PHX_ALGO_ONE_SHOT : PHX_ALGO_TWO_SHOT;
}

OperationPtr make_all_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int32_t algo) {
  if (choose_all_reduce(plan, buffers.count * buffers.item, algo) == PHX_ALGO_ONE_SHOT)
    return std::make_unique<OneShotAllReduce>(plan, buffers, reduction);
  return make_two_shot(plan, buffers, reduction, -1);
}

}  // namespace phx
