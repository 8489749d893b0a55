// Collectives whose input lies in symmetric memory: peers read (and for all_reduce in place, write) the blocks
// themselves.
//
// Two barriers and no copy: after the first every input is ready, after the second nobody reads or writes any more.
#include <algorithm>
#include <cstring>

#include "collectives/operation.h"
#include "group/lane.h"
#include "symm/symm.h"

namespace phx {
namespace {

class Symmetric final : public Operation {
 public:
  Symmetric(Kind kind, std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
            int root)
      : kind_(kind), offset_(offset), b_(buffers), reduction_(reduction), root_(root) {
    symm = std::move(handle);
    rounds = 2;
  }

  void put(const Lane &, uint32_t, uint64_t) override {}

  phx_status take(const Lane &, uint32_t round, uint64_t) override {
    if (round == 0) move();
    return PHX_OK;
  }

 private:
  char *at(int group_rank, size_t element) const { return symm->buffer(group_rank) + offset_ + element * b_.item; }

  void move() const {
    const int n = symm->size();
    const int self = symm->group_rank();
    const size_t bytes = b_.count * b_.item;
    switch (kind_) {
      case Kind::kSymmAllReduce:
        if (b_.out == b_.in)
          reduce_in_place();
        else
          reduce(b_.out, 0, b_.count);
        return;
      case Kind::kSymmReduceScatter: reduce(b_.out, self * b_.count, b_.count); return;
      case Kind::kSymmAllGather:
        for (int i = 0; i < n; ++i) copy_bytes(b_.out + ((self + i) % n) * bytes, at((self + i) % n, 0), bytes);
        return;
      case Kind::kSymmAllToAll:
        for (int i = 0; i < n; ++i)
          copy_bytes(b_.out + ((self + i) % n) * bytes, at((self + i) % n, self * b_.count), bytes);
        return;
      case Kind::kSymmBroadcast:
        if (self != root_) copy_bytes(at(self, 0), at(root_, 0), bytes);
        return;
      default: return;
    }
  }

  void reduce(char *out, size_t begin, size_t count) const {
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < symm->size(); ++i) inputs[i] = at(i, begin);
    if (count != 0) reduction_.fn(out, inputs, symm->size(), count, symm->size(), reduction_.scale);
  }

  // Two-shot without staging: this rank alone touches its part, on every rank, so it may overwrite it everywhere.
  void reduce_in_place() const {
    const int n = symm->size();
    const int self = symm->group_rank();
    const size_t part = part_elements(b_.count, b_.item, n);
    size_t begin = std::min(b_.count, part * self);
    const size_t end = std::min(b_.count, begin + part);
    const size_t chunk = std::max<size_t>(kPushBytes / b_.item, 1);  // sums stay in the cache until they are pushed
    for (; begin < end; begin += chunk) {
      const size_t count = std::min(chunk, end - begin);
      reduce(at(self, begin), begin, count);
      for (int i = 1; i < n; ++i) copy_bytes(at((self + i) % n, begin), at(self, begin), count * b_.item);
    }
  }

  static constexpr size_t kPushBytes = 16 << 10;

  const Kind kind_;
  const size_t offset_;
  const Buffers b_;
  const Reduction reduction_;
  const int root_;
};

}  // namespace

std::unique_ptr<Operation> make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                                     const Reduction &reduction, int root) {
  return std::make_unique<Symmetric>(kind, std::move(symm), offset, buffers, reduction, root);
}

}  // namespace phx
