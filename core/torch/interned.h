// Texts as numbers, for arguments of phalanx_c10d ops: up to torch 2.13 every string that goes through the dispatcher
// call of the stable ABI leaks (pytorch#191340, mended by #190493), and such leaks between tensors keep whole pages.
#pragma once

#include <cstdint>
#include <string_view>

namespace phxt {

int64_t intern(std::string_view text);  // the same number for the same text, for the life of the process

}  // namespace phxt
