// Collectives on ordinary buffers whose inputs lie in symmetric memory. Such inputs are read where they lie; the other
// calls of a list are done as if they were a list of their own.
//
// A single call publishes where its input lies in the header of its slot (InputLocation), and leaves the slot empty.
// For a list the header says that the slot has a table of such locations, one for each call that is large enough. A
// rank that has no such input but can read those of others (kReads) stages the whole list. When all ranks have arrived,
// each call is decided by the locations of all ranks, and so in the same way on all ranks. If a rank cannot read at
// all, or a single call cannot be done directly, the slots that were left empty are filled after all.
//
// In a broadcast or a scatter only the root has an input, which the other ranks look up. A rank that does not find it,
// because it has freed its part of that allocation, says so in a second arrival. All ranks wait for that arrival
// anyway, because only then may the root change its input. A call of which any rank missed the input is done with the
// rest.

#include "base/hash.h"
#include "ops/call.h"
#include "symm/table.h"

namespace phx {
namespace {

// Below kSmallestInput a copy costs less than a second barrier. The limit is higher on a crowded host, where a barrier
// takes long because ranks wait for their turn on a core.
constexpr size_t kSmallestCrowded = size_t{256} << 10;

bool only_root_gives(Kind kind) { return traits_of(kind).root == Root::kGives; }

// A call that can perhaps be done directly, which means that inputs are read where they lie.
struct Candidate {
  CoalescedCall call;
  size_t index = 0;        // in the list
  InputLocation place;     // of this rank's input, if it can be read there
  OperationPtr direct;     // NULL: not needed, or its symmetric memory is not known yet
  bool is_direct = false;  // the same on all ranks
  bool missed = false;     // this rank has to read the root's input and does not find it
};

class ZeroCopy final : public Operation {
 public:
  // `calls`: the list; empty for a single call, which is the only candidate. `staged`: the operation to run if nothing
  // can be done directly. For a list it is NULL if this rank publishes a table: it is made when it is needed.
  ZeroCopy(const Call &call, const Plan &plan, std::vector<CoalescedCall> calls, std::vector<Candidate> candidates,
           OperationPtr staged)
      : Operation({}, 0),
        group_(call.group()),
        engine_(call.engine()),
        plan_(plan),
        is_list_(!calls.empty()),
        n_(plan.lane.group_size()),
        self_(plan.lane.group_rank()),
        calls_(std::move(calls)),
        candidates_(std::move(candidates)),
        staged_(std::move(staged)),
        left_(std::max<size_t>(calls_.size(), 1)) {
    place = is_list_ ? InputLocation{staged_ == nullptr ? 1 : kReads, 0} : candidates_[0].place;
    reach = !is_list_ ? 0 : staged_ == nullptr ? candidates_.size() * sizeof(InputLocation) : staged_->reach;
    rounds = 2;  // at least: no later operation may be published before the ranks have decided
    if (staged_ != nullptr) even = staged_->even;
  }

  bool takes_from_places(const Lane &lane, uint64_t epoch) override {
    if (rest_ == nullptr && !by_places_) {
      by_places_ = choose(lane, epoch);
      if (by_places_) {
        begin_direct();
      } else {
        if (staged_ == nullptr) staged_ = make_coalesced(plan_, calls_);
        begin(staged_.get(), 0);
      }
    }
    return by_places_;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (is_rest(round)) return rest_->put(lane, round - base_, epoch);
    char *const slot = lane.data(self_, epoch);
    if (round > 0) {  // the header says whether this rank missed any input, and the slot says which
      for (const Candidate &candidate : candidates_)
        if (candidate.missed) place.key = kReads;
      for (size_t k = 0; k < candidates_.size() && place.key != 0; ++k) slot[k] = candidates_[k].missed;
    } else if (is_list_ && staged_ != nullptr) {
      staged_->first_epoch = epoch;
      staged_->put(lane, 0, epoch);
    } else if (is_list_) {
      for (size_t k = 0; k < candidates_.size(); ++k)
        std::memcpy(slot + k * sizeof(InputLocation), &candidates_[k].place, sizeof(InputLocation));
    }
  }

