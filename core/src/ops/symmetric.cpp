// Collectives whose input lies in symmetric memory: peers read (and for all_reduce in place, write) the blocks
// themselves.
//
// Two barriers and no copy: after the first every input is ready, after the second nobody reads or writes any more.
// Sums that are made by parts pass through the slots in between.
#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "group/group.h"
#include "group/lane.h"
#include "ops/operation.h"
#include "symm/symm.h"

namespace phx {
namespace {

class OnSymm : public SymmOperation {
 protected:
  OnSymm(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers)
      : SymmOperation(buffers), offsets_(handle->size(), offset), n_(handle->size()), self_(handle->group_rank()) {
    symm = std::move(handle);
    rounds = 2;
  }

  bool move_input(int group_rank, size_t offset) override {
    if (offset > symm->block().size || input_bytes(group_rank) > symm->block().size - offset) return false;
    offsets_[group_rank] = offset;
    return true;
  }
  virtual size_t input_bytes(int group_rank) const = 0;

  bool takes_input_at_once() const override { return false; }
  void put(const Lane &, uint32_t, uint64_t) override {}
  phx_status take(const Lane &, uint32_t round, uint64_t) override {
    if (round == 0) move();
    return PHX_OK;
  }
  virtual void move() const = 0;

  char *at(int group_rank, size_t element) const {
    return symm->buffer(group_rank) + offsets_[group_rank] + element * b_.item;
  }
  char *output(size_t element) const { return b_.out + element * b_.item; }

  void reduce(const Reduction &reduction, char *out, size_t begin, size_t count, bool streaming) const {
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n_; ++i) inputs[i] = at(i, begin);
    if (count != 0) (streaming ? reduction.streaming : reduction.fn)(out, inputs, n_, count, n_, reduction.scale);
  }

  std::vector<size_t> offsets_;  // by group rank
  const int n_;
  const int self_;
};

// Up to here sums are written to all ranks while their lines are at hand. Measured with two and with four ranks; with
// more a core would read and write more streams than that.
constexpr int kFewRanks = 4;

// Those with one count for all.
class Symmetric final : public OnSymm {
 public:
  Symmetric(Kind kind, std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
            int root, const Tuning &tuning)
      : OnSymm(std::move(handle), offset, buffers),
        kind_(kind),
        reduction_(reduction),
        root_(root),
        push_(std::max<size_t>(tuning.push_bytes / buffers.item, 1)),
        streaming_bytes_(tuning.streaming_bytes) {}

 private:
  size_t input_bytes(int) const override {
    const bool segments = kind_ == Kind::kReduceScatter || kind_ == Kind::kAllToAll || kind_ == Kind::kScatter;
    return b_.count * b_.item * (segments ? n_ : 1);
  }
  void move() const override {
    switch (kind_) {
      case Kind::kAllReduce:
        if (b_.out == b_.in)
          reduce_in_place();
        else
          reduce(reduction_, b_.out, 0, b_.count, is_large(1));
        return;
      case Kind::kReduceScatter: reduce(reduction_, b_.out, self_ * b_.count, b_.count, is_large(n_)); return;
      case Kind::kReduce:
        if (self_ == root_) reduce(reduction_, b_.out, 0, b_.count, is_large(1));
        return;
      case Kind::kAllGather: gather(); return;
      case Kind::kGather:
        if (self_ == root_) gather();
        return;
      case Kind::kAllToAll:
        for (int i = 0; i < n_; ++i) deliver((self_ + i) % n_, self_ * b_.count, n_);
        return;
      case Kind::kScatter: deliver_bytes(b_.out, at(root_, self_ * b_.count), b_.count * b_.item, is_large(1)); return;
      case Kind::kBroadcast:  // of a root whose readers may have their buffers anywhere
        if (self_ != root_) deliver_bytes(b_.out, at(root_, 0), b_.count * b_.item, is_large(1));
        return;
      default: return;
    }
  }

