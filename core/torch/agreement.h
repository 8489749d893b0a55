// Before the ranks of a group make memory for a compiled graph, they compare what they have compiled.
#pragma once

#include "call.h"

namespace phxt {

constexpr size_t kComparedBytes = size_t{64} << 10;  // of a plan's text, where the ranks' plans differ

// A plan's text has its name first, which has a hash of the rest, and then what each collective is. No line breaks
// stand between them, as generated C++ code could not hold them in a literal.
constexpr char kPlanSeparator = '|';
inline std::string_view name_of_plan(std::string_view plan) { return plan.substr(0, plan.find(kPlanSeparator)); }

// Collective. Returns when all ranks ask for as many bytes of a plan with the same text and have as many of them by
// now; otherwise it raises on every rank, naming the plans, the group ranks on either side, and the first collective
// that differs.
// `of_graph`: whether the plan is that of a compiled graph, for the error of a rank that makes another call meanwhile.
void agree_on_plan(const Call &call, std::string_view plan, uint64_t bytes, uint64_t bytes_before,
                   bool of_graph = true);

}  // namespace phxt
