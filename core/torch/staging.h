// Symmetric memory of a group in which its fused products leave what the other ranks read: two halves, used in turn.
//
// Nobody waits at the end of a turn for those who still read. Before a half is filled again comes a turn in the other
// one, in which all ranks meet, and who comes there is through with the turn before it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "phalanx/phalanx.h"

namespace phxt {

struct Call;

constexpr size_t kMostStaged = size_t{64} << 20;  // bytes of a half: what is larger goes another way

// Each Group has one for as long as it lives.
class Staging {
 public:
  Staging() = default;
  Staging(const Staging &) = delete;
  Staging &operator=(const Staging &) = delete;
  ~Staging() { phx_symm_release(symm_); }

  struct Turn {
    phx_symm *symm;
    size_t offset;  // of this turn's half, in every rank's block
    char *own;      // this rank's half
  };
  // For at most kMostStaged bytes, the same on all ranks. Collective where there is less memory so far.
  Turn next(const Call &call, size_t bytes);

 private:
  phx_symm *symm_ = nullptr;
  size_t half_ = 0;  // bytes
  uint64_t turns_ = 0;
};

// The same part of all ranks' blocks as one range, while this is alive: see phx_symm_map_gathered.
class Gathered {
 public:
  Gathered(phx_symm *symm, size_t offset, size_t bytes);
  Gathered(const Gathered &) = delete;
  Gathered &operator=(const Gathered &) = delete;
  ~Gathered() { phx_symm_unmap_gathered(symm_, data_); }
  char *data() const { return static_cast<char *>(data_); }

 private:
  phx_symm *const symm_;
  void *data_ = nullptr;
};

size_t page_bytes();

}  // namespace phxt
