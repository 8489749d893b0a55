// A collective as a sequence of rounds. In each round every rank puts data into its slot, all ranks arrive, and every
// rank takes data from the slots of all ranks. The engine does the waiting; operations only move and reduce data.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/tuning.h"
#include "group/lane.h"
#include "kernels/copies.h"
#include "kernels/kernels.h"
#include "ops/kept.h"
#include "phalanx/phalanx.h"
#include "phalanx/tuning.h"

namespace phx {

class Group;
class Net;
class Symm;

// Blocks of an input or output that differ in size, or do not lie one after another. What is NULL follows from Buffers.
// With `in` or `out` set, that pointer of Buffers is NULL unless the blocks lie one after another.
struct Lists {
  const size_t *in_counts = nullptr, *out_counts = nullptr;
  const phx_block *in = nullptr, *out = nullptr;
};

struct Buffers {
  const char *in = nullptr;
  char *out = nullptr;
  size_t count = 0;              // elements, as in the public call; not of unequal blocks
  size_t item = 0;               // bytes of an element
  const Lists *lists = nullptr;  // the caller's, and valid until the operation is made
};

struct Reduction {
  kernels::ReduceFn fn = nullptr;
  kernels::ReduceFn streaming = nullptr;  // the same with stores that bypass the cache
  double scale = 1.0;
  int32_t dtype = 0, op = 0;
};

// In bytes: what this rank reads and writes in a call, and the largest input of any rank, which is the same on all.
struct Volume {
  size_t in = 0, out = 0, largest = 0;
};

// A checked call of a list. Its kind is one that phx_call allows.
struct CoalescedCall {
  Buffers buffers;
  Reduction reduction;
  CallRecord record;
  Volume volume;
  Kind kind() const { return kind_of(record); }
  int root() const { return record.root; }
};

inline constexpr size_t kWholeSlot = SIZE_MAX >> 1;

class Operation {
 public:
  Operation(const Buffers &buffers, size_t in_bytes) : b_(buffers), in_bytes_(in_bytes) {}
  virtual ~Operation() = default;
  // Fills this rank's slot of `epoch` with the data of `round`. An operation whose `place` says that the slot is empty
  // leaves it empty until takes_from_places has returned false.
  virtual void put(const Lane &, uint32_t, uint64_t) {}
  // Called when `round` is published, which other ranks may not have done: moves what this rank has for itself.
  virtual void keep_own(const Lane &, uint32_t) {}
  // Called when all ranks have arrived at `epoch`. May change `rounds` if all ranks change it in the same way. An error
  // must be the same on all ranks.
  virtual phx_status take(const Lane &, uint32_t, uint64_t) { return PHX_OK; }
  // Whether later operations must not be published before this one is complete: it keeps using slots of earlier rounds.
  virtual bool exclusive() const { return false; }
  // For an operation with a `place`, called when all ranks have arrived at `epoch` of its first round. True: the inputs
  // are read where they lie. False: some needed input cannot be, and the slots that were left empty must be filled.
  // Further calls return the same.
  virtual bool takes_from_places(const Lane &, uint64_t) { return false; }
  // For an operation of a group that spans hosts. Called before a round after the first is published, and with `rounds`
  // before the operation ends, again and again until it returns something else than PHX_IN_PROGRESS: its transfers
  // allow the next step then. An error has failed the group.
  virtual phx_status go_on(const Lane &, uint32_t) { return PHX_OK; }
  // For such an operation, while this rank waits for others of its host: compares its call with those of other hosts.
  // PHX_IN_PROGRESS: they have not come. An error has failed the group.
  virtual phx_status compare() { return PHX_OK; }
  // The ranks of other hosts for which go_on waits.
  virtual std::vector<int> late() const { return {}; }
  // For an operation on symmetric memory: sets where in its block the input of a rank lies. False: the whole input
  // would not fit there.
  virtual bool move_input(int /*group_rank*/, size_t /*offset*/) { return false; }
  // Called when the operation is complete; releases what it holds.
  virtual void end() { symm.reset(); }
  // Whether the first round takes all of the input.
  virtual bool takes_input_at_once() const { return rounds == 1; }
  // Called if the caller may change its input before all of it is put: copies an input that is within the limit.
  virtual void keep_input(const Keeping &keeping) {
    if (in_bytes_ == 0 || in_bytes_ > keeping.limit) return;
    kept_ = keeping.memory.take(in_bytes_);
    std::memcpy(kept_.get(), b_.in, in_bytes_);
    b_.in = kept_.get();
  }

