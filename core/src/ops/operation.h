// A collective as a sequence of rounds. In each, every rank puts something into its slot, all arrive, and every rank
// takes from everybody's slots. The engine does the waiting; operations only move and reduce data.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/tuning.h"
#include "group/control.h"
#include "kernels/copy_bytes.h"
#include "kernels/kernels.h"
#include "phalanx/phalanx.h"
#include "phalanx/tuning.h"

namespace phx {

class Group;
class Lane;
class Symm;

struct Buffers {
  const char *in = nullptr;
  char *out = nullptr;
  size_t count = 0;  // elements, as in the public call
  size_t item = 0;   // bytes of one
  // One for each group rank instead of `count`, in all_gather_v and reduce_scatter_v. The caller's list: valid until
  // the operation is made.
  const size_t *counts = nullptr;
  size_t count_of(int group_rank) const { return counts == nullptr ? count : counts[group_rank]; }
};

struct Reduction {
  kernels::ReduceFn fn = nullptr;
  kernels::ReduceFn streaming = nullptr;  // the same around the cache
  double scale = 1.0;
  int32_t dtype = 0, op = 0;
};

inline constexpr size_t kWholeSlot = SIZE_MAX >> 1;

class Operation {
 public:
  Operation(const Buffers &buffers, size_t in_bytes) : b_(buffers), in_bytes_(in_bytes) {}
  virtual ~Operation() = default;
  // Fills this rank's slot of `epoch` (that of `round`). An operation with a place leaves it empty, until
  // takes_from_places has said no.
  virtual void put(const Lane &lane, uint32_t round, uint64_t epoch) = 0;
  // Everybody has arrived at `epoch`. May change `rounds`, alike on all ranks. An error must be one that every rank
  // finds.
  virtual phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) = 0;
  // Up to which epoch this rank reads no slot any more once it has taken `epoch` of a round that is not the last.
  virtual uint64_t done_after(uint64_t epoch) const { return epoch; }
  // Whether nothing younger may be published before this one is complete: it goes on using slots of rounds long past.
  virtual bool exclusive() const { return false; }
  // For an operation with a place, once everybody has arrived at `epoch` of its first round. True: inputs are taken
  // from their places. False: not all that it needs have one; a slot that was left empty is to be filled now. From then
  // on always the same answer.
  virtual bool takes_from_places(const Lane &, uint64_t) { return false; }
  // Complete: lets go of what it kept for itself.
  virtual void end() { symm.reset(); }
  // Whether the first round takes all of the input.
  virtual bool takes_input_at_once() const { return rounds == 1; }
  // The caller is going to return before all of the input is put: takes it along if it has at most `limit` bytes.
  virtual void keep_input(size_t limit) {
    if (in_bytes_ == 0 || in_bytes_ > limit) return;
    kept_.assign(b_.in, b_.in + in_bytes_);
    b_.in = kept_.data();
  }

  CallRecord record;
  InputLocation place;  // published with the next round; the engine clears it after the first
  uint32_t rounds = 1;
  size_t reach = kWholeSlot;   // up to where the next `put` writes into the own slot, and peers into it until the end
  std::shared_ptr<Symm> symm;  // kept for operations on symmetric memory

  // The engine's.
  uint64_t sequence = 0;
  uint64_t first_epoch = 0;
  uint32_t published = 0;
  uint32_t taken = 0;

 protected:
  Buffers b_;

 private:
  const size_t in_bytes_;  // what `b_.in` points to on this rank
  std::vector<char> kept_;
};

// What the makers of operations go by. Only `blocking` may differ between the ranks of one call, so nothing that peers
// see may depend on it.
struct Plan {
  const Lane &lane;
  const Tuning &tuning;
  // The caller waits inside the call, so its input stays valid and need not be copied as a whole.
  bool blocking;

  size_t chunk_bytes() const;                // what moves between two barriers
  size_t chunk_elements(size_t item) const;  // likewise, in whole cache lines
  // The same for collectives that move `bytes` from some ranks to others: two chunks at least, so that these read the
  // first while those write the second.
  size_t pipelined_elements(size_t bytes, size_t item) const;
};

// ---- arithmetic that several operations share

