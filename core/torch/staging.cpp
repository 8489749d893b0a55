#include "staging.h"

#include <unistd.h>

#include <algorithm>

#include "agreement.h"
#include "call.h"

namespace phxt {
namespace {

constexpr size_t kSmallestHalf = size_t{1} << 20;

size_t half_for(size_t bytes) {
  size_t half = kSmallestHalf;
  while (half < bytes) half *= 2;
  return half;
}

}  // namespace

size_t page_bytes() {
  static const auto size = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return size;
}

Staging::Turn Staging::next(const Call &call, size_t bytes) {
  if (bytes > half_) {
    const size_t half = half_for(bytes);
    agree_on_plan(call, "the staging of fused products", half, half_, false);
    phx_symm *made = nullptr;
    check_core(phx_symm_alloc(call.handle(), nullptr, 2 * half, 0, &made));
    phx_symm_release(symm_);  // who still reads there has it mapped
    symm_ = made;
    half_ = half;
  }
  const size_t offset = (turns_++ % 2) * half_;
  return {symm_, offset, static_cast<char *>(phx_symm_buffer(symm_, call.group->rank)) + offset};
}

Gathered::Gathered(phx_symm *symm, size_t offset, size_t bytes) : symm_(symm) {
  check_core(phx_symm_map_gathered(symm, offset, bytes, &data_));
}

}  // namespace phxt
