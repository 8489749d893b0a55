// Measures which candidates copy fastest between two ranks (kernels/copy_plan.h).
//
// Group ranks 0 and 1 move data through slots of a new group as collectives do, before the group uses them: rank 0
// says what comes next, both copy, and rank 0 takes the time. It ends kMeasureCopiesMs after both have come. Neither
// waits for the other for more than 20 ms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/copy_plan.h"

namespace phx {

inline constexpr int64_t kMeasureCopiesMs = 5;
inline constexpr size_t kMeasuredSlotBytes = size_t{128} << 10;  // the least that the slots must have

// `slots`: the data of three slots of the segment of rank 0, resident, and all zero where the third begins. On rank 0,
// *out becomes the plan; false if there was not enough time to compare anything.
bool measure_copies(char *const slots[3], bool leads, kernels::CopyPlan *out);

}  // namespace phx
