// Collectives whose input lies in symmetric memory: peers read (in an all_reduce in place also write) the blocks.
//
// There are two barriers and no copy: after the first every input is ready, and after the second no rank reads or
// writes the blocks any more. Reductions in two steps (sums_by_parts) pass their results through the slots in between.

#include "group/group.h"
#include "ops/blocks.h"
#include "ops/bypass.h"
#include "symm/symm.h"

namespace phx {
namespace {

class OnSymm : public Operation {
 protected:
  OnSymm(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers)
      : Operation(buffers, 0), offset_(offset), n_(handle->size()), self_(handle->group_rank()) {
    symm = std::move(handle);
    rounds = 2;
    reach = 0;
  }

  bool move_input(int group_rank, size_t offset) override {
    if (offset > symm->block().size || input_bytes(group_rank) > symm->block().size - offset) return false;
    if (offsets_.empty()) offsets_.assign(n_, offset_);
    offsets_[group_rank] = offset;
    return true;
  }
  virtual size_t input_bytes(int /*group_rank*/) const { return b_.count * b_.item; }

  bool takes_input_at_once() const override { return false; }

  char *at(int group_rank, size_t element) const {
    return symm->buffer(group_rank) + offset_of(group_rank) + element * b_.item;
  }
  size_t offset_of(int group_rank) const { return offsets_.empty() ? offset_ : offsets_[group_rank]; }
  char *output(size_t element) const { return b_.out + element * b_.item; }
  // Copies `count` elements of a rank's input, from its element `begin` on, to the output.
  void fetch(int group_rank, size_t begin, size_t count, kernels::Copy bypass) const {
    deliver_bytes(b_.out, at(group_rank, begin), count * b_.item, bypass);
  }
  // The same to the block of the output that is for that rank.
  void fetch(int group_rank, size_t begin, const Blocks &out, kernels::Copy bypass) const {
    out.fill(group_rank, 0, out.count(group_rank), at(group_rank, begin), bypass);
  }

  void reduce(const Reduction &reduction, char *out, size_t begin, size_t count, bool bypass) const {
    const void *inputs[kMaxGroupSize];
    for (int i = 0; i < n_; ++i) inputs[i] = at(i, begin);
    if (count != 0) (bypass ? reduction.streaming : reduction.fn)(out, inputs, n_, count, n_, reduction.scale);
  }

  const size_t offset_;
  std::vector<size_t> offsets_;  // by group rank; empty: offset_ for all
  const int n_;
  const int self_;
};

// Up to this group size each result is written to all ranks while their cache lines are at hand. Measured with two and
// with four ranks; with more, a core would read and write more streams than that.
constexpr int kFewRanks = 4;

class Symmetric final : public OnSymm {
 public:
  Symmetric(Kind kind, std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
            int root, const Tuning &tuning)
      : OnSymm(std::move(handle), offset, buffers),
        kind_(kind),
        reduction_(reduction),
        root_(root),
        in_(input_blocks(buffers, n_)),
        out_(output_blocks(buffers, n_)),
        push_(std::max<size_t>(tuning.push_bytes / buffers.item, 1)),
        bypass_(traits_of(kind).reduces ? BypassUse::kSymmReduce : BypassUse::kSymmCopy,
                is_small(tuning) ? 0 : results() * buffers.item, tuning.streaming_bytes,
                !is_small(tuning) && receives() && (traits_of(kind).root != Root::kNone || b_.in != b_.out)) {}

  void keep_own(const Lane &, uint32_t round) override {
    const CollectiveTraits &traits = traits_of(kind_);
    if (round != 0 || !receives() || traits.reduces || traits.root == Root::kGives) return;
    const Bypass::Clock clock(bypass_);
    fetch(self_, has_blocks(traits.in) ? in_.start(self_) : 0, out_, bypass_.copy());
  }

  phx_status take(const Lane &, uint32_t round, uint64_t) override {
    const Bypass::Clock clock(bypass_);
    if (round == 0) move();
    return PHX_OK;
  }

 private:
  size_t input_bytes(int group_rank) const override {
    return b_.item * (traits_of(kind_).in == Parts::kOne ? out_.count(group_rank) : in_.total());
  }
  void move() const {
    const CollectiveTraits &traits = traits_of(kind_);
    if (kind_ == Kind::kAllReduce && b_.in == b_.out) return reduce_in_place();
    if (!receives()) return;
    const bool has_own = has_blocks(traits.in);  // of an input, one block is for this rank
    const size_t begin = has_own ? in_.start(self_) : 0;
    if (traits.reduces)
      reduce(reduction_, b_.out, begin, has_own ? in_.count(self_) : b_.count, bool{bypass_});
    else if (traits.root == Root::kGives)
      fetch(root_, begin, b_.count, bypass_.copy());
    else
      gather(begin);
  }

