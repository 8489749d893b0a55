// Copies of inputs that started operations keep until there is room for them. Their memory serves later operations: to
// touch fresh pages takes longer than a call.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

#include "base/fork.h"

namespace phx {

using Kept = std::shared_ptr<char>;

// The memory of one engine.
class KeptMemory : public std::enable_shared_from_this<KeptMemory> {
 public:
  // What is in it is arbitrary. It may outlive the engine.
  Kept take(size_t bytes);

 private:
  void give_back(char *piece, size_t size_class);

  AcrossForks<std::mutex> mutex_;
  std::array<std::vector<std::unique_ptr<char[]>>, 64> free_;  // by the exponent of their size, a power of two
  size_t free_bytes_ = 0;
};

// How an operation keeps its input.
struct Keeping {
  size_t limit;  // inputs with more bytes are not kept
  KeptMemory &memory;
};

}  // namespace phx
