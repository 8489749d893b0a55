// Coalesced calls of which some have inputs in symmetric memory: those are all read at once, where they lie, and the
// rest becomes what it would be as a list of its own.
//
// A rank that has such inputs leaves a table of their places in its slot, one for each call that is large enough; one
// that has none puts what the whole list asks for. If everybody has a table, or at least can read in others' places
// (kReads), each call is decided by the places of all ranks: alike on all, as all look at the same ones. Otherwise the
// tables make way for the list. The arrival after the reading is the first of the rest. Only after a broadcast or a
// scatter there is one before it, in which ranks say what they could not find, as in recognised_root.cpp; the rest has
// that too.
#include <algorithm>
#include <cstring>

#include "base/hash.h"
#include "group/lane.h"
#include "ops/recognised.h"
#include "symm/directory.h"

namespace phx {
namespace {

bool only_root_gives(const CoalescedCall &call) { return traits_of(call.kind).root == Root::kGives; }

// A call of at least kSmallestInput bytes (smaller ones are packed for less than it takes to look for them), and where
// this rank's input lies.
struct Candidate {
  size_t call = 0;
  Place place;
  std::shared_ptr<Symm> symm;
};

// The same calls on all ranks. What fits into a slot.
std::vector<Candidate> candidates_of(const std::vector<CoalescedCall> &calls, const Lane &lane) {
  const int n = lane.group_size();
  std::vector<Candidate> found;
  for (size_t i = 0; i < calls.size() && found.size() < lane.slot_bytes() / sizeof(Place); ++i)
    if (input_bytes(calls[i], n, std::max(calls[i].root, 0)) >= kSmallestInput) found.push_back({i, {}, nullptr});
  return found;
}

class Listed final : public Operation {
 public:
  // `whole`: put at once by a rank that has no table.
  Listed(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls, std::vector<Candidate> candidates,
         OperationPtr whole)
      : Operation({}, 0),
        group_(call.group()),
        engine_(call.engine()),
        plan_(plan),
        n_(plan.lane.group_size()),
        self_(plan.lane.group_rank()),
        calls_(calls),
        candidates_(std::move(candidates)),
        staged_(std::move(whole)) {
    place.key = staged_ == nullptr ? 1 : kReads;
    reach = std::max(candidates_.size() * sizeof(Place), staged_ == nullptr ? 0 : staged_->reach);
    rounds = std::max<uint32_t>(2, staged_ == nullptr ? 0 : staged_->rounds);  // until it is known what is done
  }

  bool takes_from_places(const Lane &lane, uint64_t epoch) override {
    if (state_ == State::kUndecided) {
      by_tables_ = all_read(lane, epoch);
      if (by_tables_) {
        choose(read_tables(lane, epoch));
        after_tables();
      } else {
        if (staged_ == nullptr) staged_ = make_coalesced(plan_, calls_);
        begin_staged(0);
      }
    }
    return by_tables_;
  }

  void put(const Lane &lane, uint32_t round, uint64_t epoch) override {
    char *const slot = lane.data(self_, epoch);
    if (state_ == State::kStaged) {
      staged_->put(lane, round - base_, epoch);
    } else if (state_ == State::kAsking) {
      std::memcpy(slot, missed_.data(), missed_.size());
    } else if (staged_ != nullptr) {
      staged_->first_epoch = epoch;
      staged_->put(lane, 0, epoch);
    } else {
      for (size_t i = 0; i < candidates_.size(); ++i)
        std::memcpy(slot + i * sizeof(Place), &candidates_[i].place, sizeof(Place));
    }
  }

  phx_status take(const Lane &lane, uint32_t round, uint64_t epoch) override {
    if (round == 0 && by_tables_) {
      for (const SymmOperationPtr &each : direct_)
        if (each != nullptr) each->take(lane, 0, epoch);
      return PHX_OK;
    }
    if (state_ == State::kAsking) {
      hear_missed(lane, epoch);
      return PHX_OK;
    }
    const phx_status status = staged_->take(lane, round - base_, epoch);
    rounds = base_ + staged_->rounds;
    return status;
  }