  // Fetches the block of every other rank that begins at `element` of its input.
  void gather(size_t element) const {
    for (int i = 1; i < n_; ++i) {
      const int from = (self_ + i) % n_;  // so that ranks do not all read from the same one
      fetch(from, element, out_, bypass_.copy());
    }
  }
  // Whether what follows need not be known.
  bool is_small(const Tuning &tuning) const {
    return b_.lists == nullptr && b_.count * b_.item * static_cast<size_t>(n_) < tuning.streaming_bytes / 4;
  }
  // The elements of the results, or of all that is added up to them.
  size_t results() const {
    const CollectiveTraits &traits = traits_of(kind_);
    if (has_blocks(traits.out)) return out_.total();
    return traits.reduces && traits.in == Parts::kAll ? in_.total() : b_.count;
  }
  // Whether this rank gets results. Those of a broadcast are out of place: the receivers' buffers may lie anywhere.
  bool receives() const {
    const Root root = traits_of(kind_).root;
    return root == Root::kNone || (root == Root::kTakes) == (self_ == root_) || kind_ == Kind::kScatter;
  }

  // Two-shot without staging: this rank alone touches its part, on every rank, so it may overwrite it everywhere.
  void reduce_in_place() const {
    const size_t part = part_elements(b_.count, b_.item, n_);
    const Span mine = clip(b_.count, part * self_, part);
    if (n_ <= kFewRanks) {
      const void *blocks[kFewRanks];
      for (int i = 0; i < n_; ++i) blocks[i] = at(i, mine.begin);
      const auto into_all = kernels::find_reduce(reduction_.dtype, reduction_.op, kernels::Results::kIntoAll);
      if (mine.count != 0) into_all(nullptr, blocks, n_, mine.count, n_, reduction_.scale);
      return;
    }
    // Sums stay in the cache until they are pushed.
    for (size_t begin = mine.begin, end = begin + mine.count; begin < end; begin += push_) {
      const size_t count = std::min(push_, end - begin);
      reduce(reduction_, at(self_, begin), begin, count, false);
      for (int i = 1; i < n_; ++i) copy_bytes(at((self_ + i) % n_, begin), at(self_, begin), count * b_.item);
    }
  }

  const Kind kind_;
  const Reduction reduction_;
  const int root_;
  const Blocks in_, out_;  // of a collective that has blocks there
  const size_t push_;      // elements
  Bypass bypass_;
};

// An out-of-place all_reduce, or a reduce, in two steps (sums_by_parts). Rank p reduces part p of all inputs and puts
// the result into its slot, from where the receivers fetch it. So each input is read once, and not n times.
//
// After the first arrival all inputs are ready. Each later arrival says that the next chunk of every part is in the
// slots, and the last one also that no rank reads inputs any more.
class SymmetricSum final : public OnSymm {
 public:
  // root < 0: all ranks receive the result.
  SymmetricSum(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, const Reduction &reduction,
               int root, const Plan &plan)
      : OnSymm(std::move(handle), offset, buffers),
        reduction_(reduction),
        wants_(root < 0 || root == self_),
        shares_(root < 0 || root != self_),
        bypass_(BypassUse::kSymmSum, buffers.count * buffers.item, plan.tuning.streaming_bytes, wants_),
        part_(part_elements(buffers.count, buffers.item, n_)),
        chunk_(std::min(part_, plan.chunk_elements(buffers.item))) {
    rounds = 1 + (part_ == 0 ? 1 : rounds_for(part_, chunk_));
    reach = chunk_ * b_.item;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0) return;
    const Bypass::Clock clock(bypass_);
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
    const Bypass::Clock clock(bypass_);
    for (int i = 1; i < n_ && round > 0 && wants_; ++i) {
      const int from = (self_ + i) % n_;
      const Span theirs = span(from, round - 1);
      deliver_bytes(output(theirs.begin), lane.data(from, epoch), theirs.count * b_.item, bypass_.copy());
    }
    return PHX_OK;
  }

 private:
  // Which elements the chunk of a rank's part has.
  Span span(int group_rank, uint32_t chunk) const {
    const Span part = clip(b_.count, part_ * group_rank, part_), some = clip(part.count, chunk * chunk_, chunk_);
    return {part.begin + some.begin, some.count};
  }