  void keep_own(const Lane &lane, uint32_t round) override {
    if (is_rest(round)) rest_->keep_own(lane, round - base_);
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (is_rest(round)) {
      if (round == 0) rest_->keep_own(lane, 0);  // it was not known when this round was published
      const phx_status status = rest_->take(lane, round - base_, epoch);
      rounds = base_ + rest_->rounds;
      return status;
    }
    if (round == 0) {
      for (const Candidate &candidate : candidates_)
        if (candidate.is_direct && !candidate.missed) {
          candidate.direct->keep_own(lane, 0);
          candidate.direct->take(lane, 0, epoch);
        }
    } else if (asks_) {
      collect_missed(lane, epoch);
    }
    return PHX_OK;
  }

  bool exclusive() const override { return rest_ != nullptr && rest_->exclusive(); }
  bool takes_input_at_once() const override { return false; }
  void keep_input(const Keeping &keeping) override {
    if (!is_list_) return;  // a single call has more than the limit, otherwise it would be staged
    if (staged_ != nullptr) staged_->keep_input(keeping);
    keep_inputs(&calls_, keeping, &kept_);
  }
  void end() override {
    rest_ = nullptr;
    candidates_.clear();
    staged_.reset();
  }

 private:
  bool is_rest(uint32_t round) const { return rest_ != nullptr && round >= base_; }

  // Where a candidate's input lies on that rank.
  InputLocation place_of(const Lane &lane, uint64_t epoch, int rank, size_t candidate) const {
    InputLocation at = lane.place(rank, epoch);
    if (!is_list_) return at;
    if (at.leaves_slot_empty()) {
      std::memcpy(&at, lane.data(rank, epoch) + candidate * sizeof(InputLocation), sizeof at);
      return at;
    }
    const CoalescedCall &call = candidates_[candidate].call;
    return {only_root_gives(call.kind()) && call.root() != rank ? kReads : 0, 0};
  }

  // Decides which calls are done directly, and marks the inputs that this rank has to read and cannot find. False: no
  // call is, and the slots that were left empty are filled. If slots have tables it is true even if no call is done
  // directly, because a table must stay in its slot while other ranks may read it.
  bool choose(const Lane &lane, uint64_t epoch) {
    bool any = false;
    for (int i = 0; i < n_; ++i) {
      const InputLocation &at = lane.place(i, epoch);
      if (at.key == 0) return false;
      any = any || at.leaves_slot_empty();
    }
    if (!any) return false;
    for (size_t k = 0; k < candidates_.size(); ++k) {
      Candidate &candidate = candidates_[k];
      const CoalescedCall &call = candidate.call;
      const bool rooted = only_root_gives(call.kind());
      // Copied once, so that what is used is what was checked.
      const InputLocation from = place_of(lane, epoch, rooted ? call.root() : self_, k);
      if (!from.leaves_slot_empty()) continue;
      if (rooted && candidate.direct == nullptr) find_root(call, from.key, &candidate);
      bool fits = true;
      bool inside = candidate.direct != nullptr && (!rooted || candidate.direct->move_input(call.root(), from.offset));
      for (int i = 0; i < n_; ++i) {
        const InputLocation at = place_of(lane, epoch, i, k);
        fits = fits && (rooted ? at.key != 0 : at.key == from.key);
        if (!rooted) inside = inside && candidate.direct->move_input(i, at.offset);
      }
      if (!fits) continue;
      if (!inside && !rooted) continue;  // the same on all ranks
      candidate.is_direct = true;
      candidate.missed = !inside;
      asks_ = asks_ || rooted;
      --left_;
      ++count_;
    }
    return is_list_ || count_ != 0;
  }

  void find_root(const CoalescedCall &call, uint64_t key, Candidate *candidate) {
    std::shared_ptr<Symm> symm = SymmDirectory::of_process().find_key(group_.members(), self_, key);
    if (symm != nullptr)
      candidate->direct = make_symm(call.kind(), std::move(symm), 0, call.buffers, call.reduction, call.root(), plan_);
  }