  uint64_t done_after(uint64_t epoch) const override {
    return state_ == State::kStaged && epoch >= staged_->first_epoch ? staged_->done_after(epoch) : epoch;
  }
  bool exclusive() const override { return state_ == State::kStaged && staged_->exclusive(); }
  bool takes_input_at_once() const override { return false; }
  void keep_input(size_t limit) override {
    if (staged_ != nullptr) staged_->keep_input(limit);
    size_t total = 0;
    const auto bytes_of = [&](const CoalescedCall &call) {
      const size_t bytes = input_bytes(call, n_, self_);
      return bytes <= limit ? bytes : 0;
    };
    for (const CoalescedCall &call : calls_) total += bytes_of(call);
    kept_.resize(total);
    char *to = kept_.data();
    for (CoalescedCall &call : calls_) {
      const size_t bytes = bytes_of(call);
      if (bytes == 0) continue;
      std::memcpy(to, call.buffers.in, bytes);
      call.buffers.in = to;
      to += bytes;
    }
  }
  void end() override {
    direct_.clear();
    candidates_.clear();
    staged_.reset();
  }

 private:
  enum class State : uint8_t { kUndecided, kAsking, kStaged };

  // Whether somebody has a table, and everybody may go by it.
  bool all_read(const Lane &lane, uint64_t epoch) const {
    bool any = false;
    for (int i = 0; i < n_; ++i) {
      const Place at = lane.place(i, epoch);
      if (at.key == 0) return false;
      any = any || at.leaves_slot_empty();
    }
    return any;
  }

  // By rank, of each candidate. Read once: all that is done goes by one copy.
  std::vector<Place> read_tables(const Lane &lane, uint64_t epoch) const {
    const size_t row = candidates_.size();
    std::vector<Place> tables(n_ * row);
    for (int i = 0; i < n_; ++i) {
      if (lane.place(i, epoch).leaves_slot_empty()) {
        std::memcpy(&tables[i * row], lane.data(i, epoch), row * sizeof(Place));
        continue;
      }
      for (size_t k = 0; k < row; ++k) {
        const CoalescedCall &call = calls_[candidates_[k].call];
        if (only_root_gives(call) && call.root != i) tables[i * row + k].key = kReads;
      }
    }
    return tables;
  }

  // Makes the operations of those calls that are done directly; notes what this rank has to read and cannot find.
  void choose(const std::vector<Place> &tables) {
    const size_t row = candidates_.size();
    is_direct_.assign(calls_.size(), 0);
    missed_.assign(row, 0);
    for (size_t k = 0; k < row; ++k) {
      Candidate &candidate = candidates_[k];
      const CoalescedCall &call = calls_[candidate.call];
      const bool rooted = only_root_gives(call);
      const Place &from = tables[(rooted ? call.root : self_) * row + k];
      bool fits = from.leaves_slot_empty();
      for (int i = 0; i < n_ && fits; ++i) {
        const uint64_t key = tables[i * row + k].key;
        fits = rooted ? key != 0 : key == from.key;
      }
      if (!fits) continue;
      SymmOperationPtr made = make(candidate, call, from.key);
      bool inside = made != nullptr;
      for (int i = 0; i < n_ && inside; ++i)
        if (!rooted || i == call.root) inside = made->move_input(i, tables[i * row + k].offset);
      if (!inside && !rooted) continue;  // on all ranks alike
      is_direct_[candidate.call] = 1;
      ++count_;
      asks_ = asks_ || rooted;
      missed_[k] = !inside;
      direct_.push_back(inside ? std::move(made) : nullptr);
    }
  }

  SymmOperationPtr make(Candidate &candidate, const CoalescedCall &call, uint64_t key) {
    if (candidate.symm == nullptr) candidate.symm = SymmDirectory::of_process().find_key(group_.members(), self_, key);
    if (candidate.symm == nullptr) return nullptr;
    return make_symm(call.kind, candidate.symm, 0, call.buffers, call.reduction, call.root, plan_);
  }

  void after_tables() {
    if (asks_) {
      state_ = State::kAsking;
      rounds = 2;
      return;
    }
    engine_.count_zero_copies(count_);
    make_rest(1);
  }

