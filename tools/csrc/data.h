// Inputs that change with every call, and the results that they must give.
#pragma once

#include "phalanx_bench.h"

namespace phxb {

bool valid(const phxb_plan &plan);
void fill(const phxb_plan &plan, uint64_t iteration);
// PHXB_OK or PHXB_WRONG_RESULT, and then *failure says where.
int32_t check(const phxb_plan &plan, uint64_t iteration, phxb_failure *failure);
void corrupt(const phxb_plan &plan);

}  // namespace phxb