  void gather() const {
    for (int i = 0; i < n_; ++i) deliver((self_ + i) % n_, 0, n_);
  }
  void deliver(int from, size_t element, size_t parts) const {
    deliver_bytes(output(from * b_.count), at(from, element), b_.count * b_.item, is_large(parts));
  }
  // Whether as many blocks are too much to stay in the cache.
  bool is_large(size_t blocks) const { return b_.count * b_.item * blocks >= streaming_bytes_; }

  // Two-shot without staging: this rank alone touches its part, on every rank, so it may overwrite it everywhere.
  void reduce_in_place() const {
    const size_t part = part_elements(b_.count, b_.item, n_);
    size_t begin = std::min(b_.count, part * self_);
    const size_t end = std::min(b_.count, begin + part);
    if (n_ <= kFewRanks) {
      const void *blocks[kFewRanks];
      for (int i = 0; i < n_; ++i) blocks[i] = at(i, begin);
      const auto into_all = kernels::find_reduce_into_all(reduction_.dtype, reduction_.op);
      if (begin < end) into_all(nullptr, blocks, n_, end - begin, n_, reduction_.scale);
      return;
    }
    for (; begin < end; begin += push_) {  // sums stay in the cache until they are pushed
      const size_t count = std::min(push_, end - begin);
      reduce(reduction_, at(self_, begin), begin, count, false);
      for (int i = 1; i < n_; ++i) copy_bytes(at((self_ + i) % n_, begin), at(self_, begin), count * b_.item);
    }
  }

  const Kind kind_;
  const Reduction reduction_;
  const int root_;
  const size_t push_;  // elements
  const size_t streaming_bytes_;
};

// all_reduce that is not in place, and reduce, of more than two ranks. Rank p sums part p of all inputs and puts the
// sum into its slot, from where those who want it fetch it. So a rank reads the inputs once, and not n times.
//
// After the first arrival all inputs are ready. Each further one says that the next chunk of every part is in the
// slots, and the last one also that nobody reads inputs any more.
class SymmetricSum final : public OnSymm {
 public:
  // root < 0: all ranks want the sum.
  SymmetricSum(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
               int root, const Plan &plan)
      : OnSymm(std::move(handle), offset, buffers),
        reduction_(reduction),
        wants_(root < 0 || root == self_),
        shares_(root < 0 || root != self_),
        streaming_(buffers.count * buffers.item >= plan.tuning.streaming_bytes),
        part_(part_elements(buffers.count, buffers.item, n_)),
        chunk_(std::min(part_, plan.chunk_elements(buffers.item))) {
    rounds = 1 + (part_ == 0 ? 1 : rounds_for(part_, chunk_));
    reach = chunk_ * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) return;
    const Span mine = span(self_, round - 1);
    // In pieces that stay in the first-level cache until they are passed on.
    const size_t piece = kPieceBytes / b_.item;
    for (size_t done = 0; done < mine.count; done += piece) {
      const size_t count = std::min(piece, mine.count - done);
      char *const slot = lane.data(self_, epoch) + done * b_.item;
      char *const sums = wants_ ? output(mine.begin + done) : slot;
      reduce(reduction_, sums, mine.begin + done, count, false);
      if (wants_ && shares_) put_one_way(slot, sums, count * b_.item);
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    for (int i = 1; i < n_ && round > 0 && wants_; ++i) {
      const int from = (self_ + i) % n_;
      const Span theirs = span(from, round - 1);
      deliver_bytes(output(theirs.begin), lane.data(from, epoch), theirs.count * b_.item, streaming_);
    }
    return PHX_OK;
  }

 private:
  static constexpr size_t kPieceBytes = 16 << 10;  // a third of a first-level cache
  struct Span {
    size_t begin;  // elements
    size_t count;
  };

  size_t input_bytes(int) const override { return b_.count * b_.item; }
  void move() const override {}
  // The chunk of a rank's part.
  Span span(int group_rank, uint32_t chunk) const {
    const size_t begin = std::min(b_.count, part_ * group_rank), end = std::min(b_.count, begin + part_);
    const size_t first = std::min(end, begin + chunk * chunk_);
    return {first, std::min(end - first, chunk_)};
  }