  void begin_direct() {
    if (asks_) {
      reach = candidates_.size();
      return;
    }
    engine_.count_zero_copies(count_);
    if (is_list_)
      begin_rest(1);
    else  // the direct operation may have more than two rounds
      begin(candidates_[0].direct.get(), 0);
  }

  // Moves the calls of which any rank missed the input to the rest.
  void collect_missed(const Lane &lane, uint64_t epoch) {
    place = {};
    for (int i = 0; i < n_; ++i) {
      if (lane.place(i, epoch).key == 0) continue;
      const char *const slot = lane.data(i, epoch);
      for (size_t k = 0; k < candidates_.size(); ++k) {
        bool &direct = candidates_[k].is_direct;
        if (slot[k] == 0 || !direct) continue;
        direct = false;
        ++left_;
        --count_;
      }
    }
    engine_.count_zero_copies(count_);
    begin_rest(2);
  }

  // Begins the calls that are not done directly, if there are any, in round `base`.
  void begin_rest(uint32_t base) {
    if (left_ == 0) return;
    if (is_list_) {
      std::vector<CoalescedCall> rest;
      auto candidate = candidates_.begin();
      for (size_t i = 0; i < calls_.size(); ++i) {
        const bool is_candidate = candidate != candidates_.end() && candidate->index == i;
        if (!is_candidate || !candidate->is_direct) rest.push_back(calls_[i]);
        if (is_candidate) ++candidate;
      }
      staged_ = make_coalesced(plan_, rest);
    }
    begin(staged_.get(), base);
  }

  void begin(Operation *operation, uint32_t base) {
    rest_ = operation;
    base_ = base;
    rest_->first_epoch = first_epoch + base;
    rounds = base + rest_->rounds;
    reach = rest_->reach;
  }