  void hear_missed(const Lane &lane, uint64_t epoch) {
    for (int i = 0; i < n_; ++i) {
      const char *const slot = lane.data(i, epoch);
      for (size_t k = 0; k < candidates_.size(); ++k) {
        char &direct = is_direct_[candidates_[k].call];
        if (slot[k] == 0 || direct == 0) continue;
        direct = 0;
        --count_;
      }
    }
    engine_.count_zero_copies(count_);
    if (std::count(is_direct_.begin(), is_direct_.end(), 0) != 0) make_rest(2);
  }

  void make_rest(uint32_t base) {
    std::vector<CoalescedCall> rest;
    for (size_t i = 0; i < calls_.size(); ++i)
      if (is_direct_[i] == 0) rest.push_back(calls_[i]);
    staged_ = make_coalesced(plan_, rest);
    begin_staged(base);
  }

  void begin_staged(uint32_t base) {
    state_ = State::kStaged;
    base_ = base;
    staged_->first_epoch = first_epoch + base;
    rounds = base + staged_->rounds;
    reach = staged_->reach;
  }

  Group &group_;
  Engine &engine_;
  const Plan plan_;
  const int n_;
  const int self_;
  std::vector<CoalescedCall> calls_;
  std::vector<Candidate> candidates_;
  std::vector<char> kept_;
  State state_ = State::kUndecided;
  bool by_tables_ = false;
  OperationPtr staged_;                   // the whole list, or its rest
  uint32_t base_ = 0;                     // the round in which the rest begins
  std::vector<SymmOperationPtr> direct_;  // NULL: one that this rank missed
  std::vector<char> is_direct_;           // by call
  std::vector<char> missed_;              // by candidate: what this rank has to read and does not find
  size_t count_ = 0;                      // of calls that are done directly
  bool asks_ = false;                     // whether one of them could be missed
};

}  // namespace

OperationPtr recognise_list(const Call &call, const Plan &plan, const std::vector<CoalescedCall> &calls) {
  const Group &group = call.group();
  const SymmDirectory &directory = SymmDirectory::of_process();
  if (directory.empty() || group.size() == 1 || call.options().algo != PHX_ALGO_AUTO)
    return make_coalesced(plan, calls);
  std::vector<Candidate> candidates = candidates_of(calls, plan.lane);
  const size_t most_kept = plan.blocking ? 0 : group.eager_bytes();  // may be changed after the start
  const int self = group.group_rank();
  size_t own = 0, others = 0;  // bytes
  for (Candidate &candidate : candidates) {
    const CoalescedCall &each = calls[candidate.call];
    const size_t bytes = input_bytes(each, group.size(), std::max(each.root, 0));
    if (bytes <= most_kept) continue;
    if (only_root_gives(each) && each.root != self) {
      others += bytes;
      continue;
    }
    const bool in_place = each.kind == Kind::kAllReduce && each.buffers.in == each.buffers.out;
    // It would take arrivals of its own.
    if (sums_by_parts(each.kind, in_place, group.size(), PHX_ALGO_AUTO)) continue;
    candidate.symm = directory.find(group.members(), self, each.buffers.in, bytes);
    if (candidate.symm == nullptr) continue;
    own += bytes;
    const char *const base = static_cast<const char *>(candidate.symm->block().base);
    const uint64_t facts[2] = {candidate.symm->key(), in_place};
    candidate.place = {only_root_gives(each) ? candidate.symm->key() : hash_words(facts) | 1,
                       static_cast<size_t>(each.buffers.in - base)};
  }
  const bool reads = may_find_input(group, others);
  if (!pays_to_look(group, own + (reads ? others : 0))) return make_coalesced(plan, calls);
  OperationPtr whole;
  if (own == 0) whole = make_coalesced(plan, calls);
  for (Candidate &candidate : candidates) {
    const CoalescedCall &each = calls[candidate.call];
    if (reads && only_root_gives(each) && each.root != self) candidate.place.key = kReads;
  }
  return std::make_unique<Listed>(call, plan, calls, std::move(candidates), std::move(whole));
}

}  // namespace phx