// Elements per part when `count` elements are dealt to `parts`: whole cache lines, so that no line has two owners.
size_t part_elements(size_t count, size_t item, int parts);
// Elements of whole cache lines that fit in `bytes`.
inline size_t elements_in(size_t bytes, size_t item) { return bytes / kLine * (kLine / item); }
// Rounds in which `count` elements pass, `chunk` at a time; at least one, as every collective is also a barrier.
uint32_t rounds_for(size_t count, size_t chunk);
// How many of them pass in that round.
inline size_t elements_of_round(size_t count, size_t chunk, uint32_t round) {
  const size_t done = round * chunk;
  return count > done ? std::min(chunk, count - done) : 0;
}

using OperationPtr = std::unique_ptr<Operation>;

OperationPtr make_barrier();
// PHX_ALGO_AUTO, resolved: the same on all ranks.
int32_t choose_all_reduce(const Plan &plan, size_t bytes, int32_t algo);
OperationPtr make_all_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int32_t algo);
OperationPtr make_all_gather(const Plan &plan, const Buffers &buffers);
OperationPtr make_reduce_scatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction);
OperationPtr make_all_to_all(const Plan &plan, const Buffers &buffers);
OperationPtr make_all_to_all_v(Group &group, const Plan &plan, const Buffers &buffers, const size_t *in_counts,
                               const size_t *out_counts);
OperationPtr make_broadcast(const Plan &plan, const Buffers &buffers, int root);
OperationPtr make_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root);
OperationPtr make_gather(const Plan &plan, const Buffers &buffers, int root);
OperationPtr make_scatter(const Plan &plan, const Buffers &buffers, int root);
// One of those with a single count, by its kind. algo: of all_reduce. In line, where the kind is a constant.
inline OperationPtr make_operation(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                                   int root, int32_t algo = PHX_ALGO_AUTO) {
  switch (kind) {
    case Kind::kAllReduce: return make_all_reduce(plan, buffers, reduction, algo);
    case Kind::kAllGather: return make_all_gather(plan, buffers);
    case Kind::kReduceScatter: return make_reduce_scatter(plan, buffers, reduction);
    case Kind::kAllToAll: return make_all_to_all(plan, buffers);
    case Kind::kBroadcast: return make_broadcast(plan, buffers, root);
    case Kind::kReduce: return make_reduce(plan, buffers, reduction, root);
    case Kind::kGather: return make_gather(plan, buffers, root);
    case Kind::kScatter: return make_scatter(plan, buffers, root);
    default: return make_barrier();
  }
}

// On symmetric memory: `offset` bytes into every rank's block. buffers.in is this rank's own.
class SymmOperation : public Operation {
 public:
  // The input of that rank lies elsewhere in its block. False: not all of it would.
  virtual bool move_input(int group_rank, size_t offset) = 0;

 protected:
  explicit SymmOperation(const Buffers &buffers) : Operation(buffers, 0) { reach = 0; }
};
using SymmOperationPtr = std::unique_ptr<SymmOperation>;
// Whether a sum over symmetric memory of `n` ranks is made in two steps: each rank sums one part of all inputs, and
// passes the sum on through its slot. In one step each receiver reads everything from everybody. An all_reduce in place
// is neither: its sums go straight into all blocks.
inline bool sums_by_parts(Kind kind, bool in_place, int n, int32_t algo) {
  if (kind != Kind::kReduce && (kind != Kind::kAllReduce || in_place)) return false;
  return algo == PHX_ALGO_TWO_SHOT || (algo != PHX_ALGO_ONE_SHOT && n > 2);
}
// algo: PHX_ALGO_*, of all_reduce and reduce.
SymmOperationPtr make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                           const Reduction &reduction, int root, const Plan &plan, int32_t algo = PHX_ALGO_AUTO);
// In place on all ranks, which make_symm's is not.
SymmOperationPtr make_symm_broadcast(std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers, int root,
                                     const Tuning &tuning);
// `name` is that of the call, on `group`. `round`: in which the counts are exchanged.
SymmOperationPtr make_symm_all_to_all_v(Group &group, const char *name, std::shared_ptr<Symm> symm, size_t offset,
                                        const Buffers &buffers, const size_t *in_counts, const size_t *out_counts,
                                        uint32_t round);

}  // namespace phx