  Group &group_;
  Engine &engine_;
  const Plan plan_;
  const bool is_list_;
  const int n_, self_;
  std::vector<CoalescedCall> calls_;
  std::vector<Candidate> candidates_;
  OperationPtr staged_;  // stages all calls, or the rest
  size_t left_;          // the number of calls that are not done directly
  bool by_places_ = false;
  bool asks_ = false;          // whether a rank could miss an input
  size_t count_ = 0;           // the number of calls that are done directly
  Operation *rest_ = nullptr;  // the operation that has all rounds from `base_` on
  uint32_t base_ = 0;
};

size_t offset_in(const Symm &symm, const char *in) {
  return static_cast<size_t>(in - static_cast<const char *>(symm.block().base));
}

// The location of an input. Its key stands for what must be the same on all ranks if they are to read each other's
// inputs: the allocation, and whether the call is in place.
InputLocation place_in(const Symm &symm, Kind kind, const Buffers &buffers) {
  if (only_root_gives(kind)) return {symm.key(), offset_in(symm, buffers.in)};
  const uint64_t facts[2] = {symm.key(), kind == Kind::kAllReduce && buffers.in == buffers.out};
  return {hash_words(facts) | 1, offset_in(symm, buffers.in)};
}

// The calls of at least kSmallestInput bytes, as packing smaller ones costs less than looking them up; the same calls
// on all ranks, and no more than a slot has room for.
std::vector<Candidate> candidates_of(const std::vector<CoalescedCall> &calls, const Lane &lane) {
  std::vector<Candidate> candidates;
  for (size_t i = 0; i < calls.size() && candidates.size() < lane.slot_bytes() / sizeof(InputLocation); ++i) {
    if (calls[i].volume.largest < kSmallestInput) continue;
    candidates.emplace_back();
    candidates.back().call = calls[i];
    candidates.back().index = i;
  }
  return candidates;
}

// Whether it pays to look an input of `in_bytes` up in symmetric memory.
bool pays_to_look(const Group &group, size_t in_bytes) {
  return in_bytes >= kSmallestInput && group.size() != 1 && !group.spans_hosts() &&
         (in_bytes >= kSmallestCrowded || !group.is_crowded());
}

}  // namespace

std::shared_ptr<Symm> find_input(const Group &group, const void *in, size_t in_bytes) {
  const SymmDirectory &directory = SymmDirectory::of_process();
  if (!pays_to_look(group, in_bytes) || directory.empty()) return nullptr;
  return directory.find(group.members(), group.group_rank(), static_cast<const char *>(in), in_bytes);
}

bool may_find_input(const Group &group, size_t in_bytes) {
  const SymmDirectory &directory = SymmDirectory::of_process();
  return pays_to_look(group, in_bytes) && !directory.empty() && directory.has_any(group.members(), group.group_rank());
}

OperationPtr with_zero_copy_of_large(const Call &call, const Plan &plan, size_t in_bytes, OperationPtr staged) {
  const Group &group = call.group();
  const Kind kind = call.kind();
  const int root = call.root();
  if (call.options().algo != PHX_ALGO_AUTO || group.spans_hosts()) return staged;
  // The caller may change an input of at most this size as soon as the start returns, so peers cannot read it later.
  if (!plan.input_stays && in_bytes <= group.eager_bytes()) return staged;
  const bool reads = only_root_gives(kind) && group.group_rank() != root;  // this rank has no input
  Buffers buffers = call.buffers();
  if (!reads && buffers.in == nullptr) return staged;  // a list of blocks
  std::shared_ptr<Symm> symm = reads ? nullptr : find_input(group, buffers.in, in_bytes);
  if (reads ? !may_find_input(group, in_bytes) : symm == nullptr) return staged;
  std::vector<Candidate> candidates(1);
  if (reads) {
    candidates[0].place.key = kReads;
  } else {
    const size_t offset = offset_in(*symm, buffers.in);
    candidates[0].place = place_in(*symm, kind, buffers);
    candidates[0].direct =
        kind == Kind::kAllToAllV
            ? make_symm_all_to_all_v(call.group(), call.name(), std::move(symm), offset, buffers, 1, plan)
            : make_symm(kind, std::move(symm), offset, buffers, call.reduction(), root, plan);
  }
  buffers.lists = nullptr;  // valid only now
  candidates[0].call = {buffers, call.reduction(), call.record(), {}};
  return plan.make<ZeroCopy>(call, plan, std::vector<CoalescedCall>(), std::move(candidates), std::move(staged));
}

OperationPtr coalesced_with_zero_copy(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls) {
  const Group &group = call.group();
  const SymmDirectory &directory = SymmDirectory::of_process();
  if (directory.empty() || group.size() == 1 || group.spans_hosts() || call.options().algo != PHX_ALGO_AUTO)
    return make_coalesced(plan, calls);
  std::vector<Candidate> candidates = candidates_of(calls, plan.lane);
  const size_t most_kept = plan.input_stays ? 0 : group.eager_bytes();  // may change after the start
  const int self = group.group_rank();
  size_t own = 0, others = 0;  // bytes
  for (Candidate &candidate : candidates) {
    const CoalescedCall &part = candidate.call;
    const Buffers &buffers = part.buffers;
    const size_t bytes = part.volume.largest;
    if (bytes <= most_kept) continue;
    if (only_root_gives(part.kind()) && part.root() != self) {
      others += bytes;
      continue;
    }
    // A reduction in two steps needs more arrivals than the one that all direct calls share.
    if (sums_by_parts(part.kind(), buffers.in == buffers.out, group.size(), PHX_ALGO_AUTO)) continue;
    std::shared_ptr<Symm> symm = directory.find(group.members(), self, buffers.in, bytes);
    if (symm == nullptr) continue;
    own += bytes;
    candidate.place = place_in(*symm, part.kind(), buffers);
    candidate.direct = make_symm(part.kind(), std::move(symm), 0, buffers, part.reduction, part.root(), plan);
  }
  const bool reads = may_find_input(group, others);
  if (!pays_to_look(group, own + (reads ? others : 0))) return make_coalesced(plan, calls);
  OperationPtr staged;
  if (own == 0) staged = make_coalesced(plan, calls);
  for (Candidate &candidate : candidates) {
    const CoalescedCall &part = candidate.call;
    if (reads && only_root_gives(part.kind()) && part.root() != self) candidate.place.key = kReads;
  }
  return plan.make<ZeroCopy>(call, plan, calls, std::move(candidates), std::move(staged));
}

}  // namespace phx