  const Reduction reduction_;
  const bool wants_;   // the whole sum
  const bool shares_;  // the sum of its part with others
  const bool streaming_;
  const size_t part_;   // elements
  const size_t chunk_;  // of a part, as much as passes between two arrivals
};

// In place on all ranks. The root, which has nothing to fetch, writes the last of `n` parts of every block itself: its
// core moves as many bytes as that of a reader.
class SymmetricBroadcast final : public OnSymm {
 public:
  SymmetricBroadcast(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, int root,
                     const Tuning &tuning)
      : OnSymm(std::move(handle), offset, buffers),
        root_(root),
        fetched_(std::min(buffers.count, part_elements(buffers.count, buffers.item, n_) * (n_ - 1))),
        streaming_(buffers.count * buffers.item >= tuning.streaming_bytes) {}

 private:
  size_t input_bytes(int) const override { return b_.count * b_.item; }
  void move() const override {
    if (self_ != root_) {
      deliver_bytes(at(self_, 0), at(root_, 0), fetched_ * b_.item, streaming_);
      return;
    }
    for (int i = 1; i < n_; ++i)
      deliver_bytes(at((self_ + i) % n_, fetched_), at(self_, fetched_), (b_.count - fetched_) * b_.item, streaming_);
  }

  const int root_;
  const size_t fetched_;  // elements that each reader fetches
  const bool streaming_;
};

// all_gather_v and reduce_scatter_v.
class SymmetricV final : public OnSymm {
 public:
  SymmetricV(Kind kind, std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
             const size_t *counts, const Tuning &tuning)
      : OnSymm(std::move(handle), offset, buffers), kind_(kind), reduction_(reduction), counts_(counts, counts + n_) {
    size_t total = 0;
    for (const size_t count : counts_) {
      starts_.push_back(total);
      total += count;
    }
    streaming_ = total * b_.item >= tuning.streaming_bytes;
  }

 private:
  size_t input_bytes(int group_rank) const override {
    const bool all = kind_ == Kind::kReduceScatterV;
    return (all ? starts_[n_ - 1] + counts_[n_ - 1] : counts_[group_rank]) * b_.item;
  }
  void move() const override {
    if (kind_ == Kind::kReduceScatterV) {
      reduce(reduction_, b_.out, starts_[self_], counts_[self_], streaming_);
      return;
    }
    for (int i = 0; i < n_; ++i) {
      const int from = (self_ + i) % n_;
      deliver_bytes(output(starts_[from]), at(from, 0), counts_[from] * b_.item, streaming_);
    }
  }

  const Kind kind_;
  const Reduction reduction_;
  const std::vector<size_t> counts_;
  std::vector<size_t> starts_;
  bool streaming_ = false;
};

// Where a block begins on another rank depends on counts that only that rank has, so they pass through the slots.
class SymmetricAllToAllV final : public OnSymm {
 public:
  SymmetricAllToAllV(Group &group, const char *name, std::shared_ptr<Symm> handle, size_t offset,
                     const Buffers &buffers, const size_t *in_counts, const size_t *out_counts, uint32_t round)
      : OnSymm(std::move(handle), offset, buffers),
        group_(group),
        name_(name),
        round_(round),
        in_counts_(in_counts, in_counts + n_),
        out_counts_(out_counts, out_counts + n_) {
    size_t total = 0;
    for (const size_t count : out_counts_) total += count;
    streaming_ = total * b_.item >= group.tuning().streaming_bytes;
    rounds = round + 2;
    reach = n_ * 2 * sizeof(uint64_t);
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round != round_) return;
    for (int i = 0; i < n_; ++i) {
      const uint64_t pair[2] = {in_counts_[i], out_counts_[i]};
      std::memcpy(lane.data(self_, epoch) + i * sizeof pair, pair, sizeof pair);
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round != round_) return PHX_OK;
    const size_t row = static_cast<size_t>(n_) * 2;
    // Read once: what has been checked must be what is used, whatever a peer writes meanwhile.
    std::vector<uint64_t> matrix(n_ * row);
    for (int rank = 0; rank < n_; ++rank)
      std::memcpy(&matrix[rank * row], lane.data(rank, epoch), row * sizeof(uint64_t));
    bool spoiled = false;  // a peer wrote into this rank's slot
    for (int peer = 0; peer < n_; ++peer) {
      uint64_t *pair = &matrix[self_ * row + peer * 2];
      spoiled = spoiled || pair[0] != in_counts_[peer] || pair[1] != out_counts_[peer];
      pair[0] = in_counts_[peer];
      pair[1] = out_counts_[peer];
    }
    const phx_status status = check(matrix);
    if (status != PHX_OK)  // on every rank alike, unless one of them lies
      return spoiled ? group_.fail_with(last_error(), true) : status;
    size_t out = 0;
    for (int from = 0; from < n_; ++from) {
      uint64_t begin = 0;
      for (int to = 0; to < self_; ++to) begin += matrix[from * row + to * 2];
      deliver_bytes(output(out), at(from, begin), out_counts_[from] * b_.item, streaming_);
      out += out_counts_[from];
    }
    return PHX_OK;
  }