  CallRecord record;
  InputLocation place;  // published with the next round; the engine clears it after the first
  uint64_t even = 0;    // of an all_to_all_v: 1 more than the count that all blocks of this rank have; 0: they differ
  uint32_t rounds = 1;
  size_t reach = kWholeSlot;   // how many bytes of its slot the next `put` may write, and peers until the end
  std::shared_ptr<Symm> symm;  // keeps symmetric memory alive for operations on it
  Net *net = nullptr;          // of a group that spans hosts
  uint32_t calls = 1;          // how many numbers of calls its messages to other hosts take

  // State of the engine.
  uint64_t sequence = 0;
  uint64_t first_call = 0;  // the first of these numbers
  uint64_t first_epoch = 0;
  uint32_t published = 0;
  uint32_t taken = 0;

 protected:
  static constexpr size_t kPieceBytes = 16 << 10;  // a third of a first-level cache

  Buffers b_;
  size_t in_bytes_;  // what `b_.in` points to on this rank
  Kept kept_;
};

// ---- arithmetic that several operations share

// The elements of `bytes`. The sizes of all dtypes are powers of two, and a division would take longer.
inline size_t elements_of(size_t bytes, size_t item) { return bytes >> __builtin_ctzll(item); }
// Elements of whole cache lines that fit in `bytes`.
inline size_t elements_in(size_t bytes, size_t item) { return elements_of(bytes & ~(kLine - 1), item); }
// Elements per part when `count` elements are divided into `parts`: whole cache lines, so that no line has two owners.
inline size_t part_elements(size_t count, size_t item, int parts) {
  const size_t even = parts == 1 ? count : (count + parts - 1) / parts;
  return elements_in(even * item + kLine - 1, item);
}
// The rounds that move `count` elements, `chunk` at a time; at least one, because every collective is also a barrier.
inline uint32_t rounds_for(size_t count, size_t chunk) {
  return count <= chunk ? 1 : static_cast<uint32_t>((count + chunk - 1) / chunk);
}
struct Span {
  size_t begin, count;  // elements
};
// Which of `count` elements lie from `at` on, at most `most`.
inline Span clip(size_t count, size_t at, size_t most) {
  const size_t begin = std::min(at, count);
  return {begin, std::min(most, count - begin)};
}
// How many of `count` elements move in `round`, `chunk` at a time.
inline size_t elements_of_round(size_t count, size_t chunk, uint32_t round) {
  return clip(count, round * chunk, chunk).count;
}

struct OperationDeleter {
  bool on_heap = true;
  void operator()(Operation *operation) const {
    if (on_heap)
      delete operation;
    else
      operation->~Operation();
  }
};
using OperationPtr = std::unique_ptr<Operation, OperationDeleter>;

// What the make_* functions decide by. Only `input_stays` may differ between the ranks of one call, so nothing that
// peers see may depend on it.
struct Plan {
  // Memory for the operations of a blocking call, which end before it does: to allocate takes as long as a small copy.
  struct Room {
    Room() = default;
    Room(const Room &) {}  // a copy is empty
    Room &operator=(const Room &) = delete;
    size_t used = 0;
    alignas(std::max_align_t) char bytes[1024];
  };

  const Lane &lane;
  const Tuning &tuning;
  // The caller leaves its input as it is until the operation is complete, so it need not be copied as a whole.
  bool input_stays;
  // For a group that spans hosts; its operations are those of ops/hosts.h. The lane joins the ranks of this host.
  Net *net = nullptr;
  uint32_t channel = 0;
  Room *room = nullptr;

  template <class T, class... Args>
  OperationPtr make(Args &&...args) const {
    constexpr size_t kAlign = alignof(std::max_align_t), kBytes = (sizeof(T) + kAlign - 1) / kAlign * kAlign;
    static_assert(alignof(T) <= kAlign);
    if (room == nullptr || sizeof room->bytes - room->used < kBytes)
      return OperationPtr(new T(std::forward<Args>(args)...));
    void *const at = room->bytes + std::exchange(room->used, room->used + kBytes);
    return OperationPtr(new (at) T(std::forward<Args>(args)...), OperationDeleter{false});
  }

