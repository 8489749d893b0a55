// Arguments of public functions, decoded from an input: right ones mostly, and all kinds of wrong ones.
//
// Whatever a caller must get right, because no library can check it, is right: pointers lead to memory of at least the
// size that goes with them (exactly that size, so that a byte beyond is seen), and handles are NULL or not released.
#pragma once

#include <cstddef>
#include <list>
#include <memory>
#include <vector>

#include "input.h"

namespace fuzz {

inline phx_options options_within(int64_t timeout_ms) {
  phx_options options = PHX_OPTIONS_INIT;
  options.timeout_ms = timeout_ms;
  return options;
}

class Arguments {
 public:
  Arguments(const uint8_t *data, size_t size) : input_(data, size) {}
  Input &input() { return input_; }
  size_t below(size_t end) { return input_.below(end); }
  bool one_in(size_t n) { return input_.below(n) == n - 1; }

  int32_t dtype() { return static_cast<int32_t>(below(20)) - 1; }
  int32_t op() { return static_cast<int32_t>(below(12)) - 1; }
  int32_t rank() { return static_cast<int32_t>(below(5)) - 2; }
  uint32_t channel() { return static_cast<uint32_t>(below(4)); }
  int64_t timeout_ms() {
    constexpr int64_t kTimes[] = {1, 0, 2, -1, INT64_MIN};
    return kTimes[below(5)];
  }
  // Such that either the buffers are small, or no memory could hold them.
  size_t count() {
    constexpr size_t kImpossible[] = {SIZE_MAX, SIZE_MAX / 2 + 1, SIZE_MAX - 7};
    return one_in(16) ? kImpossible[below(3)] : below(2) == 0 ? below(8) : below(256);
  }
  size_t offset() {
    constexpr size_t kOffsets[] = {0, 4, 64, 1, 4096, SIZE_MAX - 15, SIZE_MAX / 2};
    return kOffsets[below(7)];
  }
  const char *name() {
    static const std::string kLong(300, 'n');
    const char *const names[] = {"a", "b", nullptr, "", kLong.c_str(), "\xff/%s\n"};
    return names[below(6)];
  }
  std::vector<size_t> counts(int size) {
    std::vector<size_t> list(static_cast<size_t>(size));
    for (size_t &each : list) each = one_in(16) ? count() | size_t{1} << 60 : below(16);
    return list;
  }

  // Two buffers; sometimes NULL, sometimes the same, sometimes overlapping. They live as long as this object.
  struct Pair {
    char *in;
    char *out;
  };
  Pair buffers(size_t in_bytes, size_t out_bytes) {
    switch (below(8)) {
      case 5: return {nullptr, make(out_bytes)};
      case 6: {
        char *both = make(std::max(in_bytes, out_bytes));
        return {both, both};
      }
      case 7: {
        char *both = make(in_bytes + out_bytes);
        return {both, both + std::min(below(64), in_bytes)};
      }
      default: return {make(in_bytes), make(out_bytes)};
    }
  }
  char *make(size_t bytes) {
    owned_.emplace_back(new char[bytes]());
    return owned_.back().get();
  }

  // A struct as a caller of some version would have it: of struct_size bytes, and no more.
  template <class T>
  T *structure(const T &value) {
    constexpr uint32_t kSizes[] = {0, 3, 4, 8, sizeof(T) - 1, sizeof(T) + 8, 16 * sizeof(T) + 1, UINT32_MAX};
    if (one_in(32)) return nullptr;
    const uint32_t size = one_in(8) ? kSizes[below(8)] : static_cast<uint32_t>(sizeof(T));
    const size_t claimed = size <= 16 * sizeof(T) ? size : sizeof(T);  // a larger one is refused unseen
    const size_t there = std::max<size_t>(sizeof size, claimed);
    char *bytes = make(there);
    std::memcpy(bytes, &value, std::min(there, sizeof(T)));
    if (there > sizeof(T) && one_in(2)) bytes[there - 1] = 1;  // a field that this version does not know
    std::memcpy(bytes, &size, sizeof size);
    return reinterpret_cast<T *>(bytes);
  }
  const phx_options *options() {
    if (below(2) == 0) return nullptr;
    phx_options options = PHX_OPTIONS_INIT;
    options.flags = one_in(16) ? 1 : 0;
    options.algo = static_cast<int32_t>(below(8)) % 5 - 1;
    options.channel = channel();
    options.timeout_ms = timeout_ms();
    options.scale = one_in(4) ? input_.take<double>() : 0.5;
    return structure(options);
  }

 private:
  Input input_;
  std::list<std::unique_ptr<char[]>> owned_;
};

}  // namespace fuzz
