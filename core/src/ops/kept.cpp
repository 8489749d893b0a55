#include "ops/kept.h"

namespace phx {
namespace {

constexpr size_t kMostFree = size_t{16} << 20;  // bytes; more is given back to the system

}  // namespace

Kept KeptMemory::take(size_t bytes) {
  const size_t size_class = bytes <= 1 ? 0 : 64 - __builtin_clzll(bytes - 1);
  std::unique_ptr<char[]> piece;
  {
    const std::lock_guard lock(mutex_);
    if (auto &pieces = free_[size_class]; !pieces.empty()) {
      piece = std::move(pieces.back());
      pieces.pop_back();
      free_bytes_ -= size_t{1} << size_class;
    }
  }
  if (!piece) piece.reset(new char[size_t{1} << size_class]);
  return {piece.release(), [self = shared_from_this(), size_class](char *used) { self->give_back(used, size_class); }};
}

void KeptMemory::give_back(char *piece, size_t size_class) {
  std::unique_ptr<char[]> owned(piece);
  const size_t bytes = size_t{1} << size_class;
  const std::lock_guard lock(mutex_);
  if (free_bytes_ + bytes > kMostFree) return;
  free_bytes_ += bytes;
  free_[size_class].push_back(std::move(owned));
}

}  // namespace phx