  const Reduction reduction_;
  const bool wants_;   // this rank receives the whole result
  const bool shares_;  // other ranks fetch the result of this rank's part
  Bypass bypass_;
  const size_t part_;   // elements
  const size_t chunk_;  // elements of a part that move between two arrivals
};

// A broadcast in place on all ranks. The root, which has nothing to fetch, writes the last of `n` parts of every block
// itself, so that its core moves as many bytes as that of a reader.
class SymmetricBroadcast final : public OnSymm {
 public:
  SymmetricBroadcast(std::shared_ptr<Symm> handle, size_t offset, const Buffers &buffers, int root,
                     const Tuning &tuning)
      : OnSymm(std::move(handle), offset, buffers),
        root_(root),
        fetched_(std::min(buffers.count, part_elements(buffers.count, buffers.item, n_) * (n_ - 1))),
        bypass_(self_ == root ? BypassUse::kSymmBroadcastRoot : BypassUse::kSymmBroadcast, buffers.count * buffers.item,
                tuning.streaming_bytes) {}

  phx_status take(const Lane &, uint32_t round, uint64_t) override {
    const Bypass::Clock clock(bypass_);
    if (round == 0) move();
    return PHX_OK;
  }

 private:
  void move() const {
    if (self_ != root_) {
      deliver_bytes(at(self_, 0), at(root_, 0), fetched_ * b_.item, bypass_.copy());
      return;
    }
    for (int i = 1; i < n_; ++i)
      deliver_bytes(at((self_ + i) % n_, fetched_), at(self_, fetched_), (b_.count - fetched_) * b_.item,
                    bypass_.copy());
  }

  const int root_;
  const size_t fetched_;  // elements that each reader fetches
  Bypass bypass_;
};

// Where a block begins on another rank depends on counts that only that rank has, so the ranks exchange their counts.
class SymmetricAllToAllV final : public OnSymm {
 public:
  SymmetricAllToAllV(Group &group, const char *name, std::shared_ptr<Symm> handle, size_t offset,
                     const Buffers &buffers, uint32_t round)
      : OnSymm(std::move(handle), offset, buffers),
        round_(round),
        in_(input_blocks(buffers, n_)),
        out_(output_blocks(buffers, n_)),
        counts_(group, name, in_, out_),
        bypass_(BypassUse::kSymmCopy, out_.total() * b_.item, group.tuning().streaming_bytes) {
    rounds = round + 2;
    reach = counts_.bytes();
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == round_) counts_.put(lane, epoch);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round != round_) return PHX_OK;
    std::vector<size_t> room(n_);
    for (int i = 0; i < n_; ++i) room[i] = (symm->block().size - offset_of(i)) / b_.item;
    PHX_TRY(counts_.read(lane, epoch, &room, nullptr));
    const Bypass::Clock clock(bypass_);
    for (int from = 0; from < n_; ++from) {
      size_t begin = 0;
      for (int to = 0; to < self_; ++to) begin += counts_.sent(from, to);
      fetch(from, begin, out_, bypass_.copy());
    }
    return PHX_OK;
  }

 private:
  size_t input_bytes(int) const override { return 0; }  // not known yet: checked when the counts are read

  const uint32_t round_;
  const Blocks in_, out_;
  CountMatrix counts_;
  Bypass bypass_;
};

}  // namespace

OperationPtr make_symm(Kind kind, std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers,
                       const Reduction &reduction, int root, const Plan &plan, int32_t algo) {
  if (sums_by_parts(kind, buffers.out == buffers.in, symm->size(), algo)) {
    const int to = kind == Kind::kReduce ? root : -1;
    return plan.make<SymmetricSum>(std::move(symm), offset, buffers, reduction, to, plan);
  }
  return plan.make<Symmetric>(kind, std::move(symm), offset, buffers, reduction, root, plan.tuning);
}

OperationPtr make_symm_broadcast(std::shared_ptr<Symm> symm, size_t offset, const Buffers &buffers, int root,
                                 const Plan &plan) {
  return plan.make<SymmetricBroadcast>(std::move(symm), offset, buffers, root, plan.tuning);
}

OperationPtr make_symm_all_to_all_v(Group &group, const char *name, std::shared_ptr<Symm> symm, size_t offset,
                                    const Buffers &buffers, uint32_t round, const Plan &plan) {
  return plan.make<SymmetricAllToAllV>(group, name, std::move(symm), offset, buffers, round);
}

}  // namespace phx