 private:
  void move() const override {}
  size_t input_bytes(int) const override { return 0; }  // what that rank's counts say, checked below

  // matrix[rank][peer]: what `rank` sends to `peer`, and what it expects of it.
  phx_status check(const std::vector<uint64_t> &matrix) const {
    const auto count = [&](int rank, int peer, int side) { return matrix[(rank * n_ + peer) * 2 + side]; };
    for (int from = 0; from < n_; ++from) {
      uint64_t end = 0;  // of what `from` sends, in elements
      for (int to = 0; to < n_; ++to) {
        const uint64_t sent = count(from, to, 0), expected = count(to, from, 1);
        if (sent != expected)
          return fail(PHX_ERR_MISMATCH, name_,
                      "%s: group rank %d sends %" PRIu64 " elements to group rank %d, which expects %" PRIu64
                      ". in_counts[j] on rank i must equal out_counts[i] on rank j.",
                      name_, from, sent, to, expected);
        if (sent > (symm->block().size - offsets_[from]) / b_.item - end)
          return fail(PHX_ERR_MISMATCH, name_, "%s: the counts of group rank %d go beyond its block", name_, from);
        end += sent;
      }
    }
    return PHX_OK;
  }

  Group &group_;
  const char *const name_;
  const uint32_t round_;
  const std::vector<size_t> in_counts_, out_counts_;
  bool streaming_ = false;
};

}  // namespace

SymmOperationPtr make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                           const Reduction &reduction, int root, const Plan &plan, int32_t algo) {
  if (sums_by_parts(kind, buffers.out == buffers.in, symm->size(), algo)) {
    const int to = kind == Kind::kReduce ? root : -1;
    return std::make_unique<SymmetricSum>(std::move(symm), offset, buffers, reduction, to, plan);
  }
  return std::make_unique<Symmetric>(kind, std::move(symm), offset, buffers, reduction, root, plan.tuning);
}

SymmOperationPtr make_symm_broadcast(std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers, int root,
                                     const Tuning &tuning) {
  return std::make_unique<SymmetricBroadcast>(std::move(symm), offset, buffers, root, tuning);
}

SymmOperationPtr make_symm_v(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                             const Reduction &reduction, const size_t *counts, const Tuning &tuning) {
  return std::make_unique<SymmetricV>(kind, std::move(symm), offset, buffers, reduction, counts, tuning);
}

SymmOperationPtr make_symm_all_to_all_v(Group &group, const char *name, std::shared_ptr<Symm> symm, size_t offset,
                                        const Buffers &buffers, const size_t *in_counts, const size_t *out_counts,
                                        uint32_t round) {
  return std::make_unique<SymmetricAllToAllV>(group, name, std::move(symm), offset, buffers, in_counts, out_counts,
                                              round);
}

}  // namespace phx