  // How much moves between two barriers.
  size_t chunk_bytes() const { return std::min<size_t>(lane.slot_bytes(), tuning.chunk_bytes); }
  // The same in elements of whole cache lines.
  size_t chunk_elements(size_t item) const { return elements_in(chunk_bytes(), item); }
  // The same for collectives that move `bytes` from some ranks to others. Unless `bytes` are few there are at least two
  // chunks, so that the readers read the first while the writers write the second. Ranks that share cores take turns
  // anyway.
  size_t pipelined_elements(size_t bytes, size_t item) const {
    // An additional barrier must pay for itself; one_shot_bytes says how many bytes a barrier is worth.
    if (lane.ranks_share_cores() || bytes / 16 < tuning.one_shot_bytes) return chunk_elements(item);
    return std::min(chunk_elements(item), part_elements(bytes / item, item, 2));
  }
};

// Whether an input or output has a block for each rank, on a rank that has one.
constexpr bool has_blocks(Parts parts) { return parts == Parts::kAll || parts == Parts::kAllOnRoot; }

// Moves nothing.
inline OperationPtr make_barrier(const Plan &plan) {
  OperationPtr barrier = plan.make<Operation>(Buffers{}, 0);
  barrier->reach = 0;
  return barrier;
}
// Any collective of a group that spans hosts; there its call on this rank is refused if `why` is not NULL.
OperationPtr make_between_hosts(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                                int root, const char *why = nullptr);
// Resolves PHX_ALGO_AUTO, in the same way on all ranks.
int32_t choose_all_reduce(const Plan &plan, size_t bytes, int32_t algo);
OperationPtr make_all_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int32_t algo);
OperationPtr make_all_gather(const Plan &plan, const Buffers &buffers);
OperationPtr make_reduce_scatter(const Plan &plan, const Buffers &buffers, const Reduction &reduction);
OperationPtr make_all_to_all(const Plan &plan, const Buffers &buffers);
OperationPtr make_all_to_all_v(Group &group, const Plan &plan, const Buffers &buffers);
OperationPtr make_broadcast(const Plan &plan, const Buffers &buffers, int root);
OperationPtr make_reduce(const Plan &plan, const Buffers &buffers, const Reduction &reduction, int root);
OperationPtr make_gather(const Plan &plan, const Buffers &buffers, int root);
OperationPtr make_scatter(const Plan &plan, const Buffers &buffers, int root);
// Makes a collective whose ranks know each other's counts. `algo`: for all_reduce only. Inline for callers with a
// constant kind.
inline OperationPtr make_operation(Kind kind, const Plan &plan, const Buffers &buffers, const Reduction &reduction,
                                   int root, int32_t algo = PHX_ALGO_AUTO) {
  if (__builtin_expect(plan.net != nullptr, 0)) return make_between_hosts(kind, plan, buffers, reduction, root);
  switch (kind) {
    case Kind::kAllReduce: return make_all_reduce(plan, buffers, reduction, algo);
    case Kind::kAllGather:
    case Kind::kAllGatherV: return make_all_gather(plan, buffers);
    case Kind::kReduceScatter:
    case Kind::kReduceScatterV: return make_reduce_scatter(plan, buffers, reduction);
    case Kind::kAllToAll: return make_all_to_all(plan, buffers);
    case Kind::kBroadcast: return make_broadcast(plan, buffers, root);
    case Kind::kReduce: return make_reduce(plan, buffers, reduction, root);
    case Kind::kGather: return make_gather(plan, buffers, root);
    case Kind::kScatter: return make_scatter(plan, buffers, root);
    default: return make_barrier(plan);
  }
}

// Whether a reduction over symmetric memory of `n` ranks takes two steps: each rank reduces one part of all inputs and
// passes the result on through its slot. In one step, each receiver reads the inputs of all ranks. An all_reduce in
// place does neither: its results go straight into all blocks.
inline bool sums_by_parts(Kind kind, bool in_place, int n, int32_t algo) {
  if (kind != Kind::kReduce && (kind != Kind::kAllReduce || in_place)) return false;
  return algo == PHX_ALGO_TWO_SHOT || (algo != PHX_ALGO_ONE_SHOT && n > 2);
}
// An operation on symmetric memory. The input lies `offset` bytes into every rank's block, unless move_input changes
// that for a rank; buffers.in is the input of this rank. algo: PHX_ALGO_*, for all_reduce and reduce only.
OperationPtr make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                       const Reduction &reduction, int root, const Plan &plan, int32_t algo = PHX_ALGO_AUTO);
// A broadcast that is in place on all ranks; the broadcast of make_symm is not.
OperationPtr make_symm_broadcast(std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers, int root,
                                 const Plan &plan);
// `name`: the name of the call, for errors. `round`: the round in which the counts are exchanged.
OperationPtr make_symm_all_to_all_v(Group &group, const char *name, std::shared_ptr<Symm> symm, size_t offset,
                                    const Buffers &buffers, uint32_t round, const Plan &plan);

// ---- coalesced.cpp: several calls as one operation

// Copies inputs that are within the limit into `copies`, because the caller may change them when the start returns.
void keep_inputs(std::vector<CoalescedCall> *calls, const Keeping &keeping, Kept *copies);
OperationPtr make_coalesced(const Plan &plan, const std::vector<CoalescedCall> &calls);

}  // namespace phx
