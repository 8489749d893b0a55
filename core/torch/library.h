// The version of torch's stable ABI that this library speaks: 2.11, the oldest that it runs with. torch converts from
// it.
#pragma once

#include <cstdint>

namespace phxt {

constexpr uint64_t kTorchVersion = (UINT64_C(2) << 56) | (UINT64_C(11) << 48);

}  // namespace phxt
